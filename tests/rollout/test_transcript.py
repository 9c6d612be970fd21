"""Transcripts: the human-readable parts of a rollout, as values that JSON preserves."""

import json
from typing import Any

import pytest

from titan_rl import Completion, FinishReason, Rollout, RolloutStatus, SamplingParams, Turn, VersionSpan
from titan_rl.rollout.group.transcript import error_text, transcript


class Odd:
    def __str__(self) -> str:
        return "odd"


def test_transcript_round_trips_through_json() -> None:
    completion = Completion("g/3/0", [5, 9, 2], [-0.1] * 3, FinishReason.STOP, (VersionSpan(6, 1), VersionSpan(7, 2)))
    sampling = SamplingParams(max_tokens=8, temperature=0.5, seed=2**62, stop_token_ids=(2,))
    rollout = Rollout(
        "g/3",
        "g",
        3,
        sample=Odd(),
        status=RolloutStatus.TRUNCATED_TURNS,
        turns=[Turn([1, 2], completion, {"so_far": 0.5}, sampling=sampling)],
        messages=[{"role": "user", "content": "héllo"}, {"role": "tool", "content": {1: (Odd(), True, None)}}],
        error="close: KeyError: 'x'",
        reward=0.5,
        reward_breakdown={"a": 0.5},
        advantage=-1.0,
        metrics={"seconds": float("nan")},
    )
    plain: dict[str, Any] = transcript(rollout)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain == {
        "rollout_id": "g/3",
        "group_id": "g",
        "sibling": 3,
        "status": "truncated_turns",
        "error": "close: KeyError: 'x'",
        "reward": 0.5,
        "reward_breakdown": {"a": 0.5},
        "advantage": -1.0,
        "messages": [{"role": "user", "content": "héllo"}, {"role": "tool", "content": {"1": ["odd", True, None]}}],
        "num_completion_tokens": 3,
        "versions": [6, 7],
        "turns": [
            {
                "request_id": "g/3/0",
                "num_prompt_tokens": 2,
                "num_completion_tokens": 3,
                "finish_reason": "stop",
                "version_spans": [[6, 1], [7, 2]],
                "rewards": {"so_far": 0.5},
                "sampling": {
                    "max_tokens": 8,
                    "temperature": 0.5,
                    "top_p": 1.0,
                    "top_k": -1,
                    "min_p": 0.0,
                    "min_tokens": 0,
                    "seed": 2**62,
                    "stop_token_ids": [2],
                    "return_routed_experts": False,
                    "top_logprobs": 0,
                    "prompt_logprobs": None,
                    "presence_penalty": 0.0,
                    "frequency_penalty": 0.0,
                    "repetition_penalty": 1.0,
                    "logit_bias": [],
                    "constraint": None,
                    "num_continued": 0,
                },
            }
        ],
        "metrics": {"seconds": None},
    }
    assert type(plain["status"]) is str


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a" * 600, "a" * 600),
        ("a" * 100 + "b" + "c" * 500, "a" * 100 + " ... " + "c" * 500),
    ],
)
def test_long_error_keeps_its_beginning_and_end(text: str, shown: str) -> None:
    rollout = Rollout("g/3", "g", 3, sample=0, status=RolloutStatus.ERROR_ENV, error=text)
    assert error_text(rollout) == f"error_env: {shown}"
