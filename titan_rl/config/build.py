"""Builders of the objects that a config describes: renderer, rollouters, group filters and training samples."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import get_protocol_members

from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.calls.pulse import PULSE
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import describe
from titan_rl.core.console import Console
from titan_rl.core.errors import ConfigError, MissingExtraError, ModelError
from titan_rl.core.model_identity import check_opened_models
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.registry import find_renderer, fit_template, load_tokenizer_for
from titan_rl.rollout.renderer.tokenizer import TokenTexts, load_tokenizer
from titan_rl.rollout.rewards.advantages import find_advantage
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.task import (
    FilteringTask,
    PromptedTask,
    RunContext,
    SingleTurnTask,
    calling,
    drop_reason,
    opened,
    wrong_result,
)
from titan_rl.rollout.types import RolloutGroup
from titan_rl.scheduling.filters import GroupFilter, find_filter, first_reason, too_few_siblings, too_long
from titan_rl.training.data.sample_builder import Distillation, RewardPlacement, SampleMaker
from titan_rl.training.settings import ModelConfig, TrainingConfig

VERSIONS = "league"
"""Folder of frozen versions in the folder of a run."""


def make_renderer(model: ModelConfig, *, single_turn: bool = False) -> Renderer:
    """Construct the renderer that `model.renderer` names, for the tokenizer of the model's folder.

    Args:
        single_turn: Whether no rollout has a second turn, so that the chat template need not be extendable.

    Raises:
        ModelError: The folder has no tokenizer, or no chat template that the built-in renderer can extend.
        ConfigError: The renderer does not exist, it refuses the tokenizer, or its result is not a renderer.
    """
    make = find_renderer(model.renderer, single_turn=single_turn)
    tokenizer = load_tokenizer_for(model.renderer, model.path)
    try:
        renderer: Any = make(tokenizer)
        lacking = [
            name for name in sorted(get_protocol_members(Renderer)) if not callable(getattr(renderer, name, None))
        ]
        if lacking:
            raise TypeError(f"it returned {renderer!r}, which has no {', '.join(lacking)}")
        if not renderer.get_stop_token_ids():
            raise ValueError("its get_stop_token_ids() returned no token that ends a completion")
        return renderer
    except ModelError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model.renderer = {model.renderer!r} gives no renderer for the tokenizer of {model.path}: "
            f"{describe(error)}; it is called with a tokenizer of transformers"
        ) from error


def is_single_turn(config: RunConfig) -> bool:
    """Check whether no rollout of a run can have a second turn."""
    return config.rollout.max_turns == 1 or all(
        isinstance(source.task, SingleTurnTask) and source.task.is_single_turn for source in config.sources
    )


def template_note(model: ModelConfig) -> str | None:
    """Return a note on the chat template of an exported model, or None if the model's own template renders prompts as
    training does."""
    return fit_template(model.path, model.renderer).message(model.renderer)


def learning_rate_note(training: TrainingConfig) -> str | None:
    """Return a note on a learning rate that is not the one recommended for adapters, or None if there is nothing to
    note."""
    if not training.adapter.is_on or training.peak_lr == training.default_lr:
        return None
    return (
        f"training.lr = {training.peak_lr:g} with training.adapter.rank = {training.adapter.rank}; adapters usually "
        f"learn best at 10 times the rate of training all weights, by default {training.default_lr:g}"
    )


def find_token_texts(model: ModelConfig) -> TokenTexts | None:
    """Return the detokenizer of the model's folder, or None if it has no readable tokenizer."""
    try:
        return TokenTexts.of_tokenizer(load_tokenizer(model.path))
    except (ModelError, MissingExtraError):
        return None


def make_rollouter(config: RunConfig, source: TaskSource, renderer: Renderer) -> Rollouter:
    """Construct the rollouter of a task, with its limits and its advantage function.

    Raises:
        DataError: The task's `rubric` does not return a rubric.
    """
    task, limits = source.task, config.limits_of(source)
    PULSE.limit_environments(limits.env_timeout_s)
    return Rollouter(
        lambda sample: task.make_env(sample, renderer),
        find_rubric(source),
        advantage=find_advantage(config.advantage_of(source)),
        limits=limits,
        max_context=config.model.max_context,
        seed=config.seed if config.seeds_requests else None,
    )


def leave_out_long_prompts(
    sources: Sequence[TaskSource], renderer: Renderer, max_context: int, console: Console
) -> None:
    """Have tasks leave out prompts that leave no room for an answer, and show how many there are.

    Raises:
        ConfigError: There are some, and the task's `long_prompts` is "error".
        DataError: No prompt leaves room, or the task raised.
    """
    for source in sources:
        if not isinstance(source.task, PromptedTask):
            continue
        with calling("its prompts", source.name):
            found = source.task.leave_out_long_prompts(renderer, max_context)
        if not found:
            continue
        problem = f"{source.name}: {found} leave no room for an answer in model.max_context = {max_context} tokens"
        if source.task.long_prompts == "error":
            raise ConfigError(f'{problem}; raise that, or set long_prompts = "leave_out" in the table of the task')
        console.warning(f"{problem}, and are left out")


@asynccontextmanager
async def open_rollouters(
    config: RunConfig,
    folder: Path,
    console: Console,
    renderer: Renderer | None = None,
    *,
    dry: bool = False,
) -> AsyncGenerator[dict[str, Rollouter]]:
    """Open the tasks for the block, and construct the rollouter of each task, by the tasks' names; see
    `make_rollouter`.

    Args:
        folder: Folder of the run.
        console: Console for messages of the tasks, and for outages of their judges.
        dry: Whether the tasks must not start anything.

    Raises:
        ModelError: A reward loads another model than at the beginning of the run.
    """
    renderer = renderer or make_renderer(config.model, single_turn=is_single_turn(config))
    versions = folder.absolute() / VERSIONS  # noqa: ASYNC240  reads no file
    run = RunContext(config.model.path, renderer, config.model.max_context, folder, console, dry, versions)
    async with AsyncExitStack() as tasks:
        for source in config.sources:
            await tasks.enter_async_context(opened(source.task, run))
        rollouters = {source.name: make_rollouter(config, source, renderer) for source in config.sources}
        for rollouter in rollouters.values():
            await in_thread(check_opened_models, rollouter.rubric.model_folders, folder)
            rollouter.rubric.show_on(console)
            tasks.push_async_callback(rollouter.rubric.close)
        yield rollouters


def make_sample_maker(config: RunConfig, state: Mapping[str, Any] | None = None) -> SampleMaker:
    """Construct the maker of a run's training samples.

    Args:
        state: `RunState.advantages` of the checkpoint from which the run continues.
    """
    return SampleMaker(
        {source.name: find_advantage(config.advantage_of(source)) for source in config.tasks},
        constrained=config.correction.constrained,
        distillation=Distillation(config.training.distill, config.training.distill_coef),
        episodes=_episode_rewards(config),
        max_token_age=config.scheduling.max_token_age,
        state=state,
    )


def _episode_rewards(config: RunConfig) -> dict[str, RewardPlacement]:
    """Placement of the rewards of each task, from which a critic computes advantages; empty without a critic."""
    if config.training.critic == "none":
        return {}
    rubrics = {source.name: find_rubric(source) for source in config.tasks}
    return {
        name: RewardPlacement(rubric.env_weights, truncation_ends=rubric.truncated_reward is not None)
        for name, rubric in rubrics.items()
    }


def find_rubric(source: TaskSource) -> Rubric:
    """Return the rubric of a task.

    Raises:
        DataError: The task's `rubric` does not return a rubric.
    """
    with calling("rubric()", source.name):
        rubric: Any = source.task.rubric()
        if not isinstance(rubric, Rubric):
            raise wrong_result(source.task, "rubric", f"it returned {rubric!r}; it must return a titan_rl.Rubric")
    return rubric


def make_filters(config: RunConfig, given: Sequence[GroupFilter] | None = None) -> list[GroupFilter]:
    """Return the filters of groups: those that always apply, then those of a group's task.

    Args:
        given: Filters that replace those that the settings name.
    """
    of_tasks = {source.name: _filters_of(config, source, given) for source in config.tasks}

    def of_its_task(group: RolloutGroup) -> str | None:
        return first_reason(of_tasks[group.task], group)

    enough = partial(too_few_siblings, least=min(2, config.rollout.group_size))
    return [enough, too_long(config.training.row_tokens), of_its_task]


def _filters_of(config: RunConfig, source: TaskSource, given: Sequence[GroupFilter] | None) -> list[GroupFilter]:
    """Return the filters that the task's table or `scheduling.filters` names, followed by the filter that the task
    defines, if any."""
    names = config.scheduling.filters if source.filters is None else source.filters
    own = [partial(drop_reason, source.task)] if isinstance(source.task, FilteringTask) else []
    return [*(map(find_filter, names) if given is None else given), *own]
