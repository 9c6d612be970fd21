"""The controller's side of the trainer: the `Trainer` over its ranks, their placement, and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.cluster.hosts.attached_hosts import Hosts
from titan_rl.cluster.hosts.placement import ProcessPlace, place_trainer, place_trainer_again
from titan_rl.cluster.hosts.preflight import HostNeeds
from titan_rl.cluster.processes.process import RunFiles
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.processes.roles import ProcessId, Role
from titan_rl.cluster.supervision import SupervisedProcesses, started
from titan_rl.cluster.trainer_actor import TrainerActor, TrainerSettings
from titan_rl.config.function_names import named_modules
from titan_rl.config.hosts import Roles
from titan_rl.config.model_folder import start_limit_s
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import StateDictConfig
from titan_rl.config.task_tables import type_of
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import summary
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import ActorDiedError, ConfigError, NoHostError, TitanRLError
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.renderer.registry import fit_template
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import Costs, StepPlan, plan_step
from titan_rl.training.settings import ModelConfig, PolicySettings, TrainingConfig
from titan_rl.training.state.checkpoint import being_written, rename_completed, step_directory, written_by
from titan_rl.training.trainer_protocol import StepResult, agreed_version
from titan_rl.weights.manifest import KnownLayouts, join
from titan_rl.weights.types import Manifest


class ActorTrainer:
    """The controller's `Trainer` over the ranks of a `TrainerActor`.

    Checkpoints and exports are written under temporary names and renamed here once all ranks have completed them,
    because ranks that can no longer be reached may continue to write while others replace them.

    Attributes:
        is_leaving: Whether its host is being drained, so that the trainer has to move.

    Args:
        adapter: Name of the adapter that this object trains, if the run has several.

    Raises:
        ActorDiedError: Raised by every call once a process of the trainer has ended.
    """

    def __init__(
        self,
        remote: RemoteProcess,
        ranks: Sequence[Any],
        training: TrainingConfig,
        model: ModelConfig,
        adapter: str = "",
    ) -> None:
        self.remote = remote
        self._adapter = adapter
        self.is_leaving = False
        self._training = training
        self._model = model
        self._costs = Costs.of_model(Path(model.path))
        self._layouts = KnownLayouts()
        self._ranks = ranks
        self._writer = uuid.uuid4().hex
        self._saving: Path | None = None  # final path of the checkpoint begun last

    async def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        """Run one optimizer step; see `TrainerCore.step`. Each rank receives only its rows."""
        results: list[StepResult] = await self._each("train", await self._rows(samples))
        agreed_version([result.version for result in results], "after a step")
        return results[0]

    async def measure(self, samples: Sequence[TrainingSample]) -> float:
        """Measure the loss; see `TrainerCore.measure`. Each rank receives only its rows."""
        return (await self._each("measure", await self._rows(samples)))[0]

    async def _rows(self, samples: Sequence[TrainingSample]) -> list[list[StepPlan]]:
        """Pack the samples, and return the arguments of each rank."""
        with span("packing", "trainer"):
            plans = await in_thread(plan_step, samples, self._training, self._costs)
        return [[plan] for plan in plans for _ in range(self._training.ranks_a_row)]

    async def begin_publish(self) -> None:
        await self._all("begin_publish")

    async def finish_publish(self) -> Manifest:
        """Return the version begun last, once each rank has published its shard.

        Raises:
            StateDictError: A rank could not publish. Then no rank keeps its part.
        """
        return join(self._layouts.unpack(await self._all("finish_publish", self._layouts.digests)))

    async def hold_published(self, version: int | None) -> bool:
        return all(await self._all("hold_published", version))

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        path = step_directory(root, run_state["step"])
        saved = await self._all("begin_save", written_by(self._writer, path), run_state)
        self._saving = path
        return agreed_version(saved, "in one checkpoint")

    async def finish_save(self) -> None:
        await self._all("finish_save")
        if self._saving is not None:
            await in_thread(self._rename_completed, self._saving, "step-")
            self._saving = None

    async def load(self, checkpoint: Path) -> int:
        """Load a checkpoint folder, and return its version.

        Raises:
            DamagedCheckpointError: The bytes differ from those that were written.
            CheckpointError: The checkpoint is of another model.
        """
        return agreed_version(await self._all("load", checkpoint), "from one checkpoint")

    async def export(self, path: Path) -> None:
        # Found in the controller, where the renderer has imported transformers; the import would take the trainer a
        # second.
        fit = await in_thread(fit_template, self._model.path, self._model.renderer)
        await self._all("export", written_by(self._writer, path), fit)
        await in_thread(self._rename_completed, path, path.name)

    def _rename_completed(self, path: Path, others: str) -> None:
        """Rename a completed folder to its final name, and remove abandoned ones.

        Args:
            others: Prefix of the names of unfinished folders that no process will complete.
        """
        rename_completed(written_by(self._writer, path), path)
        for left in being_written(path.parent, others):
            shutil.rmtree(left, ignore_errors=True)

    async def close(self) -> None:
        """Release the published versions."""
        await self._all("close", timeout_s=30.0)

    @property
    def excused(self) -> bool:
        """Whether the trainer ended because of its host, not its work. Such an end does not count as a death."""
        return self.is_leaving or self.remote.excused

    async def ended(self) -> str:
        """Wait for the end of one of the trainer's processes, and return the reason."""
        await self.remote.ended.wait()
        return f"{self.remote.name} {'leaves its host' if self.is_leaving else 'died'}: {self.remote.reason}"

    def end(self, reason: str) -> None:
        """Kill the rest of the trainer."""
        self.remote.end(reason)

    async def _all(self, endpoint: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call every rank with the same arguments, and return their results by rank."""
        return await self._each(endpoint, [args] * len(self._ranks), timeout_s)

    async def _each(
        self, endpoint: str, arguments: Sequence[Sequence[Any]], timeout_s: float | None = None
    ) -> list[Any]:
        """Call every rank with its own arguments, and return their results by rank."""
        calls = [
            self.remote.call(getattr(rank, endpoint), *own, self._adapter, timeout_s=timeout_s)
            for rank, own in zip(self._ranks, arguments, strict=True)
        ]
        try:
            return await asyncio.gather(*calls)
        except TitanRLError:
            raise
        except Exception as error:
            if len(self._ranks) == 1:
                raise
            # An unexpected error, above all the end of a rank, leaves the ranks out of step.
            raise ActorDiedError(f"trainer died: a rank failed with {summary(error)}") from error


logger = logging.getLogger(__name__)

TRAINER = ProcessId(Role.TRAINER)
CLEAR_TIMEOUT_S = 3.0
"""Longest wait for the end of the rest of a trainer that died, in seconds. A lost host does not answer."""
LOOK_S = 0.5
"""Interval for checking for hosts while waiting for them, in seconds."""


def needs_of(config: RunConfig, files: RunFiles, *, trains: bool = True, generates: bool = True) -> HostNeeds:
    """Requirements of a run on its hosts."""
    tasks = {type_of(source.task).partition(":")[0] for source in config.sources}
    modules = tuple(sorted(tasks | named_modules(config)))
    return HostNeeds(
        files.path,
        Path(config.model.path),
        modules,
        train_gpus=config.training.num_ranks // config.hosts.train,
        generate_gpus=config.generation.tensor_parallel_size,
        trains=trains,
        generates=generates,
    )


def trainer_settings(
    config: RunConfig, files: RunFiles, statedict: StateDictConfig | None, *, lends_memory: bool = False
) -> TrainerSettings:
    """Settings of the trainer of a run; see `TrainerSettings`."""
    policies = {
        name: PolicySettings(experiment.training, experiment.correction)
        for name, experiment in (config.experiments or {"": config}).items()
    }
    return TrainerSettings(config.model, policies, statedict, files.run_id, config.seed, lends_memory, files.models)


def gpus_for_training(hosts: Hosts, files: RunFiles) -> dict[str, tuple[str, ...]]:
    """GPUs by host of the hosts on which a trainer may start. They see the run's folder, which has the checkpoints."""
    return {
        host.name: host.gpus for host in hosts if hosts.takes(host.name) and host.path(files.config) == files.config
    }


class TrainerProcesses:
    """Processes of a trainer, one per rank, and the processes that replace them.

    Attributes:
        trainer: The current trainer; with several adapters, that of the first.
        adapters: The current trainer of each adapter by name. Without several adapters, `trainer` with the name "".
        before_leaving: Saves the training state before the trainer leaves a host.
        waits_for: Description of the hosts that a restart waits for; "" if it waits for none.

    Args:
        places: Returns the places of the ranks that start next. Raises `ConfigError` if the present hosts have none.
        wait_s: Longest time that a restart waits for hosts with places, in seconds.
    """

    trainer: ActorTrainer
    adapters: Mapping[str, ActorTrainer]

    def __init__(
        self,
        processes: SupervisedProcesses,
        settings: TrainerSettings,
        places: Callable[[], Sequence[ProcessPlace]],
        *,
        wait_s: float,
    ) -> None:
        self._processes = processes
        self._settings = settings
        self._places = places
        self._wait_s = wait_s
        self._notify = processes.hosts.notify
        self.before_leaving: Callable[[], Awaitable[object]] = _nothing
        self.waits_for = ""

    async def start(self) -> ActorTrainer:
        """Start all ranks, and load the model.

        Raises:
            ActorDiedError: The ranks did not start in time.
            ModelError: The model folder cannot be used.
        """
        return await self._start(self._places())

    async def _start(self, places: Sequence[ProcessPlace]) -> ActorTrainer:
        settings = self._settings
        remote, ranks = await self._processes.spawn(TRAINER, TrainerActor, settings, places=places)
        self.adapters = {
            name: ActorTrainer(remote, ranks, each.training, settings.model, name)
            for name, each in settings.policies.items()
        }
        self.trainer = next(iter(self.adapters.values()))
        return self.trainer

    async def restart(self) -> ActorTrainer:
        """Start all ranks again, once the rest of the previous trainer has ended and hosts have places for the ranks.

        Raises:
            NoHostError: No host had places within `wait_s`.
        """
        await self._processes.clear(self.trainer.remote, CLEAR_TIMEOUT_S)
        try:
            places = await self._places_in_time(self._wait_s, holds_up=True)
        finally:
            self.waits_for = ""
        return await self._start(places)

    async def finish(self, limit_s: float) -> None:
        """Prepare the trainer for the drain of its host: save it, and wait up to `limit_s` seconds for places on other
        hosts. Training continues until then."""
        self.trainer.is_leaving = True
        with contextlib.suppress(TimeoutError, NoHostError):
            async with asyncio.timeout(limit_s):
                await self.before_leaving()
                await self._places_in_time(limit_s)

    async def _places_in_time(self, limit_s: float, *, holds_up: bool = False) -> Sequence[ProcessPlace]:
        """Wait for places of all ranks.

        Args:
            holds_up: Whether there is no trainer during the wait, so that `waits_for` shows it.
        """
        clock = asyncio.get_running_loop().time
        began, is_reported = clock(), False
        while True:
            try:
                return self._places()
            except ConfigError as error:
                if clock() - began >= limit_s:
                    raise NoHostError(f"the trainer has waited {limit_s:g} s for hosts: {error}") from None
                if not is_reported:
                    lacks = f"hosts, {limit_s:g} s at most: {error}"
                    self._notify(f"the trainer waits for {lacks}")
                    self.waits_for = lacks if holds_up else ""
                    is_reported = True
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Release the published versions. Those of a dead trainer are cleared by others."""
        with contextlib.suppress(ActorDiedError):
            for trainer in self.adapters.values():
                await trainer.close()


async def _nothing() -> None: ...


class TrainerAlone(SupervisedProcesses):
    """Trainer that publishes no weights, on hosts that come and go. Made by `start_trainer`.

    Attributes:
        training: Processes of the trainer.
    """

    training: TrainerProcesses

    def __init__(self, config: RunConfig, files: RunFiles, hosts: Hosts) -> None:
        super().__init__(files, hosts, start_limit_s(config.model, config.generation))
        self._config = config
        self._run_files = files
        self._trainer_places: tuple[ProcessPlace, ...]

    async def start(self) -> None:
        config = self._config
        settings = trainer_settings(config, self._run_files, None)
        train = Roles.of(config.hosts, self.hosts.names).train
        self._trainer_places = place_trainer(config.training, train, self.hosts.gpus)
        self.training = TrainerProcesses(self, settings, self._place, wait_s=config.hosts.wait_s)
        await self.training.start()

    def _place(self) -> Sequence[ProcessPlace]:
        gpus = gpus_for_training(self.hosts, self._run_files)
        self._trainer_places = place_trainer_again(self._config.training, self._trainer_places, gpus)
        return self._trainer_places

    async def join(self, host: str) -> Sequence[str]:
        """Start nothing: a trainer that waits for hosts finds this one by itself."""
        return ()

    async def leave(self, host: str, why: str) -> None:
        """Save a trainer on this host and move it, or end it after `hosts.drain_s` seconds."""
        limit_s = self.hosts.config.drain_s
        await self._leave(host, why, lambda remote: self.training.finish(limit_s))


@contextlib.asynccontextmanager
async def start_trainer(config: RunConfig, files: RunFiles, console: Console = LOG) -> AsyncGenerator[TrainerAlone]:
    """Context manager: start a trainer that publishes no weights. Its processes end with the block.

    Raises:
        ConfigError: There are too few GPUs.
        ActorDiedError: A process did not start within `generation.start_timeout_s`.
    """
    needs = needs_of(config, files, generates=False)
    make = partial(TrainerAlone, config, files)
    async with started(files, config.hosts, needs, console, make) as alone:
        yield alone
