"""What a rollout is called, and the seeds of its turns."""

from __future__ import annotations

import hashlib
from typing import Any

from titan_rl.rollout.types import Rollout


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
