"""Which stage of a step the training loop is in: a lane of the timeline, and the times that metrics have."""

from __future__ import annotations

from collections import defaultdict
from enum import Enum

from titan_rl.core.tracing.spans import Track


class Stage(Enum):
    """A state of the loop: what it is called, the part of the run that it belongs to, whether the trainer waits in it,
    and the metric of its time."""

    BATCH = ("waiting for a batch", "scheduler", True, "time/wait_for_rollouts_s")
    SAMPLES = ("building samples", "trainer", False, "time/samples_s")
    TRAIN = ("train step", "trainer", False, "time/train_s")
    WAIT_FOR_PULL = ("waiting for the pull before", "sync", True, "sync/wait_for_pull_s")
    PUBLISH = ("begin to publish", "sync", False, "sync/begin_publish_s")
    VALIDATION = ("validation", "validation", False, "time/validation_s")
    CHECKPOINT = ("checkpoint", "checkpoint", False, "time/checkpoint_s")

    def __init__(self, called: str, kind: str, is_idle: bool, metric: str) -> None:
        self.called = called
        self.kind = kind
        self.is_idle = is_idle
        self.metric = metric


STEP = (Stage.BATCH, Stage.SAMPLES, Stage.TRAIN, Stage.WAIT_FOR_PULL, Stage.PUBLISH)
"""Those that a step is made of."""


class LoopStages:
    """The loop is in one stage at a time."""

    def __init__(self) -> None:
        self._track = Track("steps", "trainer")
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, stage: Stage, step: int) -> None:
        """From now on, for this step."""
        self._track.enter(stage.called, kind=stage.kind, idle=stage.is_idle, step=step)

    def metrics(self) -> dict[str, float]:
        """Of the time since `begin_step`, by their full names, `time/step_s` among them."""
        for called, seconds in self._track.take().items():
            self._seconds[called] += seconds
        times = {stage.metric: self._seconds[stage.called] for stage in Stage}
        return times | {"time/step_s": sum(times[stage.metric] for stage in STEP)}

    def begin_step(self) -> None:
        """What comes now is of the next step."""
        self._track.take()
        self._seconds.clear()

    def close(self) -> None:
        self._track.close()
