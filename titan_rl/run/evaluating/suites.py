"""The held-out prompts of a config's tasks, ready to be played by a policy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.make_rollouter import make_rollouter
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.errors import ConfigError
from titan_rl.evaluation.playing import Suite
from titan_rl.rollout.chat_env import ChatEnv, NoTokens, message_env_of
from titan_rl.rollout.environment.chat import ChatFn
from titan_rl.rollout.environment.threaded import ThreadedEnv
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.task import RunContext, calling, opened
from titan_rl.run.policies.opened import OpenedPolicy
from titan_rl.types import SamplingParams


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
    validation = config.validation
    count = settings.num_prompts or validation.num_prompts or 64
    temperature = validation.temperature if settings.temperature is None else settings.temperature
    samples = settings.samples or (1 if temperature == 0 else validation.samples_per_prompt)
    if temperature == 0 and samples > 1:
        raise ConfigError(f"--temperature 0 is greedy, so that all --samples {samples} would be the same; give 1")
    renderer = policy.renderer or NoTokens()
    async with contextlib.AsyncExitStack() as tasks:
        suites: list[Suite] = []
        for source in _chosen(config, settings):
            task = source.task
            run = RunContext(config.model.path, renderer, config.model.max_context, folder, tell)
            await tasks.enter_async_context(opened(task, run))
            with calling(f"validation_samples({count})"):
                prompts = list(task.validation_samples(count))
            sampling = SamplingParams(
                max_tokens=settings.max_tokens or config.sampling_of(source).max_tokens,
                temperature=temperature,
                top_p=settings.top_p,
                stop_token_ids=tuple(renderer.get_stop_token_ids()),
            )
            rollouter = _rollouter(config, source, policy, renderer)
            suites.append(Suite(source.name, prompts, samples, sampling, rollouter))
        yield suites


def _chosen(config: RunConfig, settings: EvalConfig) -> list[TaskSource]:
    sources = {source.name: source for source in config.tasks}
    if settings.tasks is None:
        return [*sources.values()]
    if missing := [name for name in settings.tasks if name not in sources]:
        raise ConfigError(f"--tasks {','.join(missing)}: the config has no such task; it has {', '.join(sources)}")
    return [sources[name] for name in settings.tasks]


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
