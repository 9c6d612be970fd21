"""Held-out prompts of tasks: choosing them, opening their tasks, and playing them with a policy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from titan_rl.config.build import leave_out_long_prompts, make_rollouter
from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import ResolvedSuite, TaskSource
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.console import Console
from titan_rl.core.errors import ConfigError, GenerationError, RewardError
from titan_rl.evaluation.policies.inference import OpenedPolicy
from titan_rl.evaluation.results import is_fault
from titan_rl.rollout.chat_env import ChatEnv, ChatFn, NoTokens, message_env_of
from titan_rl.rollout.environment.threaded import ThreadedEnv
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.group.rollouter import GroupRunner, Rollouter
from titan_rl.rollout.group.transcript import ErrorCounts, transcript
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.task import MeasuredTask, RunContext, digest, held_out_samples, measured, opened, sample_id
from titan_rl.rollout.types import RolloutGroup
from titan_rl.types import GenerateFn, SamplingParams

Record = dict[str, Any]

PHASE = "evaluation"


@dataclass(frozen=True, slots=True)
class Suite:
    """Held-out prompts of one task, and how they are played.

    Args:
        name: Name of the task, or of the suite in a run's validation.
        prompts: Samples of the task, in order.
        runner: Runner that plays and scores a group of rollouts of one prompt.
        group_ids: Prefix of the ids of groups. A rollout's sampling is seeded by its id, so that equal ids give equal
            samples.
        measure: Function that computes figures from all groups together, if the task has one.
        ids: Identity of each prompt, equal for prompts that are the same. By default their digests.
    """

    name: str
    prompts: Sequence[Any]
    samples_per_prompt: int
    sampling: SamplingParams
    runner: GroupRunner
    group_ids: str = "validation"
    measure: Callable[[Sequence[RolloutGroup]], dict[str, float]] | None = None
    ids: Sequence[str] = ()

    def prompt_id(self, index: int) -> str:
        """Identity of a prompt; "" if it is unknown."""
        return self.ids[index] if self.ids else digest(self.prompts[index])


async def play_suites(
    suites: Sequence[Suite],
    generate: GenerateFn,
    *,
    version: int,
    in_flight: int,
    max_lost: int,
    done: Iterable[Mapping[str, Any]],
    on_prompt: Callable[[RolloutGroup, Sequence[Record]], None],
) -> None:
    """Play every prompt that is not yet finished.

    Args:
        version: Version of the policy, for the lines.
        in_flight: Most rollouts at a time. Those of at least one prompt are always in flight.
        max_lost: Number of consecutive lost prompts at which the evaluation fails. A prompt is lost if none of its
            samples says anything about the policy. If there are fewer prompts, the evaluation fails when all are lost.
        done: Lines of prompts that an earlier evaluation has finished; see `finished_lines`.
        on_prompt: Function to call with the group and the lines of each prompt that is finished.

    Raises:
        RewardError, GenerationError: Too many consecutive prompts were lost to failing rewards, or to faults of
            environment and generation.
    """
    are_done = {_prompt_of(line) for line in done}
    left = (
        (suite, index, prompt)
        for suite in suites
        for index, prompt in enumerate(suite.prompts)
        if (suite.name, index, digest(prompt)) not in are_done
    )
    lost = _LostInARow(min(max_lost, sum(len(suite.prompts) for suite in suites)))

    async def play_some() -> None:
        for suite, index, prompt in left:
            group = await suite.runner.run_group(
                generate,
                prompt,
                group_id=f"{suite.group_ids}-{index}",
                group_size=suite.samples_per_prompt,
                sampling=suite.sampling,
            )
            on_prompt(group, [*_lines(suite, index, group, version)])
            lost.count(group)

    largest = max((suite.samples_per_prompt for suite in suites), default=1)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(max(1, in_flight // largest)):
            tasks.create_task(play_some())


def finished_lines(lines: Iterable[Mapping[str, Any]], suites: Sequence[Suite]) -> list[Mapping[str, Any]]:
    """Select the lines of prompts that need not be played again: prompts of these suites with all their samples, none
    of which was lost to a fault."""
    siblings: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        siblings.setdefault(_prompt_of(line), []).append(line)
    finished: list[Mapping[str, Any]] = []
    for suite in suites:
        for index, prompt in enumerate(suite.prompts):
            prompt_lines = siblings.get((suite.name, index, digest(prompt)), [])
            played = {line["sibling"] for line in prompt_lines}  # a game has a line for each seat
            if len(played) == suite.samples_per_prompt and not any(map(is_fault, prompt_lines)):
                finished += prompt_lines
    return finished


def _prompt_of(line: Mapping[str, Any]) -> tuple[str, int, str]:
    return line["task"], line["prompt"], line["prompt_digest"]


def _lines(suite: Suite, index: int, group: RolloutGroup, version: int) -> Iterator[Record]:
    about = {
        "step": version,
        "phase": PHASE,
        "task": suite.name,
        "prompt": index,
        "prompt_digest": digest(group.sample),
        "prompt_id": suite.prompt_id(index),
    }
    if group.failure is not None:
        about["reward_failed"] = str(group.failure)
    for rollout in group.rollouts:
        yield {**about, **transcript(rollout)}


class _LostInARow:
    """Counter of consecutive prompts whose samples say nothing about the policy."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: list[RolloutGroup] = []

    def count(self, group: RolloutGroup) -> None:
        """Count the group of a prompt.

        Raises:
            RewardError, GenerationError: The limit is reached.
        """
        if group.failure is None and not all(rollout.status.is_fault for rollout in group.rollouts):
            self._groups.clear()
            return
        self._groups.append(group)
        if len(self._groups) < self._most:
            return
        counts = ErrorCounts()
        for one in self._groups:
            counts.add_group(one)
        error = GenerationError if group.failure is None else RewardError
        raise error(f"{len(self._groups)} prompts in a row gave no result for the policy: {counts.describe()}")


USUAL_PROMPTS = 64
"""Number of prompts of each task if no setting gives one."""


@contextlib.asynccontextmanager
async def open_suites(
    config: RunConfig, settings: EvalConfig, policy: OpenedPolicy, folder: Path, console: Console
) -> AsyncGenerator[list[Suite]]:
    """Open the tasks that the settings ask for, for the block, and choose their prompts.

    Args:
        folder: Folder for files that the tasks write.

    Raises:
        ConfigError: A task that the settings ask for does not exist, or the samples of a prompt would all be the same
            because they are greedy.
        DataError: A task's held-out samples cannot be created.
    """
    renderer = policy.renderer or NoTokens()
    if policy.renderer is not None:
        sources = [suite.source for suite in chosen_suites(config, settings)]
        await in_thread(leave_out_long_prompts, sources, renderer, config.model.max_context, console)
    async with contextlib.AsyncExitStack() as tasks:
        suites: list[Suite] = []
        opened_tasks: set[str] = set()
        for suite in chosen_suites(config, settings):
            task = suite.source.task
            if suite.source.name not in opened_tasks:
                opened_tasks.add(suite.source.name)
                run = RunContext(config.model.path, renderer, config.model.max_context, folder, console)
                await tasks.enter_async_context(opened(task, run))
            rollouter = make_rollouter(config, suite.source, renderer)
            rollouter.finish_session = policy.finish_session
            if policy.chat is not None:
                play_by_chat(rollouter, policy.chat)
            tasks.push_async_callback(rollouter.rubric.close)
            suites.append(_suite(config, settings, suite, rollouter, renderer))
        yield suites


def chosen_suites(config: RunConfig, settings: EvalConfig) -> list[ResolvedSuite]:
    """Select the suites that the settings ask for.

    Raises:
        ConfigError: A task that the settings ask for does not exist.
    """
    suites = {suite.name: suite for suite in config.suites or _of_all_tasks(config)}
    if settings.tasks is None:
        return [*suites.values()]
    if missing := [name for name in settings.tasks if name not in suites]:
        raise ConfigError(f"--tasks {','.join(missing)}: the config has no such task; it has {', '.join(suites)}")
    return [suites[name] for name in settings.tasks]


def _of_all_tasks(config: RunConfig) -> list[ResolvedSuite]:
    """Suites for a config whose validation is off: one for each task."""
    validation = config.validation.model_copy(update={"num_prompts": USUAL_PROMPTS})
    return config.model_copy(update={"validation": validation}).suites


def _suite(
    config: RunConfig, settings: EvalConfig, suite: ResolvedSuite, rollouter: Rollouter, renderer: Renderer
) -> Suite:
    """Build the suite of a run's validation, with the overrides of the evaluation's settings."""
    task = suite.source.task
    sampling = sampling_of(config, settings, suite.source, renderer, suite.temperature)
    is_greedy = sampling.temperature == 0
    samples = settings.samples or (1 if is_greedy else suite.samples_per_prompt)
    if is_greedy and samples > 1:
        raise ConfigError(f"--temperature 0 is greedy, so that all --samples {samples} would be the same; give 1")
    prompts = held_out_samples(task, settings.num_prompts or suite.num_prompts)
    measure = partial(measured, task) if isinstance(task, MeasuredTask) else None
    ids = [sample_id(task, prompt) for prompt in prompts]
    return Suite(suite.name, prompts, samples, sampling, rollouter, suite.group_ids, measure, ids)


def sampling_of(
    config: RunConfig, settings: EvalConfig, source: TaskSource, renderer: Renderer, temperature: float
) -> SamplingParams:
    """Build the sampling parameters of a task.

    Args:
        temperature: Sampling temperature, unless the settings give another one.
    """
    return SamplingParams(
        max_tokens=settings.max_tokens or config.sampling_of(source).max_tokens,
        temperature=temperature if settings.temperature is None else settings.temperature,
        top_p=settings.top_p,
        seed=config.seed,
        stop_token_ids=tuple(renderer.get_stop_token_ids()),
    )


def play_by_chat(
    rollouter: Rollouter, chat: ChatFn, wrap: Callable[[MessageEnv], MessageEnv] = lambda env: env
) -> None:
    """Make a rollouter's environments request answers from a policy of messages.

    Args:
        wrap: Function that wraps each environment of messages.
    """
    make_env, limits = rollouter.make_env, rollouter.limits

    def make_chat_env(sample: Any) -> ChatEnv:
        def make() -> MessageEnv:
            return wrap(message_env_of(make_env(sample)))

        env = cast("MessageEnv", ThreadedEnv(make)) if limits.env_in_thread else make()
        return ChatEnv(env, chat, limits)

    rollouter.make_env = make_chat_env
    rollouter.limits = limits.model_copy(update={"env_in_thread": False})  # only the environment runs in one
