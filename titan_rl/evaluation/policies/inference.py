"""Inference with named policies: generators that are started for them, or an endpoint that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from titan_rl.config.build import is_single_turn, make_renderer
from titan_rl.config.concurrency import max_running_of
from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.model_folder import check_chat_template, check_model_folder
from titan_rl.config.run import RunConfig
from titan_rl.config.serve import ServeConfig, load_serve_config
from titan_rl.core.calls.parsing import openai_base
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import reason, summary
from titan_rl.core.console import Console, Verbosity
from titan_rl.core.errors import ConfigError, GenerationError, RequestError, StateDictError
from titan_rl.core.model_identity import model_identity
from titan_rl.evaluation.policies.following import publish_folder
from titan_rl.evaluation.policies.policy_export import export_weights, with_file_sync
from titan_rl.evaluation.policies.policy_source import PolicySource, find_policy
from titan_rl.evaluation.policies.version_switch import VersionSwitch
from titan_rl.generation.continuation import Generation
from titan_rl.generation.registry import find_engine
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.chat_env import ChatFn
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.checks.requirements import require_modules
from titan_rl.run.open_host_workers import open_workers
from titan_rl.run.process.environment import run_environment
from titan_rl.run.session import SessionFiles
from titan_rl.serving.client import HttpChatFn, HttpGenerateFn, HttpOptions
from titan_rl.training.settings import ModelConfig
from titan_rl.types import Completion, GenerateFn, SamplingParams
from titan_rl.weights.types import PublishedWeights, StateDictTransport

MAX_RUNNING = 64
"""Most requests that one engine runs at a time, if its KV cache holds so many and no setting says otherwise."""

ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class OpenedPolicy:
    """Policy that answers requests.

    Args:
        name: Name in messages, such as "step 80 of runs/latest".
        version: Number of steps for which a run has trained the policy.
        generate: Generation in tokens. For a policy of messages, it refuses all requests.
        renderer: Renderer of the policy's tokens; None for a policy of messages.
        chat: Generation in messages; None for a policy of tokens.
        finish_session: Function to call with the session id when a rollout has ended.
    """

    name: str
    generate: GenerateFn
    renderer: Renderer | None = None
    version: int = 0
    chat: ChatFn | None = None
    finish_session: Callable[[str], object] | None = None


def is_url(given: str) -> bool:
    return given.startswith(("http://", "https://"))


def require_engine(config: RunConfig) -> None:
    """Check that the packages that generators need are installed.

    Raises:
        MissingExtraError: A package is not installed.
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
    """Open the policy that a folder or a URL names, for the block; see `OpenedPolicies.open`.

    Raises:
        MissingExtraError: See `require_engine`.
    """
    with contextlib.ExitStack() as environment:
        if not is_url(given):
            require_engine(config)
            environment.enter_context(run_environment(config.pythonpath))
        async with OpenedPolicies(config, settings, files, console) as policies:
            yield await policies.open(given)


class OpenedPolicies:
    """Async context manager that opens one policy after the other. Policies of one architecture use the same
    generators, into which the weights of each next policy are loaded.

    Args:
        console: Console for messages about processes that are started, and a warning if other machines can reach them.
    """

    def __init__(self, config: RunConfig, settings: EvalConfig, files: SessionFiles, console: Console) -> None:
        self._config = config
        self._settings = settings
        self._files = files
        self.console = console
        self._resources = contextlib.AsyncExitStack()  # resources of the newest policy
        self._generators: Generators | None = None  # generators among these resources
        self._folder = tempfile.TemporaryDirectory(prefix="policies-")  # for exported checkpoints
        self._num_read = 0
        self._models: dict[str, ModelConfig] = {}  # models of the policies opened so far, by name

    async def __aenter__(self) -> OpenedPolicies:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        with self._folder:  # it must outlive the generators, whose replacements read from it
            return bool(await self._resources.__aexit__(kind, error, traceback))

    async def open(self, given: str) -> OpenedPolicy:
        """Open the policy that a folder or a URL names. It is available until the next one is opened.

        Raises:
            ConfigError: The policy does not exist.
            CheckpointError: The policy's checkpoint cannot be read.
            ActorDiedError: No generator could be started.
        """
        if is_url(given):
            await self._close()
            return await self._resources.enter_async_context(open_endpoint(given, self._config, self._settings))
        source = find_policy(given)
        model = _model_of(source, self._config)
        if source.checkpoint is not None:
            self.console.message(f"reading {source.name}")
            self._num_read += 1
            folder = Path(self._folder.name) / f"policy-{self._num_read}"
            model = await export_weights(model, source.checkpoint, folder, self._files.logs / "export.log")
        check_model_folder(model, self._config.generation, [Path()])
        check_chat_template(model)
        renderer = make_renderer(model, single_turn=is_single_turn(self._config))
        router = (await self._generators_for(source, model)).router
        self._models[source.name] = model
        return OpenedPolicy(
            source.name, router.generate, renderer, source.version, finish_session=router.finish_session
        )

    def together(self) -> dict[str, GenerateFn]:
        """Return the generation of all policies that were opened, by name. All may be used at the same time: the
        generators of the last policy load the weights of each policy in turn.

        Raises:
            ConfigError: The policies are endpoints, or have several architectures.
        """
        generators = self._generators
        architectures = [architecture_of(model) for model in self._models.values()]
        if generators is None or any(each != generators.architecture for each in architectures):
            raise ConfigError("policies that play each other need weights of one architecture and one tokenizer")
        folder = Path(self._folder.name) / "versions"
        folder.mkdir(exist_ok=True)
        base = next(reversed(self._models.values()))
        switch = VersionSwitch(generators.router.stream, generators, base, folder)
        policies: dict[str, GenerateFn] = {}
        for number, (name, model) in enumerate(self._models.items()):
            (folder / f"{number}").symlink_to(Path(model.path).resolve())
            stream = switch.stream_of(f"{number}")
            assert stream is not None
            policies[name] = Generation(stream)
        return policies

    async def _generators_for(self, source: PolicySource, model: ModelConfig) -> Generators:
        """Return generators with the weights of a model: those of the previous policy if the architecture is the same,
        otherwise new ones."""
        if self._generators is not None and self._generators.architecture == architecture_of(model):
            self.console.message(f"loading {source.name} into the generators of the previous policy")
            try:
                await self._generators.load(model)
                return self._generators
            except StateDictError as error:
                self.console.warning(f"restarting the generators: {reason(error)}")
        await self._close()
        starting = start_generators_for(source, model, self._config, self._files, self.console)
        self._generators = await self._resources.enter_async_context(starting)
        return self._generators

    async def _close(self) -> None:
        """Close the resources of the previous policy."""
        self._generators = None
        await self._resources.aclose()


@contextlib.asynccontextmanager
async def open_endpoint(
    url: str, config: RunConfig, settings: EvalConfig, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncGenerator[OpenedPolicy]:
    """Open the policy of an endpoint.

    Args:
        transport: Transport of httpx that replaces the network, for tests.
    """
    key = os.environ.get(settings.key_env)
    connections: HttpOptions = {"api_key": key, "max_connections": settings.in_flight, "transport": transport}
    model = settings.model or await _only_model(url, key, transport)
    name = f"{model} at {url}"
    if settings.api == "tokens":
        async with HttpGenerateFn(url, model=model, **connections) as generate:
            yield OpenedPolicy(name, generate, make_renderer(config.model, single_turn=is_single_turn(config)))
        return
    async with HttpChatFn(url, model=model, body=settings.body, **connections) as chat:
        yield OpenedPolicy(name, refuse_tokens, chat=chat)


async def refuse_tokens(
    prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None = None, sampling: SamplingParams
) -> Completion:
    """Refuse a request for tokens: this is the `generate` of a policy of messages."""
    raise RequestError("this policy answers with messages, but tokens were requested")


async def _only_model(url: str, key: str | None, transport: httpx.AsyncBaseTransport | None) -> str:
    endpoint = f"{openai_base(url)}/models"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with httpx.AsyncClient(timeout=ASK_TIMEOUT_S, transport=transport, trust_env=False) as client:
            answer = (await client.get(endpoint, headers=headers)).raise_for_status().json()
        names = [str(model["id"]) for model in answer["data"]]
    except httpx.HTTPStatusError as error:
        raise GenerationError(f"{endpoint} cannot list its models: {error}; give --model NAME") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise GenerationError(
            f"{endpoint} cannot be reached: {summary(error)}; start a server there, or correct the URL"
        ) from error
    except (LookupError, TypeError, ValueError) as error:
        raise GenerationError(f"{endpoint} lists no models; give --model NAME") from error
    if len(names) != 1:
        raise ConfigError(f"--model is needed: {endpoint} has {len(names)} models: {', '.join(names[:20])}")
    return names[0]


def architecture_of(model: ModelConfig) -> object:
    """Compute a value that is equal for models whose weights one engine can load one after the other."""
    parts = model_identity(Path(model.path))
    return parts["config"], parts["tokenizer"], model.dtype, model.max_context


@dataclass(slots=True)
class Generators:
    """Running generators of a policy, and the transport by which they load other weights.

    Attributes:
        num_loaded: Number of policies loaded after the one with which the generators started. It is also the version of
            the weights.
    """

    router: GeneratorRouter
    architecture: object
    transport: StateDictTransport
    published: PublishedWeights
    num_loaded: int = 0

    async def load(self, model: ModelConfig) -> None:
        """Load the weights of a model folder.

        Raises:
            StateDictError: The weights cannot be read, or a generator could not load and verify them.
        """
        self.num_loaded += 1
        version = self.num_loaded
        manifest = await in_thread(publish_folder, self.transport, Path(model.path), model.dtype, version)
        self.published.announce(manifest)  # the replacement of a generator also pulls it
        report = await self.router.pull_state_dict(version)
        self.transport.release(version - 1)
        if report.failed:
            raise StateDictError(f"{', '.join(sorted(report.failed))} could not load the weights")


@contextlib.asynccontextmanager
async def start_generators_for(
    source: PolicySource, model: ModelConfig, config: RunConfig, files: SessionFiles, console: Console
) -> AsyncGenerator[Generators]:
    """Start generators with the weights of a model folder. They have read the folder once the block is entered."""
    opening = open_workers(
        config, files.logs, "titan_rl.cluster.generator_processes", verbosity=Verbosity.QUIET, console=console
    )
    async with opening as started:
        from titan_rl.cluster.generator_processes import open_transport, start_generators

        hosts, generation, published = started.config.hosts, started.config.generation, PublishedWeights()
        count = generation.num_generators
        console.message(f"starting {count} generator{'' if count == 1 else 's'} for {source.name}; logs: {files.logs}")
        starting = start_generators(
            ServeConfig(
                seed=config.seed,
                pythonpath=config.pythonpath,
                model=model,
                generation=generation,
                routing=config.routing,
                hosts=hosts if source.checkpoint is None else with_file_sync(hosts),
            ),
            version=0,
            max_running=max_running_of(model, generation, MAX_RUNNING),
            files=files,
            console=console,
            published=published,
        )
        async with starting as processes:
            router = processes.router = processes.make_router()
            with open_transport(hosts, files.run_id) as transport:
                async with asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(processes.watch(), name="watch")
                    yield Generators(router, architecture_of(model), transport, published)
                    watching.cancel()
            await router.close()


def _model_of(source: PolicySource, config: RunConfig) -> ModelConfig:
    """Model settings of a policy: for a run, the run's own, with the context of the config; otherwise those of the
    config, with the weights of the policy's folder."""
    if source.toml is not None:
        model = load_serve_config(source.toml, (), policy=source.folder).model
        return model.model_copy(update={"max_context": config.model.max_context})
    return config.model.model_copy(update={"path": str(source.folder)})
