"""IDs of rollouts and of their requests, and the seeds of their turns."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from titan_rl.core.arrays import token_array
from titan_rl.rollout.types import Rollout
from titan_rl.types import SamplingParams


def new_rollout(group_id: str, sibling: int, sample: Any, attempt: int = 0) -> Rollout:
    """One that has not begun: "g17/3", or "g17/3~1" where that was run before."""
    rollout_id = f"{group_id}/{sibling}" + (f"~{attempt}" if attempt else "")
    return Rollout(rollout_id, group_id, sibling, sample)


def of_seat(game: Rollout, seat: str) -> Rollout:
    """What one trained seat will have done in a game: "g17/3/first"."""
    return Rollout(f"{game.rollout_id}/{seat}", game.group_id, game.sibling, game.sample, seat=seat)


def turn_seed(base: int, rollout_id: str, turn: int) -> int:
    """A seed of 63 bits for one turn, the same in every process.

    >>> turn_seed(0, "g0/0", 0) == turn_seed(0, "g0/0", 0) != turn_seed(0, "g0/0", 1)
    True
    """
    digest = hashlib.blake2b(repr((base, rollout_id, turn)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RequestIds:
    """IDs for the requests of a rollout that asks in an order of its own, several at once.

    An ID consists of the rollout's, a digest of prompt and sampling, and how many requests of that digest came before.
    No two requests of a rollout share one, however often it asks for the same. A rollout that is run again gives its
    requests the same IDs, also where they arrive in another order, so its recorded answers are found by them. Requests
    that differ in nothing may swap theirs.

    Example: `RequestIds("train-17/3").next(prompt, sampling)` is "train-17/3/5f0c41a2b9d63e87/0", and then ".../1".
    """

    def __init__(self, rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._num_asked: Counter[str] = Counter()  # by digest

    def next(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> str:
        try:
            prompt = token_array(prompt_token_ids).tobytes()
        except (TypeError, ValueError, OverflowError):  # not tokens, which whoever generates refuses
            prompt = repr(prompt_token_ids).encode(errors="backslashreplace")
        digest = hashlib.blake2b(prompt, digest_size=8)
        digest.update(repr(sampling).encode())
        name = digest.hexdigest()
        self._num_asked[name] += 1
        return f"{self._rollout_id}/{name}/{self._num_asked[name] - 1}"
