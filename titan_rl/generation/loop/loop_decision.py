"""What the engine loop does next, as a value, so that several ranks can follow the one that decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from titan_rl.generation.request import EngineRequest


class LoopAction(StrEnum):
    """What a loop does, in the order in which they go first."""

    CLOSE = "close"
    WAKE = "wake"
    PULL = "pull"
    ABORT = "abort"
    SLEEP = "sleep"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class LoopDecision:
    """One turn of the loop. It pickles, and names everything that a follower needs.

    Example: two requests join the batch before this step.

        LoopDecision(LoopAction.STEP, requests=(first, second))
    """

    action: LoopAction
    version: int | None = None  # PULL: the version to load
    manifest: Any = None  # PULL: what a follower opens the version from
    request_ids: tuple[str, ...] = ()  # ABORT: the requests to forget
    requests: tuple[EngineRequest, ...] = ()  # STEP: what joins the batch first
