"""What runs groups: a `Rollouter` in this process, or others behind something that looks like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.types import GenerateFn, SamplingParams


class GroupRunner(Protocol):
    """Runs the groups of a run: a `Rollouter`, or the workers that each have one."""

    async def run_group(
        self,
        generate: GenerateFn,
        sample: Any,
        *,
        group_id: str,
        group_size: int,
        sampling: SamplingParams,
        on_finished: Callable[[Rollout], None] | None = None,
    ) -> RolloutGroup:
        """Run, score and compare the siblings of one sample; see `Rollouter.run_group`."""
        ...

    def pause_judging(self) -> None:
        """Generation is paused; see `Rollouter.pause_judging`."""
        ...

    def resume_judging(self) -> None: ...
