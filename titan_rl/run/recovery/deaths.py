"""How often a run's trainer may die, and what is said of a death."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from titan_rl.cluster.processes.respawns import RespawnLimit, Respawns
from titan_rl.core.errors import ActorDiedError
from titan_rl.training.data.sample import TrainingSample

TRAINER = "trainer"
NAMED_GROUPS = 4
"""Of a step, in a message."""


class Deaths:
    """Counts them, and those within the same step.

    Args:
        max_respawns: as `training.max_respawns`.
    """

    def __init__(self, max_respawns: int) -> None:
        self._respawns = Respawns({TRAINER: RespawnLimit("training.max_respawns", max_respawns)})
        self._step: tuple[int, Sequence[TrainingSample]] | None = None
        self._within: Counter[int] = Counter()  # by step
        self.num_respawns = 0

    def within(self, step: int, samples: Sequence[TrainingSample]) -> None:
        """The next one to be noted cut this step short.

        Args:
            samples: that the step is trained on.
        """
        self._step = step, samples

    def note(self, why: str, *, excused: bool = False) -> str:
        """The message of a death after which another trainer is started.

        Args:
            excused: by what it was at, and counts for nothing: its host goes, or is gone.

        Raises:
            ActorDiedError: it was the one too many.
        """
        if excused:
            self._step = None
            return f"{why}; starting another trainer"
        if self._step is not None:
            (step, samples), self._step = self._step, None
            self._within[step] += 1
            why += f"; it was at step {step}"
            if (times := self._within[step]) > 1:
                why += f" for the {times}. time when it died, so what kills it may be in what that step is trained on: "
                why += named_groups(samples)
        replaced, count = self._respawns.take(TRAINER)
        if not replaced:
            raise ActorDiedError(f"{why}{count}")
        self.num_respawns += 1
        return f"{why}; starting another trainer{count}"


def named_groups(samples: Sequence[TrainingSample]) -> str:
    """ "train-4, train-5, train-6, train-7 and 12 more"."""
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    more = f" and {len(groups) - NAMED_GROUPS} more" if len(groups) > NAMED_GROUPS else ""
    return ", ".join(groups[:NAMED_GROUPS]) + more
