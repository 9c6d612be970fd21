"""The rollouter that a config describes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.config.make_renderer import make_renderer
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.rewards.registry import find_advantage
from titan_rl.rollout.task import RunContext, opened

if TYPE_CHECKING:
    from titan_rl.config.run import RunConfig


def make_rollouter(config: RunConfig, renderer: Renderer | None = None) -> Rollouter:
    """With the config's task, limits and advantage.

    Args:
        renderer: by default the one that `model.renderer` names.
    """
    task = config.task
    renderer = renderer or make_renderer(config.model)
    return Rollouter(
        lambda sample: task.make_env(sample, renderer),
        task.rubric(),
        advantage=find_advantage(config.training.advantage),
        limits=config.rollout,
        max_context=config.model.max_context,
        seed=config.seed,
    )


@asynccontextmanager
async def open_rollouter(
    config: RunConfig, folder: Path, tell: Callable[[str], object], renderer: Renderer | None = None
) -> AsyncGenerator[Rollouter]:
    """`make_rollouter` for the length of the block, with the task open.

    Args:
        folder: of the run.
        tell: takes what the task has to say to a person.
    """
    renderer = renderer or make_renderer(config.model)
    run = RunContext(config.model.path, renderer, config.model.max_context, folder, tell)
    async with opened(config.task, run):
        yield make_rollouter(config, renderer)
