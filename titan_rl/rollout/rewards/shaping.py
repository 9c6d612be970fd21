"""Rewards that depend on length alone, to be weighed in beside a task's own."""

from __future__ import annotations

from titan_rl.rollout.types import Rollout


class SoftOverlong:
    """Penalizes answers that come near the length limit, before it cuts them off.

        0                                      up to max_tokens - margin
        (max_tokens - margin - length) / margin    in the margin, falling to -1
        -1                                     beyond max_tokens

    The soft overlong punishment of DAPO (Yu et al., 2025, arXiv:2503.14476, eq. 13). The length is that of the
    rollout's longest completion, in tokens.

    Example:

        Rubric([Reward(correct), Reward(SoftOverlong(max_tokens=1024, margin=256), name="overlong")])

    Raises:
        ValueError: the margin is not between 1 and max_tokens.
    """

    def __init__(self, max_tokens: int, margin: int) -> None:
        are_integers = isinstance(margin, int) and isinstance(max_tokens, int)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not (are_integers and 1 <= margin <= max_tokens):
            raise ValueError(f"SoftOverlong margin is {margin}; it must be between 1 and max_tokens, {max_tokens}")
        self._max_tokens = max_tokens
        self._margin = margin

    def __call__(self, rollout: Rollout) -> float:
        length = max((len(turn.completion.token_ids) for turn in rollout.turns), default=0)
        return max(-1.0, min(0.0, (self._max_tokens - self._margin - length) / self._margin))
