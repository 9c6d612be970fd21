"""Server of a policy, from checked settings to its end:

run_server     checks the installed packages, creates a folder for logs, and sets up signals, guard and environment
_serve         loads the policy, starts generators behind a router, and answers clients until a signal arrives
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

from titan_rl.config.build import make_renderer
from titan_rl.config.concurrency import max_running_of
from titan_rl.config.hosts import check_own_machine
from titan_rl.config.sections import GenerationConfig
from titan_rl.config.serve import ServeConfig, ServerConfig
from titan_rl.core.calls.user_code import reason
from titan_rl.core.console import Verbosity
from titan_rl.core.errors import ModelError
from titan_rl.evaluation.policies.adapters import ReadAdapter, ServedAdapters, read_adapters
from titan_rl.evaluation.policies.following import CheckpointPublisher, RunFollower
from titan_rl.evaluation.policies.opened import Generators, architecture_of
from titan_rl.evaluation.policies.source import PolicySource, export, with_copies
from titan_rl.evaluation.policies.switch import VersionSwitch
from titan_rl.generation.registry import find_engine
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.run.hosts import open_hosts
from titan_rl.run.machine.environment import file_modes, logging_to
from titan_rl.run.machine.requirements import require_modules
from titan_rl.run.machine.signals import StopSignals, run_to_its_end
from titan_rl.run.observability.progress import status
from titan_rl.run.session import SessionFiles, process_session
from titan_rl.run.terminal.standard_streams import OutputError, StderrConsole, print_result
from titan_rl.serving.access import Keys
from titan_rl.serving.app import make_app
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import listener_of, seen_from_elsewhere, serve
from titan_rl.weights.types import PublishedWeights

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


MAX_RUNNING = 64
"""Most requests that one engine runs at a time, if its KV cache holds so many and no setting says otherwise."""

STOPPING = "stopping: requests under way end with a 503; once more ends it at once"
ENDED = "ended at once"


def run_server(
    config: ServeConfig,
    source: PolicySource,
    verbosity: Verbosity = Verbosity.NORMAL,
    adapters: Mapping[str, PolicySource] | None = None,
) -> int:
    """Serve a policy until a signal arrives.

    Args:
        verbosity: Verbosity of the messages until the server is ready.
        adapters: Adapters to serve beside the policy, by the names of their models in requests.

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
        process_session(files.run_id, config.pythonpath, stopping=STOPPING, ended=ENDED) as signals,
    ):
        try:
            run_to_its_end(_serve_on_hosts(config, source, adapters or {}, keys, files, signals, verbosity))
        except Exception as error:
            error.add_note(f"its logs are in {files.logs}")
            raise
        return signals.code


@contextlib.contextmanager
def _files() -> Generator[SessionFiles]:
    """Create a folder for the server's logs, which remains if the server fails."""
    folder = Path(tempfile.mkdtemp(prefix="titan_rl-serve-"))
    (logs := folder / "logs").mkdir()
    yield SessionFiles(folder.name, logs)
    shutil.rmtree(folder, ignore_errors=True)


async def _serve_on_hosts(
    config: ServeConfig,
    source: PolicySource,
    adapters: Mapping[str, PolicySource],
    keys: Keys,
    files: SessionFiles,
    signals: StopSignals,
    verbosity: Verbosity,
) -> None:
    opening = open_hosts(config, files.logs, "titan_rl.cluster.generator_processes", verbosity=verbosity)
    with signals.ending_in_order():
        async with opening as started:
            await _serve(started.config, source, adapters, keys, files, verbosity)


async def _serve(
    config: ServeConfig,
    source: PolicySource,
    adapters: Mapping[str, PolicySource],
    keys: Keys,
    files: SessionFiles,
    verbosity: Verbosity,
) -> None:
    from titan_rl.cluster.adapter_routers import AdapterRouters
    from titan_rl.cluster.generator_processes import open_transport, start_generators
    from titan_rl.cluster.processes.garbage import settled_heap

    model, server, console = config.model, config.server, StderrConsole()
    if source.checkpoint is not None:
        console.message(f"reading {source.name}")
        model = await export(
            model, source.checkpoint, Path(tempfile.gettempdir()) / "policy", files.logs / "export.log"
        )
        config = config.model_copy(update={"hosts": with_copies(config.hosts)})
    if adapters:
        console.message(f"reading the adapter{'s' * (len(adapters) > 1)} {', '.join(adapters)}")
    read = await read_adapters(adapters, model, Path(tempfile.gettempdir()), files.logs / "export.log")
    renderer = _renderer(config)
    published = PublishedWeights()
    max_running = max_running_of(model, config.generation, MAX_RUNNING)
    num_generators = config.generation.num_generators
    if verbosity is not Verbosity.QUIET:
        console.message(f"starting {num_generators} generator{'' if num_generators == 1 else 's'}; logs: {files.logs}")
    starting = start_generators(
        config.model_copy(update={"model": model, "generation": streaming(config.generation)}),
        version=source.version,
        max_running=max_running,
        files=files,
        console=console,
        published=published,
        adapters={name: adapter.spec for name, adapter in read.items()},
    )
    async with contextlib.AsyncExitStack() as opened:
        with status("starting to serve", verbosity):
            processes = await opened.enter_async_context(starting)
        routers, served = None, None
        if read:
            routers = AdapterRouters(processes, ["", *read])
            served = ServedAdapters(read, routers)
            transports = {name: opened.enter_context(open_transport(config.hosts, files.run_id, name)) for name in read}
            await served.load(transports, model)
        router = processes.make_router() if routers is None else routers.by_adapter[""]
        processes.router = routers or router
        follower = None
        if source.run is not None and server.follow_s is not None:
            transport = opened.enter_context(open_transport(config.hosts, files.run_id))
            publisher = CheckpointPublisher(config.model, transport, published, files.logs / "export.log")
            follower = RunFollower(
                source.run,
                str(source.toml and source.toml.parent),
                publisher,
                router,
                version=source.version,
                every_s=server.follow_s,
                console=console,
            )
        switch = None
        if server.versions is not None:
            transport = opened.enter_context(open_transport(config.hosts, files.run_id))
            generators = Generators(router, architecture_of(model), transport, published, source.version)
            switch = VersionSwitch(router.stream, generators, model, Path(server.versions))
        base = switch and switch.stream_of(None)
        app = make_app(
            base or router.stream,
            model=server.model,
            max_context=model.max_context,
            tokenizer=load_tokenizer(model.path),
            renderer=renderer,
            keys=keys,
            limits=ServerLimits(num_places=server.num_places, request_s=server.request_s),
            wait_until_resumed=router.wait_resumed,
            control=router if routers is None else None,  # a pause would affect all adapters
            trouble=(routers or router).trouble,
            version=lambda: source.version if follower is None else follower.version,
            any_model=server.any_model,
            versions=served or switch,
        )
        with settled_heap():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(processes.watch(), name="watch")
                if follower is not None:
                    tasks.create_task(follower.follow(), name="follow")
                async with serve(app, host=server.host, port=server.port) as url:
                    with contextlib.suppress(OSError, OutputError):
                        shown = seen_from_elsewhere(url)
                        name = f"{source.name}{_with_adapters(read)}"
                        print_result(
                            greeting(name, shown, server.model, chat=renderer is not None, keyed=keys.required)
                        )
                    await asyncio.Event().wait()  # until a signal arrives, or no generator is left


def streaming(generation: GenerationConfig) -> GenerationConfig:
    """Copy settings of generators so that each token is streamed as it is sampled, unless the settings say
    otherwise."""
    return generation.model_copy(update={"stream_interval": generation.stream_interval or 1})


def _renderer(config: ServeConfig) -> Renderer | None:
    """Create the renderer of the model; None if the model has no usable chat template and no other renderer is set."""
    try:
        return make_renderer(config.model)
    except ModelError as error:
        if config.model.renderer not in ("auto", "chat_template"):
            raise
        StderrConsole().warning(f"warning: there is no chat, only completions: {reason(error)}; or set model.renderer")
        return None


def _with_adapters(adapters: Mapping[str, ReadAdapter]) -> str:
    """Describe adapters: ", and the adapters sort (version 80), sum (version 40)"; "" without adapters."""
    named = ", ".join(f"{name} (version {adapter.version})" for name, adapter in adapters.items())
    return f", and the adapter{'s' * (len(adapters) > 1)} {named}" if named else ""


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
