"""The held-out prompts of a config's tasks, ready to be played by a policy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.make_rollouter import make_rollouter
from titan_rl.config.run import RunConfig
from titan_rl.config.suites import ResolvedSuite
from titan_rl.config.tasks import TaskSource
from titan_rl.core.errors import ConfigError
from titan_rl.evaluation.playing import Suite
from titan_rl.evaluation.policies.opened import OpenedPolicy
from titan_rl.rollout.chat_env import ChatEnv, NoTokens, message_env_of
from titan_rl.rollout.environment.chat import ChatFn
from titan_rl.rollout.environment.threaded import ThreadedEnv
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.task import MeasuredTask, RunContext, held_out_samples, measured, opened
from titan_rl.types import SamplingParams

USUAL_PROMPTS = 64
"""Of each task, where no setting says how many."""


@contextlib.asynccontextmanager
async def open_suites(
    config: RunConfig, settings: EvalConfig, policy: OpenedPolicy, folder: Path, tell: Callable[[str], object]
) -> AsyncGenerator[list[Suite]]:
    """The prompts of each task that is asked for, with the tasks open for the length of the block.

    Args:
        folder: for what the tasks write.

    Raises:
        ConfigError: a task that is asked for is not there, or greedy samples of one prompt would all be the same.
        DataError: a task's held-out samples cannot be had.
    """
    renderer = policy.renderer or NoTokens()
    async with contextlib.AsyncExitStack() as tasks:
        suites: list[Suite] = []
        opened_tasks: set[str] = set()
        for suite in chosen_suites(config, settings):
            task = suite.source.task
            if suite.source.name not in opened_tasks:
                opened_tasks.add(suite.source.name)
                run = RunContext(config.model.path, renderer, config.model.max_context, folder, tell)
                await tasks.enter_async_context(opened(task, run))
            suites.append(_suite(config, settings, suite, policy, renderer))
        yield suites


def chosen_suites(config: RunConfig, settings: EvalConfig) -> list[ResolvedSuite]:
    """What is to be played.

    Raises:
        ConfigError: a task that is asked for is not there.
    """
    suites = {suite.name: suite for suite in config.suites or _of_all_tasks(config)}
    if settings.tasks is None:
        return [*suites.values()]
    if missing := [name for name in settings.tasks if name not in suites]:
        raise ConfigError(f"--tasks {','.join(missing)}: the config has no such task; it has {', '.join(suites)}")
    return [suites[name] for name in settings.tasks]


def _of_all_tasks(config: RunConfig) -> list[ResolvedSuite]:
    """Of a config that validates never."""
    validation = config.validation.model_copy(update={"num_prompts": USUAL_PROMPTS})
    return config.model_copy(update={"validation": validation}).suites


def _suite(
    config: RunConfig, settings: EvalConfig, suite: ResolvedSuite, policy: OpenedPolicy, renderer: Renderer
) -> Suite:
    """What a run validates on, with what the settings have instead."""
    source, task = suite.source, suite.source.task
    count = settings.num_prompts or suite.num_prompts
    temperature = suite.temperature if settings.temperature is None else settings.temperature
    samples = settings.samples or (1 if temperature == 0 else suite.samples_per_prompt)
    if temperature == 0 and samples > 1:
        raise ConfigError(f"--temperature 0 is greedy, so that all --samples {samples} would be the same; give 1")
    prompts = held_out_samples(task, count)
    sampling = SamplingParams(
        max_tokens=settings.max_tokens or config.sampling_of(source).max_tokens,
        temperature=temperature,
        top_p=settings.top_p,
        seed=config.seed,
        stop_token_ids=tuple(renderer.get_stop_token_ids()),
    )
    rollouter = _rollouter(config, source, policy, renderer)
    measure = partial(measured, task) if isinstance(task, MeasuredTask) else None
    return Suite(suite.name, prompts, samples, sampling, rollouter, suite.group_ids, measure)


def _rollouter(config: RunConfig, source: TaskSource, policy: OpenedPolicy, renderer: Renderer) -> Rollouter:
    rollouter = make_rollouter(config, source, renderer)
    rollouter.finish_session = policy.finish_session
    if policy.chat is not None:
        play_by_chat(rollouter, policy.chat)
    return rollouter


def play_by_chat(
    rollouter: Rollouter, chat: ChatFn, wrap: Callable[[MessageEnv], MessageEnv] = lambda env: env
) -> None:
    """Have a rollouter's environments ask a policy of messages.

    Args:
        wrap: what the environments of messages are played as.
    """
    make_env, limits = rollouter.make_env, rollouter.limits

    def make_chat_env(sample: Any) -> ChatEnv:
        def make() -> MessageEnv:
            return wrap(message_env_of(make_env(sample)))

        env = cast("MessageEnv", ThreadedEnv(make)) if limits.env_in_thread else make()
        return ChatEnv(env, chat, limits)

    rollouter.make_env = make_chat_env
    rollouter.limits = limits.model_copy(update={"env_in_thread": False})  # the environment alone is in one
