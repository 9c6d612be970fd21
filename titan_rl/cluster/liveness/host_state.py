"""What is told of a host of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostState:
    """One host.

    Args:
        address: of its worker, by which it is asked for: "10.0.0.1:22222".
        name: "" while it is not known yet.
        state: "joining", until its processes are up, "in the run", "draining", "left", once it is drained, or "gone",
            where it was lost.
        reason: why it drains, left, or is gone.
        processes: names of those that it has.
    """

    name: str
    address: str
    state: str
    reason: str = ""
    processes: tuple[str, ...] = ()
