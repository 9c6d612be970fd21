"""How long the router waits for anything. Nothing in it waits without one of these."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds.

    Raises:
        ValueError: names the field that is not positive.
    """

    no_replica_s: float = 300.0  # a request waits for enough replicas in service, or a pull for one
    paused_s: float = 3600.0  # a request waits for `resume`
    pull_s: float = 120.0  # one replica loads one version
    drain_s: float = 300.0  # a replica's requests finish before a pull; what is left is aborted
    finish_s: float = 300.0  # pause("wait"): requests finish; what is left is aborted
    abort_s: float = 30.0  # aborted requests return; what is left is cancelled
    reabort_interval_s: float = 2.0  # an abort is repeated for requests that reached their engine after it
    cancel_s: float = 5.0  # cancelled calls and tasks end; what is left is logged and let go
    call_s: float = 10.0  # one pause, resume, abort or close call to a replica
    blame_s: float = 2.0  # replicas that failed a request go on to serve others, if it is the request's fault
    quarantine_s: float = 1.0  # before a failed replica is tried again; doubles with each failure in a row
    max_quarantine_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"Limits.{field.name} is {getattr(self, field.name)!r}; it must be above 0")
