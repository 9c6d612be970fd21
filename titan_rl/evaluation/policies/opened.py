"""A policy that answers: generators that are started for it, or an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from titan_rl.config.build import make_renderer
from titan_rl.config.concurrency import places_of
from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.model_folder import check_chat_template, check_model_folder
from titan_rl.config.run import RunConfig
from titan_rl.config.serve import ServeConfig, load_serve_config
from titan_rl.core.console import Console, Verbosity
from titan_rl.core.errors import ConfigError, GenerationError, RequestError
from titan_rl.evaluation.policies.source import PolicySource, export, find_policy, with_copies
from titan_rl.generation.registry import find_engine
from titan_rl.rollout.chat_env import ChatFn
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.hosts import open_hosts
from titan_rl.run.machine.requirements import require_modules
from titan_rl.run.session import SessionFiles
from titan_rl.serving.client import HttpChatFn, HttpGenerateFn
from titan_rl.training.settings import ModelConfig
from titan_rl.types import Completion, GenerateFn, SamplingParams

MAX_RUNNING = 64
"""Requests that one engine advances at a time, if its KV cache holds so many and no setting says otherwise."""

ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class OpenedPolicy:
    """A policy that answers.

    Args:
        name: for people: "step 80 of runs/latest".
        version: the steps that a run has trained it.
        generate: answers in tokens; of a policy of messages it refuses.
        renderer: of its tokens; None of a policy of messages.
        chat: answers in messages; None of a policy of tokens.
        finish_session: is told when a rollout has ended.
    """

    name: str
    generate: GenerateFn
    renderer: Renderer | None = None
    version: int = 0
    chat: ChatFn | None = None
    finish_session: Callable[[str], object] | None = None


def is_url(given: str) -> bool:
    return given.startswith(("http://", "https://"))


def needs_engine(given: Sequence[str]) -> bool:
    """Return whether one of these policies is weights, which an engine has to load."""
    return not all(map(is_url, given))


def require_engine(config: RunConfig) -> None:
    """
    Raises:
        MissingExtraError: what generators need is not installed.
    """
    require_modules("torch", "monarch", "transformers", *find_engine(config.generation.engine).modules)


@contextlib.asynccontextmanager
async def open_policy(
    given: str,
    config: RunConfig,
    settings: EvalConfig,
    files: SessionFiles,
    console: Console,
) -> AsyncGenerator[OpenedPolicy]:
    """The policy that a folder or a URL names, for the length of the block.

    Args:
        console: shows what is started, and a warning if other machines can reach it.

    Raises:
        ConfigError: there is no such policy.
        CheckpointError: its checkpoint cannot be read.
        ActorDiedError: no generator could be started.
    """
    opened = open_endpoint(given, config, settings) if is_url(given) else _started(given, config, files, console)
    async with opened as policy:
        yield policy


@contextlib.asynccontextmanager
async def open_endpoint(
    url: str, config: RunConfig, settings: EvalConfig, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncGenerator[OpenedPolicy]:
    """
    Args:
        transport: of httpx, in the place of the network.
    """
    key = os.environ.get(settings.key_env)
    connections: dict[str, Any] = {"api_key": key, "max_connections": settings.in_flight, "transport": transport}
    model = settings.model or await _only_model(url, key, transport)
    name = f"{model} at {url}"
    if settings.api == "tokens":
        async with HttpGenerateFn(url, model=model, **connections) as generate:
            yield OpenedPolicy(name, generate, make_renderer(config.model))
        return
    async with HttpChatFn(url, model=model, body=settings.body, **connections) as chat:
        yield OpenedPolicy(name, speaks_no_tokens, chat=chat)


async def speaks_no_tokens(
    prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None = None, sampling: SamplingParams
) -> Completion:
    """The `generate` of a policy of messages."""
    raise RequestError("this policy answers in messages, and is asked for tokens")


async def _only_model(url: str, key: str | None, transport: httpx.AsyncBaseTransport | None) -> str:
    endpoint = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with httpx.AsyncClient(timeout=ASK_TIMEOUT_S, transport=transport, trust_env=False) as client:
            answer = (await client.get(endpoint, headers=headers)).raise_for_status().json()
        names = [str(model["id"]) for model in answer["data"]]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise GenerationError(f"{endpoint} cannot be asked for its models: {error}; give --model NAME") from error
    except (LookupError, TypeError, ValueError) as error:
        raise GenerationError(f"{endpoint} gives no list of models; give --model NAME") from error
    if len(names) != 1:
        raise ConfigError(f"--model is needed: {endpoint} has {len(names)} models: {', '.join(names[:20])}")
    return names[0]


@contextlib.asynccontextmanager
async def _started(
    given: str, config: RunConfig, files: SessionFiles, console: Console
) -> AsyncGenerator[OpenedPolicy]:
    source = find_policy(given)
    model = _model_of(source, config)
    async with contextlib.AsyncExitStack() as resources:
        opening = open_hosts(
            config, files.logs, "titan_rl.cluster.generator_processes", verbosity=Verbosity.QUIET, console=console
        )
        config = (await resources.enter_async_context(opening)).config
        folder, hosts = resources.enter_context(tempfile.TemporaryDirectory(prefix="policy-")), config.hosts
        if source.checkpoint is not None:
            console.message(f"reading {source.name}")
            model = await export(model, source.checkpoint, Path(folder) / "policy", files.logs / "export.log")
            hosts = with_copies(hosts)
        check_model_folder(model, config.generation, [Path()])
        check_chat_template(model)
        renderer = make_renderer(model)
        from titan_rl.cluster.generator_processes import start_generators

        count = config.generation.num_generators
        console.message(f"starting {count} generator{'' if count == 1 else 's'} for {source.name}; logs: {files.logs}")
        serve = ServeConfig(
            seed=config.seed,
            pythonpath=config.pythonpath,
            model=model,
            generation=config.generation,
            routing=config.routing,
            hosts=hosts,
        )
        running = places_of(model, config.generation, MAX_RUNNING)
        starting = start_generators(serve, version=source.version, max_running=running, files=files, console=console)
        async with starting as processes:
            router = processes.make_router()
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(processes.watch(router), name="watch")
                yield OpenedPolicy(
                    source.name, router.generate, renderer, source.version, finish_session=router.finish_session
                )
                watching.cancel()
            await router.close()


def _model_of(source: PolicySource, config: RunConfig) -> ModelConfig:
    """A run's own, with the context of the config; else that of the config, with the weights of the folder."""
    if source.toml is not None:
        model = load_serve_config(source.toml, (), policy=source.folder).model
        return model.model_copy(update={"max_context": config.model.max_context})
    return config.model.model_copy(update={"path": str(source.folder)})
