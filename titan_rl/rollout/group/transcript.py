"""Records of rollouts: the transcript, its tokens, and errors counted by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from titan_rl.core.arrays import token_array
from titan_rl.core.plain_data import plain_json
from titan_rl.rollout.renderer.tokenizer import TokenTexts
from titan_rl.rollout.shared_tokens import num_shared
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn

_FIRST, _LAST = 100, 500  # characters of an error's text in a message; the cause is often at the end


def error_kind(rollout: Rollout) -> str:
    """Key of a rollout's error, equal for errors of the same type from the same line even if their texts differ."""
    return f"{rollout.status}: {rollout.failure.kind}" if rollout.failure is not None else str(rollout.status)


def error_text(rollout: Rollout) -> str:
    """Status and error of a rollout, shortened: `error_env: KeyError: 'answer' (env.py:17 in step)`."""
    text = _full_text(rollout)
    shown = text if len(text) <= _FIRST + _LAST else f"{text[:_FIRST]} ... {text[-_LAST:]}"
    return f"{rollout.status}: {shown}"


def error_in_full(rollout: Rollout) -> str:
    """Status and full error of a rollout, with the traceback."""
    trace = f"\n{rollout.failure.traceback}" if rollout.failure is not None else ""
    return f"{rollout.status}: {_full_text(rollout)}{trace}"


def _full_text(rollout: Rollout) -> str:
    return str(rollout.error) if rollout.failure is None else str(rollout.failure)


def _in_a_line(text: str) -> str:
    """First and last line of a text."""
    lines = text.splitlines()
    return text if len(lines) < 2 else f"{lines[0]} ... {lines[-1]}"


class ErrorCounts:
    """Counts of rollouts lost to errors, by kind of error.

    Example:

        counts = ErrorCounts()
        counts.add(group.rollouts)
        counts.describe()   # "30 of 32 rollouts were lost to errors, 29 of them to error_env: KeyError: 'a' (e.py:7)"
    """

    def __init__(self) -> None:
        self.num_rollouts = 0
        self._counts: Counter[str] = Counter()
        self._texts: dict[str, str] = {}  # text of the first error of each kind

    def add(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            self.num_rollouts += 1
            if rollout.status.is_fault:
                kind = error_kind(rollout)
                self._counts[kind] += 1
                self._texts.setdefault(kind, _in_a_line(error_text(rollout)))

    def add_group(self, group: RolloutGroup) -> None:
        """Add all rollouts of a group. A failed reward counts as an error of each rollout."""
        if group.failure is None:
            self.add(group.rollouts)
        else:
            self.num_rollouts += len(group.rollouts)
            self._counts[group.failure.kind] += len(group.rollouts)
            self._texts.setdefault(group.failure.kind, str(group.failure))

    @property
    def num_errors(self) -> int:
        return self._counts.total()

    def most_common(self) -> list[tuple[str, int]]:
        """One line for each kind of error (its first text) with its number of rollouts, the most frequent first."""
        return [(self._texts[kind], count) for kind, count in self._counts.most_common()]

    def describe(self) -> str:
        """Number of errors, and the most frequent one; empty without errors."""
        if not self._counts:
            return ""
        text, count = self.most_common()[0]
        hit = "all of them" if count == self.num_errors else f"{count} of them"
        return f"{self.num_errors} of {self.num_rollouts} rollouts were lost to errors, {hit} to {text}"


_DIGITS = 4


class TokenRecords:
    """Makes the token records of a transcript, one for each turn.

    Args:
        texts: Converts tokens to texts; None if the tokens have no known text.
        max_token_age: Age in versions above which tokens are not trained on. None sets no limit.
    """

    def __init__(self, texts: TokenTexts | None, max_token_age: int | None = None) -> None:
        self._texts = texts
        self._max_token_age = max_token_age

    def of(self, rollout: Rollout, trained_at: int | None) -> list[dict[str, Any]]:
        """Token records of a rollout, one for each turn.

        Args:
            rollout: The rollout.
            trained_at: Version from which the step on the rollout starts; None if it is not trained on.

        Returns:
            shared: Number of leading prompt tokens shared with the previous prompt and completion.
            prompt: `ids` and `text` of the other prompt tokens.
            completion: `ids`, `text` and `logprobs`, as sampled, of the completion tokens.
            trained: Whether the tokens are trained, as in `build_samples`: one value for all, or one for each.
            advantages: Advantages of the tokens: one value for all, or one for each; None if there are none.
            `text` has an item for each token, see `TokenTexts`; it is None if it is not known.
        """
        records: list[dict[str, Any]] = []
        before: Turn | None = None
        for turn in rollout.turns:
            shared = num_shared(before, turn)
            prompt = token_array(turn.prompt_token_ids)[shared:].tolist()
            completion = token_array(turn.completion.token_ids).tolist()
            logprobs = [round(float(logprob), _DIGITS) + 0.0 for logprob in turn.completion.logprobs]
            records.append(
                {
                    "shared": shared,
                    "prompt": self._read(prompt),
                    "completion": {**self._read(completion), "logprobs": logprobs},
                    "trained": self._trained(rollout, turn, trained_at),
                    "advantages": _advantages(rollout, turn),
                }
            )
            before = turn
        return records

    def _read(self, token_ids: list[int]) -> dict[str, Any]:
        try:
            text = None if self._texts is None else self._texts.of(token_ids)
        except Exception:  # an environment may use tokens that the tokenizer lacks
            text = None
        return {"ids": token_ids, "text": text}

    def _trained(self, rollout: Rollout, turn: Turn, trained_at: int | None) -> bool | list[bool]:
        if trained_at is None or rollout.advantage is None:
            return False
        if rollout.status.is_fault or rollout.status is RolloutStatus.ABORTED:
            return False
        oldest = 0 if self._max_token_age is None else trained_at - self._max_token_age
        if all(span.version >= oldest for span in turn.completion.version_spans):
            return True
        return [version >= oldest for version in turn.completion.versions]


def _advantages(rollout: Rollout, turn: Turn) -> float | list[float] | None:
    if rollout.advantage is None:
        return None
    if turn.token_advantages is None:
        return round(rollout.advantage, _DIGITS)
    return [round(rollout.advantage + float(own), _DIGITS) for own in turn.token_advantages]


def transcript(rollout: Rollout, tokens: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Human-readable transcript of a rollout, as values that JSON preserves.

    Tokens are only counted, unless `tokens` are given. Other values are converted by `plain_json`: objects become their
    `str`, and NaN becomes null. In an environment with several seats, the transcript also has `seat`. If an exception
    ended the rollout, it has `error_at`, the place in the user's code.

    Example: one turn whose last two tokens came from newer weights:

        {"rollout_id": "g17/3", "group_id": "g17", "sibling": 3, "status": "completed", "error": None,
         "reward": 0.74, "reward_breakdown": {"similarity": 0.675, "well_formed": 1.0}, "advantage": 0.31,
         "messages": [{"role": "user", "content": "Sort: Bo, Al"}, {"role": "assistant", "content": "Al, Bo"}],
         "num_completion_tokens": 5, "versions": [6, 7],
         "turns": [{"request_id": "g17/3/0", "num_prompt_tokens": 12, "num_completion_tokens": 5,
                    "finish_reason": "stop", "version_spans": [[6, 3], [7, 2]], "rewards": {},
                    "sampling": {"max_tokens": 64, "temperature": 1.0, ...}}],
         "metrics": {"seconds": 0.4}}

    Args:
        rollout: The rollout.
        tokens: Token records of each turn, from `TokenRecords.of`, for the turns' `tokens`.
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
        | ({} if tokens is None else {"tokens": tokens[index]})
        for index, turn in enumerate(rollout.turns)
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
