"""Frozen versions of a run, which are written at intervals, added to the leagues of its tasks, and deleted when they
are no longer needed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import CheckpointError
from titan_rl.run.journal.state import RunState
from titan_rl.scheduling.curriculum import Curriculum
from titan_rl.scheduling.task_mix import TaskMix
from titan_rl.tasks.league import LeagueCurriculum, split_number, version_name, win_rates
from titan_rl.tasks.players import SeatedTask
from titan_rl.training.state.checkpoint import list_checkpoints
from titan_rl.training.trainer_protocol import Trainer

logger = logging.getLogger(__name__)


def curriculum_of(source: TaskSource, seed: int) -> Curriculum:
    """Curriculum of a task. If versions of the run play seats of the task, it also chooses the opponents."""
    task = source.task
    if isinstance(task, SeatedTask) and task.league is not None:
        return LeagueCurriculum(source.curriculum, task.league, seed)
    return source.curriculum


class FrozenVersions:
    """Versions of a run in a folder, named by `version_name`. The initial model is version 0, which needs no folder.

    A version is written to the disk before a league has it. It is deleted once it is needed neither by a league, nor by
    a kept checkpoint, from which the run may resume, nor by an open group.

    Args:
        folder: Folder of the versions, which is created when the first one is written.
        checkpoints: Folder of the run's checkpoints.
    """

    def __init__(self, config: RunConfig, mix: TaskMix, trainer: Trainer, folder: Path, checkpoints: Path) -> None:
        self._intervals = {
            source.name: task.league.every
            for source in config.tasks
            if isinstance(task := source.task, SeatedTask) and task.league is not None
        }
        self._mix = mix
        self._trainer = trainer
        self._folder = folder
        self._checkpoints = checkpoints

    def is_due(self, version: int) -> bool:
        """Return whether a version must be added to a league."""
        return version > 0 and any(version % every == 0 for every in self._intervals.values())

    async def freeze(self, version: int) -> None:
        """Write the trainer's current version, unless it is already written, and add it to the leagues for which it is
        due.

        Raises:
            CheckpointError: The version cannot be written.
        """
        path = self._folder / version_name(version)
        if not path.exists():
            await in_thread(self._folder.mkdir, parents=True, exist_ok=True)
            await self._trainer.export(path)
        for task, every in self._intervals.items():
            if version % every == 0:
                self._mix.frozen(task, version)
        await in_thread(self._delete_others, self._needed(self._mix.state()))

    def metrics(self) -> dict[str, float]:
        """Number of versions in all leagues, and the mean estimated probability that the policy wins against one of
        them."""
        if not self._intervals:
            return {}
        states = map(self._mix.curriculum_state, self._intervals)
        rates = [rate for state in states for rate in win_rates(state).values()]
        return {"league/versions": float(len(rates)), "league/win_rate": sum(rates) / len(rates)}

    def _needed(self, mix: dict[str, object]) -> set[str]:
        """Names of the versions that leagues and open groups need in a state of the task mix."""
        curricula, open_groups = mix["curricula"], mix["open"]
        assert isinstance(curricula, dict)
        assert isinstance(open_groups, list)
        steps = {int(step) for task in self._intervals for step in curricula[task]["versions"]}
        steps |= {
            opponent
            for _, task, number, *_ in open_groups
            if task in self._intervals and (opponent := split_number(number)[1]) is not None
        }
        return {version_name(step) for step in steps}

    def _delete_others(self, needed: set[str]) -> None:
        for checkpoint in list_checkpoints(self._checkpoints):
            try:
                needed |= self._needed(dict(RunState.read(checkpoint).tasks))
            except (CheckpointError, LookupError, TypeError, ValueError) as error:
                logger.warning("no version is deleted, since %s cannot be read: %s", checkpoint, error)
                return
        for path in self._folder.iterdir():
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)
