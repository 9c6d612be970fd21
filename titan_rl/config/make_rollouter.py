"""The rollouters that a config describes: one for each task."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.config.make_renderer import make_renderer
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.rewards.registry import find_advantage
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.task import RunContext, calling, opened, wrong_result

if TYPE_CHECKING:
    from titan_rl.config.run import RunConfig
    from titan_rl.config.tasks import TaskSource


def make_rollouter(config: RunConfig, source: TaskSource, renderer: Renderer | None = None) -> Rollouter:
    """With the task of a source, its limits and its advantage.

    Args:
        renderer: by default the one that `model.renderer` names.

    Raises:
        DataError: the task has no rubric to give.
    """
    task = source.task
    renderer = renderer or make_renderer(config.model)
    with calling("rubric()", source.name):
        rubric: Any = task.rubric()
        if not isinstance(rubric, Rubric):
            raise wrong_result(task.rubric, f"it gave {rubric!r}; it must give a titan_rl.Rubric")
    return Rollouter(
        lambda sample: task.make_env(sample, renderer),
        rubric,
        advantage=find_advantage(config.advantage_of(source)),
        limits=config.limits_of(source),
        max_context=config.model.max_context,
        seed=config.seed if config.seeds_requests else None,
    )


@asynccontextmanager
async def open_rollouters(
    config: RunConfig,
    folder: Path,
    tell: Callable[[str], object],
    renderer: Renderer | None = None,
    *,
    dry: bool = False,
) -> AsyncGenerator[dict[str, Rollouter]]:
    """`make_rollouter` of each task, by the tasks' names, for the length of the block, with the tasks open.

    Args:
        folder: of the run.
        tell: takes what the tasks have to say to a person.
        dry: the tasks start nothing.
    """
    renderer = renderer or make_renderer(config.model)
    run = RunContext(config.model.path, renderer, config.model.max_context, folder, tell, dry)
    async with AsyncExitStack() as tasks:
        for source in config.sources:
            await tasks.enter_async_context(opened(source.task, run))
        yield {source.name: make_rollouter(config, source, renderer) for source in config.sources}
