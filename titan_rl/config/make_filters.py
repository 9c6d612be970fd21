"""The filters of groups that a config describes."""

from __future__ import annotations

from functools import partial

from titan_rl.config.run import RunConfig
from titan_rl.rollout.task import FilteringTask, Task, drop_reason
from titan_rl.scheduling.filters import GroupFilter, too_few_siblings, too_long
from titan_rl.scheduling.registry import find_filter


def make_filters(config: RunConfig, task: Task) -> list[GroupFilter]:
    """What always makes a group unfit for training, then those that `scheduling.filters` names, then the task's own."""
    named = [find_filter(name) for name in config.scheduling.filters]
    own = [partial(drop_reason, task)] if isinstance(task, FilteringTask) else []
    return [too_few_siblings, too_long(config.training.row_tokens), *named, *own]
