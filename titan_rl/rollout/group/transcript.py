"""One rollout as plain data: a line of `rollouts.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from titan_rl.core.calls.plain import plain_json
from titan_rl.rollout.types import Rollout


def transcript(rollout: Rollout, tokens: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """What a person wants to read of a rollout, and nothing that JSON would change.

    Tokens are counted, and listed in the `tokens` of each turn where they are given. What JSON has no word for is as
    `plain_json` puts it: objects become their `str`, and a NaN becomes null. One of several seats also has `seat`, and
    one that an exception ended `error_at`, its place in the user's code.

    Example, with one turn whose last two tokens came from newer weights:

        {"rollout_id": "g17/3", "group_id": "g17", "sibling": 3, "status": "completed", "error": None,
         "reward": 0.74, "reward_breakdown": {"similarity": 0.675, "well_formed": 1.0}, "advantage": 0.31,
         "messages": [{"role": "user", "content": "Sort: Bo, Al"}, {"role": "assistant", "content": "Al, Bo"}],
         "num_completion_tokens": 5, "versions": [6, 7],
         "turns": [{"request_id": "g17/3/0", "num_prompt_tokens": 12, "num_completion_tokens": 5,
                    "finish_reason": "stop", "version_spans": [[6, 3], [7, 2]], "rewards": {},
                    "sampling": {"max_tokens": 64, "temperature": 1.0, ...}}],
         "metrics": {"seconds": 0.4}}

    Args:
        tokens: of each turn, by `TokenRecords.of`.
    """
    turns = [
        {
            "request_id": turn.completion.request_id,
            "num_prompt_tokens": len(turn.prompt_token_ids),
            "num_completion_tokens": len(turn.completion.token_ids),
            "finish_reason": turn.completion.finish_reason,
            "version_spans": [[span.version, span.num_tokens] for span in turn.completion.version_spans],
            "rewards": turn.rewards,
            "sampling": None if turn.sampling is None else asdict(turn.sampling),
        }
        | ({} if tokens is None else {"tokens": tokens[place]})
        for place, turn in enumerate(rollout.turns)
    ]
    return plain_json(
        {
            "rollout_id": rollout.rollout_id,
            "group_id": rollout.group_id,
            "sibling": rollout.sibling,
            "status": rollout.status,
            "error": rollout.error,
            "reward": rollout.reward,
            "reward_breakdown": rollout.reward_breakdown,
            "advantage": rollout.advantage,
            "messages": rollout.messages,
            "num_completion_tokens": rollout.num_completion_tokens,
            "versions": sorted({span.version for turn in rollout.turns for span in turn.completion.version_spans}),
            "turns": turns,
            "metrics": rollout.metrics,
        }
        | ({} if rollout.seat is None else {"seat": rollout.seat})
        | ({} if rollout.failure is None else {"error_at": rollout.failure.where})
    )
