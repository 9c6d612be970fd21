"""Components of a run that a caller may replace, and the planes that are built from them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import get_protocol_members

from titan_rl.cluster.hosts.elastic import ProvidedHosts, hosts_watcher
from titan_rl.cluster.hosts.host_files import HostFiles
from titan_rl.cluster.hosts.lifecycle import HostHistory
from titan_rl.config.build import is_single_turn, make_renderer, template_note
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import reason
from titan_rl.core.console import Console
from titan_rl.core.errors import ConfigError
from titan_rl.generation.registry import find_engine
from titan_rl.generation.router.replica import Limits, Replica
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.router.strategies import Strategy, make_strategy
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.checks.requirements import require_modules
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.processor_meter import ProcessorSource
from titan_rl.run.observability.watchers import background_tasks
from titan_rl.scheduling.filters import GroupFilter
from titan_rl.training.trainer_protocol import Trainer
from titan_rl.weights.types import PublishedWeights

if TYPE_CHECKING:
    from titan_rl.cluster.adapter_routers import AdapterRouters
    from titan_rl.cluster.generator_processes import GeneratorProcesses
    from titan_rl.cluster.rollout_worker_pool import WorkerPool
    from titan_rl.cluster.trainer_processes import TrainerProcesses

RARELY_CALLED = frozenset({"load", "measure"})
"""Methods of a trainer that only resumed and supervised runs call."""


@dataclass(frozen=True, slots=True)
class Components:
    """Objects that replace those that the settings name. A component that is None is built from the settings.

    Args:
        trainer: Trainer of the steps, which also publishes versions. It is not closed. None starts a trainer's
            processes.
        replicas: Replicas for the router, which closes them at the end. None starts generators.
        published: Manifests of published versions, from which given replicas load.
        strategy: Strategy that chooses the replica for a request.
        renderer: Renderer of the environments in this process.
        filters: Group filters for every task, instead of those that the settings name.
        sinks: Further sinks for the metrics of steps, by their names for messages.
        provided: Hosts of a provider whose hosts come and go.
    """

    trainer: Trainer | None = None
    replicas: Sequence[Replica] | None = None
    published: PublishedWeights = field(default_factory=PublishedWeights)
    strategy: Strategy | None = None
    renderer: Renderer | None = None
    filters: Sequence[GroupFilter] | None = None
    sinks: Mapping[str, MetricSink] = field(default_factory=dict[str, MetricSink])
    provided: ProvidedHosts | None = None

    @property
    def needs_processes(self) -> bool:
        return self.trainer is None or self.replicas is None

    def _given(self) -> list[str]:
        """Names of the components that were given."""
        names = ("trainer", "replicas", "strategy", "renderer", "filters", "provided")
        return [*(name for name in names if getattr(self, name) is not None), *(["sinks"] if self.sinks else [])]

    def check(self, config: RunConfig) -> None:
        """Check the given components before a run.

        Raises:
            ConfigError: A component does not fit the settings, or lacks a method.
            MissingExtraError: A package that the run's processes need is not installed.
        """
        if config.adapters and (given := self._given()):
            raise ConfigError(
                f"{', '.join(given)} with [[adapters]]: parts can be given to a run with a single policy; leave "
                "the adapters out, or name functions in the settings"
            )
        if self.trainer is not None:
            _check_members("trainer", self.trainer, Trainer, unless=RARELY_CALLED)
        for index, replica in enumerate(self.replicas or ()):
            _check_members(f"replicas[{index}]", replica, Replica)
        workers = config.rollout.num_workers
        if workers and (self.renderer is not None or self.replicas is not None):
            raise ConfigError(
                f"rollout.num_workers = {workers}: rollout workers make their environments themselves, and send "
                "requests to the run's own generators; set it to 0 to give a renderer, generate or replicas"
            )
        if workers and self.strategy is not None:
            pickled(self.strategy)
        if not self.needs_processes:
            return
        engine = find_engine(config.generation.engine).modules if self.replicas is None else ()
        trainer = ("torch", "torchtitan") if self.trainer is None else ()
        require_modules("monarch", "transformers", *trainer, *engine)

    async def make_renderer(self, config: RunConfig, console: Console) -> Renderer:
        """Create the renderer that the settings name, unless one is given.

        Raises:
            ConfigError, ModelError: The renderer cannot be created.
        """
        if self.renderer is not None:
            return self.renderer
        renderer = await in_thread(partial(make_renderer, config.model, single_turn=is_single_turn(config)))
        if self.trainer is None and (note := await in_thread(template_note, config.model)):
            console.message(note)
        return renderer


R = TypeVar("R", "GeneratorRouter", "AdapterRouters", None)


@dataclass(frozen=True, slots=True)
class Planes(Generic[R]):
    """Running generation and training of a run.

    Args:
        router: Router of the run, or the routers of its adapters; None in a supervised run.
        training: Processes of the trainer; None if a trainer was given.
        watch: Function that replaces dead processes, except the trainer's, until it is cancelled.
        waits_for: Function that describes generators that do not serve, and how long rollouts wait for them.
        workers: Rollout workers; None if groups are run in this process.
        hosts: Source of reports of joining, draining and lost hosts.
        processes: Processes whose processor time is measured; None if generators and trainer were given.
    """

    router: R
    training: TrainerProcesses | None
    watch: Callable[[], Coroutine[Any, Any, None]]
    waits_for: Callable[[], str]
    workers: WorkerPool | None = None
    hosts: HostHistory = field(default_factory=HostHistory)
    processes: ProcessorSource | None = None

    def trouble(self) -> str | None:
        """Reason why no request can be answered, and what the run is waiting for, or None while enough generators
        serve."""
        trouble = None if self.router is None else self.router.trouble()
        return trouble and f"{trouble}; {self.waits_for()}"

    def trainer_lacks(self) -> str:
        """Resource that the trainer needs to restart, or "" while it lacks nothing."""
        lacks = self.training and self.training.waits_for
        return f"it waits for {lacks}" if lacks else ""


def open_planes(
    config: RunConfig, components: Components, run_dir: RunDirectory, console: Console
) -> contextlib.AbstractAsyncContextManager[Planes[GeneratorRouter]]:
    """Open the planes of a run, with processes for the components that were not given. Everything is closed when the
    block ends, except a given trainer.

    Raises:
        ActorDiedError: A process did not start in time.
    """
    opening = _with_processes if components.needs_processes else _in_this_process
    return opening(config, components, run_dir, console)


@contextlib.asynccontextmanager
async def _in_this_process(
    config: RunConfig, components: Components, run_dir: RunDirectory, console: Console
) -> AsyncGenerator[Planes[GeneratorRouter]]:
    assert components.trainer is not None
    assert components.replicas is not None
    routing = config.routing
    router = GeneratorRouter(
        components.replicas,
        components.strategy or make_strategy(routing.strategy),
        stall_timeout_s=config.generation.stall_timeout_s,
        limits=Limits(pull_s=config.statedict.pull_timeout_s, no_replica_s=config.hosts.wait_s),
        on_replica_failed=lambda replica, error: console.warning(f"{replica.name} is out of service: {error}"),
        move_below=routing.move_below,
    )

    async def watch() -> None: ...

    try:
        yield Planes(router, None, watch, lambda: f"rollouts wait for up to hosts.wait_s = {config.hosts.wait_s:g}")
    finally:
        await router.close()


@contextlib.asynccontextmanager
async def _with_processes(
    config: RunConfig, components: Components, run_dir: RunDirectory, console: Console
) -> AsyncGenerator[Planes[GeneratorRouter]]:
    from titan_rl.cluster.rollout_worker_pool import show_worker_lines
    from titan_rl.cluster.run_processes import start_processes

    (files := HostFiles(run_dir.path)).begin()
    starting = start_processes(
        config,
        run_dir,
        components.published,
        console,
        trains=components.trainer is None,
        generates=components.replicas is None,
        strategy=pickled(components.strategy)
        if components.strategy is not None and config.rollout.num_workers
        else None,
    )
    with show_worker_lines(console):
        async with starting as processes:
            router = processes.router = processes.make_router(components.replicas, components.strategy)
            workers = processes.workers if config.rollout.num_workers else None
            if workers is not None:
                await workers.use(router)
            training = processes.training if components.trainer is None else None
            history = HostHistory()
            watch = watcher(config, files, processes, history, components.provided)
            yield Planes(router, training, watch, processes.waits_for, workers, history, processes)
            await asyncio.gather(router.close(), *([] if training is None else [training.close()]))


@contextlib.asynccontextmanager
async def open_adapter_planes(
    config: RunConfig, run_dir: RunDirectory, console: Console
) -> AsyncGenerator[Planes[AdapterRouters]]:
    """Start the processes of a run with several adapters. They end with the block.

    Raises:
        ActorDiedError: A process did not start in time.
    """
    from titan_rl.cluster.adapter_routers import AdapterRouters
    from titan_rl.cluster.run_processes import start_processes

    (files := HostFiles(run_dir.path)).begin()
    async with start_processes(config, run_dir, PublishedWeights(), console) as processes:
        routers = processes.router = AdapterRouters(processes, config.experiments, console)
        watch = watcher(config, files, processes)
        yield Planes(routers, processes.training, watch, processes.waits_for, processes=processes)
        await asyncio.gather(routers.close(), processes.training.close())


def watcher(
    config: RunConfig,
    files: HostFiles,
    processes: GeneratorProcesses,
    history: HostHistory | None = None,
    provided: ProvidedHosts | None = None,
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Build the function that watches the processes of a run: it replaces dead ones, and admits new hosts."""
    watch_hosts = hosts_watcher(config.hosts, files, processes, history, provided)

    async def watch() -> None:
        async with background_tasks(hosts=watch_hosts()):
            await processes.watch()

    return watch


def describe_processes(config: RunConfig, components: Components) -> str:
    """Describe the processes to start: "2 generators, 1 rollout worker and a trainer"; "" if there are none."""
    counts = {
        "generator": config.generation.num_generators if components.replicas is None else 0,
        "rollout worker": config.rollout.num_workers,
        "trainer": 1 if components.trainer is None else 0,
    }
    named = [
        f"{'a' if name == 'trainer' else count} {name}{'' if count == 1 else 's'}"
        for name, count in counts.items()
        if count
    ]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


def pickled(strategy: Strategy) -> bytes:
    """Pickle a strategy for the router shards of rollout workers, which each have a copy.

    Raises:
        ConfigError: The strategy does not pickle.
    """
    try:
        return pickle.dumps(strategy)
    except Exception as error:
        raise ConfigError(
            f"strategy = {strategy!r} does not pickle: {reason(error)}; each rollout worker needs a copy. Set "
            "rollout.num_workers to 0, or name a function in routing.strategy"
        ) from error


def _check_members(name: str, given: object, kind: type, unless: frozenset[str] = frozenset()) -> None:
    lacking = [member for member in sorted(get_protocol_members(kind) - unless) if not hasattr(given, member)]
    if lacking:
        raise ConfigError(f"{name} = {given!r} is not a {kind.__name__}: it lacks {', '.join(lacking)}")
