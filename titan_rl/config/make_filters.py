"""The filters of groups that a config describes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.rollout.task import FilteringTask, drop_reason
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.filters import GroupFilter, first_reason, too_few_siblings, too_long
from titan_rl.scheduling.registry import find_filter


def make_filters(config: RunConfig, given: Sequence[GroupFilter] | None = None) -> list[GroupFilter]:
    """What always makes a group unfit for training, then what its task leaves out.

    Args:
        given: in the place of those that settings name.
    """
    of_tasks = {source.name: _filters_of(config, source, given) for source in config.tasks}

    def of_its_task(group: RolloutGroup) -> str | None:
        return first_reason(of_tasks[group.task], group)

    return [too_few_siblings, too_long(config.training.row_tokens), of_its_task]


def _filters_of(config: RunConfig, source: TaskSource, given: Sequence[GroupFilter] | None) -> list[GroupFilter]:
    """Those that are named for the task, or by `scheduling.filters`, then the task's own."""
    names = config.scheduling.filters if source.filters is None else source.filters
    own = [partial(drop_reason, source.task)] if isinstance(source.task, FilteringTask) else []
    return [*(map(find_filter, names) if given is None else given), *own]
