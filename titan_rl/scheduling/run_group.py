"""What a scheduler is given to run groups with."""

from __future__ import annotations

from typing import Protocol

from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.lease import Lease


class RunGroup(Protocol):
    """Given to the scheduler, which calls it for each group that it starts."""

    async def __call__(self, lease: Lease) -> RolloutGroup:
        """Run the group of training sample number `lease.index` to its end."""
        ...
