"""What the groups that run are at: a group is generated, or its environments are at it, or its rewards are."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from titan_rl.types import Completion, GenerateFn, SamplingParams


@dataclass(slots=True)
class GroupAtWork:
    """One group.

    Args:
        num_rollouts: that it has at least; a game has one for each seat.
    """

    num_rollouts: int
    num_requests: int = 0  # in flight
    num_ended: int = 0

    @property
    def state(self) -> str:
        """As `SLOT_STYLES` of the display has it."""
        if self.num_requests:
            return "generating"
        return "scoring" if self.num_ended >= self.num_rollouts else "in the environment"

    def track(self, generate: GenerateFn) -> GenerateFn:
        """`generate`, whose calls are counted."""

        async def tracked(
            prompt_token_ids: Sequence[int],
            *,
            request_id: str,
            session_id: str | None = None,
            sampling: SamplingParams,
        ) -> Completion:
            self.num_requests += 1
            try:
                return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)
            finally:
                self.num_requests -= 1

        return tracked

    def ended(self) -> None:
        """One of its rollouts is over."""
        self.num_ended += 1


class GroupsAtWork:
    """Those of a run, of training or of a validation."""

    def __init__(self) -> None:
        self._groups: list[GroupAtWork] = []
        self.num_done = 0

    @contextlib.contextmanager
    def one(self, num_rollouts: int) -> Generator[GroupAtWork]:
        """A group for the length of the block."""
        group = GroupAtWork(num_rollouts)
        self._groups.append(group)
        try:
            yield group
        finally:
            self._groups = [other for other in self._groups if other is not group]
            self.num_done += 1

    def states(self) -> Counter[str]:
        return Counter(group.state for group in self._groups)
