"""Server of a policy, from checked settings to its end:

run_server     checks the installed packages, creates a folder for logs, and sets up signals, guard and environment
PolicyService   loads the policy, starts generators behind a router, and answers clients until a signal arrives
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.cluster.processes.fork_server import forked_kinds
from titan_rl.config.build import make_renderer
from titan_rl.config.concurrency import max_running_of
from titan_rl.config.hosts import check_own_machine
from titan_rl.config.serve import ServeConfig, ServerConfig
from titan_rl.core.calls.user_code import reason
from titan_rl.core.console import Verbosity
from titan_rl.core.errors import ModelError
from titan_rl.evaluation.policies.following import CheckpointPublisher, RunFollower
from titan_rl.evaluation.policies.inference import MAX_RUNNING, Generators, architecture_of
from titan_rl.evaluation.policies.policy_export import export_weights, with_file_sync
from titan_rl.evaluation.policies.policy_source import PolicySource
from titan_rl.evaluation.policies.served_adapters import ReadAdapter, ServedAdapters, read_adapters
from titan_rl.evaluation.policies.version_switch import VersionSwitch
from titan_rl.generation.registry import find_engine
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.run.checks.requirements import require_modules
from titan_rl.run.observability.progress import status
from titan_rl.run.open_host_workers import open_workers
from titan_rl.run.process.environment import file_modes, logging_to
from titan_rl.run.process.signals import StopSignals, run_to_its_end
from titan_rl.run.session import SessionFiles, process_session
from titan_rl.run.terminal.standard_streams import OutputError, StderrConsole, print_result
from titan_rl.serving.api_keys import Keys
from titan_rl.serving.app import make_app
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import external_url, listener_of, serve
from titan_rl.training.settings import ModelConfig
from titan_rl.weights.types import PublishedWeights, StateDictTransport

if TYPE_CHECKING:
    from titan_rl.cluster.generator_processes import GeneratorProcesses

API_KEY, ADMIN_KEY = "TITAN_RL_API_KEY", "TITAN_RL_ADMIN_KEY"


def take_keys(server: ServerConfig) -> Keys:
    """Take the server's keys from environment variables, and remove these, so that no other process finds the keys.
    Check that the server's address can be bound.

    Raises:
        ConfigError: The keys are not usable, the server's address requires keys that are missing, or it cannot be
            bound.
    """
    api, admin = os.environ.pop(API_KEY, None), os.environ.pop(ADMIN_KEY, None)
    keys = Keys(() if api is None else [api], admin)
    listener_of(server.host, server.port, keys).close()
    return keys


STOPPING = "stopping: requests in flight end with a 503; repeat the signal to end at once"
ENDED = "ended at once"


def run_server(
    config: ServeConfig,
    source: PolicySource,
    verbosity: Verbosity,
    adapters: Mapping[str, PolicySource],
) -> int:
    """Serve a policy until a signal arrives.

    Args:
        verbosity: Verbosity of the messages until the server is ready.
        adapters: Adapters to serve in addition to the policy, by the names of their models in requests.

    Returns:
        The exit code: 128 + the number of the signal that ended the server in order.

    Raises:
        TitanRLError: The error that ended the server, or kept it from starting.
    """
    modules = ("torch", "monarch", "transformers", "starlette", "uvicorn", "prometheus_client")
    require_modules(*modules, *find_engine(config.generation.engine).modules)
    keys = take_keys(config.server)
    check_own_machine(config.hosts)
    with (
        file_modes(share=False),
        _files() as files,
        logging_to(files.logs / "server.log"),
        process_session(
            files.run_id,
            config.pythonpath,
            stopping=STOPPING,
            ended=ENDED,
            forks=forked_kinds(config, trains=False, generates=True),
        ) as signals,
    ):
        service = PolicyService(config, source, adapters, keys, files, verbosity)
        try:
            run_to_its_end(service.run(signals))
        except Exception as error:
            error.add_note(f"its logs are in {files.logs}")
            raise
        return signals.code


@contextlib.contextmanager
def _files() -> Generator[SessionFiles]:
    """Create a folder for the server's logs, which remains if the server fails."""
    folder = Path(tempfile.mkdtemp(prefix="titan_rl-serve-"))
    (logs := folder / "logs").mkdir()
    with contextlib.ExitStack() as removal:
        removal.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield SessionFiles(folder.name, logs)
        except Exception:
            removal.pop_all()
            raise


@dataclass
class PolicyService:
    """Server of one policy: its weights, generators behind a router, and the HTTP server. See `run_server`."""

    config: ServeConfig
    source: PolicySource
    adapters: Mapping[str, PolicySource]
    keys: Keys
    files: SessionFiles
    verbosity: Verbosity
    _console: StderrConsole = field(default_factory=StderrConsole)
    _published: PublishedWeights = field(default_factory=PublishedWeights)
    _resources: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def run(self, signals: StopSignals) -> None:
        """Serve until a signal arrives, or no generator is left."""
        opening = open_workers(
            self.config, self.files.logs, "titan_rl.cluster.generator_processes", verbosity=self.verbosity
        )
        with signals.ending_in_order():
            async with opening as started, self._resources:
                self.config = started.config
                await self._serve()

    async def _serve(self) -> None:
        from titan_rl.cluster.adapter_routers import AdapterRouters
        from titan_rl.cluster.processes.garbage_collection import settled_heap

        server = self.config.server
        model = await self._read_policy()
        adapters = await self._read_adapters(model)
        renderer = self._make_renderer()
        processes = await self._start_generators(model, adapters)
        routers = AdapterRouters(processes, ["", *adapters]) if adapters else None
        router = processes.make_router() if routers is None else routers.by_adapter[""]
        processes.router = routers or router
        versions: ServedAdapters | VersionSwitch | None = None
        if routers is not None:
            versions = ServedAdapters(adapters, routers)
            await versions.load({name: self._open_transport(name) for name in adapters}, model)
        elif server.versions is not None:
            transport, architecture = self._open_transport(), architecture_of(model)
            generators = Generators(router, architecture, transport, self._published, self.source.version)
            versions = VersionSwitch(router.stream, generators, model, Path(server.versions))
        follower = self._make_follower(router)
        app = make_app(
            (versions and versions.stream_of(None)) or router.stream,
            model=server.model,
            max_context=model.max_context,
            tokenizer=load_tokenizer(model.path),
            renderer=renderer,
            keys=self.keys,
            limits=ServerLimits(num_places=server.num_places, request_s=server.request_s),
            wait_until_resumed=router.wait_resumed,
            control=router if routers is None else None,  # a pause would affect all adapters
            trouble=(routers or router).trouble,
            version=lambda: self.source.version if follower is None else follower.version,
            any_model=server.any_model,
            versions=versions,
        )
        with settled_heap():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(processes.watch(), name="watch")
                if follower is not None:
                    tasks.create_task(follower.follow(), name="follow")
                async with serve(app, host=server.host, port=server.port) as url:
                    self._greet(url, adapters, chat=renderer is not None)
                    await asyncio.Event().wait()  # until a signal arrives, or no generator is left

    async def _read_policy(self) -> ModelConfig:
        """Export the policy if its weights are in a checkpoint, and return the settings of its model."""
        if self.source.checkpoint is None:
            return self.config.model
        self._console.message(f"reading {self.source.name}")
        self.config = self.config.model_copy(update={"hosts": with_file_sync(self.config.hosts)})
        folder = Path(tempfile.gettempdir()) / "policy"
        return await export_weights(self.config.model, self.source.checkpoint, folder, self.files.logs / "export.log")

    async def _read_adapters(self, model: ModelConfig) -> dict[str, ReadAdapter]:
        if self.adapters:
            self._console.message(f"reading the adapter{'s' * (len(self.adapters) > 1)} {', '.join(self.adapters)}")
        return await read_adapters(self.adapters, model, Path(tempfile.gettempdir()), self.files.logs / "export.log")

    def _make_renderer(self) -> Renderer | None:
        """Create the renderer of the model; None if the model has no usable chat template and no other renderer is
        set."""
        try:
            return make_renderer(self.config.model)
        except ModelError as error:
            if self.config.model.renderer not in ("auto", "chat_template"):
                raise
            self._console.warning(
                f"warning: only text completions are served, no chat: {reason(error)}; or set model.renderer"
            )
            return None

    async def _start_generators(self, model: ModelConfig, adapters: Mapping[str, ReadAdapter]) -> GeneratorProcesses:
        from titan_rl.cluster.generator_processes import start_generators

        generation = self.config.generation
        count = generation.num_generators
        if self.verbosity is not Verbosity.QUIET:
            plural = "" if count == 1 else "s"
            self._console.message(f"starting {count} generator{plural}; logs: {self.files.logs}")
        streaming = generation.model_copy(update={"stream_interval": generation.stream_interval or 1})
        starting = start_generators(
            self.config.model_copy(update={"model": model, "generation": streaming}),
            version=self.source.version,
            max_running=max_running_of(model, generation, MAX_RUNNING),
            files=self.files,
            console=self._console,
            published=self._published,
            adapters={name: adapter.spec for name, adapter in adapters.items()},
        )
        with status("starting to serve", self.verbosity):
            return await self._resources.enter_async_context(starting)

    def _make_follower(self, router: GeneratorRouter) -> RunFollower | None:
        """Create the follower of the policy's run, if newer versions are to be served."""
        source, every_s = self.source, self.config.server.follow_s
        if source.run is None or every_s is None:
            return None
        transport = self._open_transport()
        publisher = CheckpointPublisher(self.config.model, transport, self._published, self.files.logs / "export.log")
        name = str(source.toml and source.toml.parent)
        return RunFollower(
            source.run, name, publisher, router, version=source.version, every_s=every_s, console=self._console
        )

    def _open_transport(self, adapter: str = "") -> StateDictTransport:
        from titan_rl.cluster.generator_processes import open_transport

        return self._resources.enter_context(open_transport(self.config.hosts, self.files.run_id, adapter))

    def _greet(self, url: str, adapters: Mapping[str, ReadAdapter], *, chat: bool) -> None:
        name = self.source.name
        if adapters:
            named = ", ".join(f"{each} (version {adapter.version})" for each, adapter in adapters.items())
            name += f", and the adapter{'s' * (len(adapters) > 1)} {named}"
        text = greeting(name, external_url(url), self.config.server.model, chat=chat, keyed=self.keys.required)
        with contextlib.suppress(OSError, OutputError):
            print_result(text)


def greeting(name: str, url: str, model: str, *, chat: bool, keyed: bool) -> str:
    """Greeting of a server: its policy and address, environment variables for the clients of OpenAI and Anthropic, and
    a command to try."""
    path = "chat/completions" if chat else "completions"
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    key = f' -H "authorization: Bearer ${API_KEY}"' if keyed else ""
    own = f'"${API_KEY}"' if keyed else "none"
    body = json.dumps({"model": model, **prompt, "max_tokens": 32})
    return (
        f"serving {name}\n"
        f"    export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={own}\n"
        f"    export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={own}\n"
        f"    curl {url}/v1/{path}{key} -H 'content-type: application/json' -d '{body}'\n"
    )
