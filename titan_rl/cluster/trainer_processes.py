"""The trainer's processes: as those of a whole run, or alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from titan_rl.cluster.actor_trainer import ActorTrainer
from titan_rl.cluster.hosts.host import Host
from titan_rl.cluster.hosts.hosts import Hosts
from titan_rl.cluster.hosts.placement import ProcessPlace, place_trainer, place_trainer_again
from titan_rl.cluster.hosts.preflight import HostNeeds
from titan_rl.cluster.processes.process import RunFiles
from titan_rl.cluster.supervised import SupervisedProcesses, started
from titan_rl.cluster.trainer_actor import TrainerActor, TrainerSettings
from titan_rl.config.class_kinds import type_of
from titan_rl.config.functions import named_modules
from titan_rl.config.hosts import Roles
from titan_rl.config.model_folder import start_limit_s
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.telling import logged
from titan_rl.core.errors import ActorDiedError, ConfigError, NoHostError

logger = logging.getLogger(__name__)

TRAINER = "trainer"
CLEAR_TIMEOUT_S = 3.0
"""Longest wait for the end of what is left of a trainer that died. A host that is gone does not answer."""
LOOK_S = 0.5
"""How often hosts are looked at that are waited for."""


def needs_of(config: RunConfig, files: RunFiles, *, trains: bool = True, generates: bool = True) -> HostNeeds:
    """What a run has to find on its hosts."""
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


class TrainerProcesses:
    """The processes of a trainer, one for each of its ranks, and those that take their place.

    Attributes:
        trainer: the newest.
        before_leaving: has what is trained saved, before the trainer leaves a host.
        waits_for: what a restart needs that is not there; "" where it lacks nothing.

    Args:
        places: of the ranks that start next. A `ConfigError` says that the hosts that are there have none.
        wait_s: how long a restart waits for hosts that have.
    """

    trainer: ActorTrainer

    def __init__(
        self,
        processes: SupervisedProcesses,
        settings: TrainerSettings,
        places: Callable[[], Sequence[ProcessPlace]],
        *,
        wait_s: float,
        tell: Callable[[str], object] = logger.info,
    ) -> None:
        self._processes = processes
        self._settings = settings
        self._places = places
        self._wait_s = wait_s
        self._tell = tell
        self.before_leaving: Callable[[], Awaitable[object]] = _nothing
        self.waits_for = ""

    async def start(self) -> ActorTrainer:
        """All ranks, which have loaded the model.

        Raises:
            ActorDiedError: they did not start in time.
            ModelError: the model folder cannot be used.
        """
        return await self._start(self._places())

    async def _start(self, places: Sequence[ProcessPlace]) -> ActorTrainer:
        remote, ranks = await self._processes.spawn(TRAINER, TrainerActor, self._settings, places=places)
        self.trainer = ActorTrainer(remote, ranks, self._settings.training)
        return self.trainer

    async def restart(self) -> ActorTrainer:
        """As `start`, once nothing is left of the one before, and hosts have places for the ranks.

        Raises:
            NoHostError: none had within `wait_s`.
        """
        await self._processes.clear(self.trainer.remote, CLEAR_TIMEOUT_S)
        try:
            places = await self._places_in_time(self._wait_s, holds_up=True)
        finally:
            self.waits_for = ""
        return await self._start(places)

    async def finish(self, limit_s: float) -> None:
        """Before the trainer ends because its host is to go: what is trained is saved, and other hosts have places for
        it, or so long has passed. Until then it trains on."""
        self.trainer.is_leaving = True
        with contextlib.suppress(TimeoutError, NoHostError):
            async with asyncio.timeout(limit_s):
                await self.before_leaving()
                await self._places_in_time(limit_s)

    async def _places_in_time(self, limit_s: float, *, holds_up: bool = False) -> Sequence[ProcessPlace]:
        """
        Args:
            holds_up: there is no trainer meanwhile.
        """
        clock = asyncio.get_running_loop().time
        began, told = clock(), False
        while True:
            try:
                return self._places()
            except ConfigError as error:
                if clock() - began >= limit_s:
                    raise NoHostError(f"the trainer has waited {limit_s:g} s for hosts: {error}") from None
                if not told:
                    lacks = f"hosts, {limit_s:g} s at most: {error}"
                    self._tell(f"the trainer waits for {lacks}")
                    self.waits_for = lacks if holds_up else ""
                    told = True
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Give the published versions back. What died with them is cleared by others."""
        with contextlib.suppress(ActorDiedError):
            await self.trainer.close()


async def _nothing() -> None: ...


class TrainerAlone(SupervisedProcesses):
    """A trainer that publishes to nobody, on hosts that come and go. Made by `start_trainer`.

    Attributes:
        training: its processes.

    Args:
        tell: shows a person what it waits for.
    """

    training: TrainerProcesses

    def __init__(self, config: RunConfig, files: RunFiles, hosts: Hosts, tell: Callable[[str], object]) -> None:
        super().__init__(files, hosts, start_limit_s(config.model, config.generation))
        self._config = config
        self._config_path = files.config
        self._began_with = files.model
        self._tell = logged(tell, logger)
        self._trainer_places: tuple[ProcessPlace, ...]

    async def start(self) -> None:
        config = self._config
        settings = TrainerSettings(
            config.model,
            config.training,
            config.correction,
            None,
            self._files.run_id,
            config.seed,
            began_with=self._began_with,
        )
        train = Roles.of(config.hosts, self.hosts.names).train
        self._trainer_places = place_trainer(config.training, train, self.hosts.gpus)
        self.training = TrainerProcesses(self, settings, self._place, wait_s=config.hosts.wait_s, tell=self._tell)
        await self.training.start()

    def _place(self) -> Sequence[ProcessPlace]:
        there = [host for host in self.hosts if self._takes(host.name) and may_train(host, self._config_path)]
        gpus = {host.name: host.gpus for host in there}
        self._trainer_places = place_trainer_again(self._config.training, self._trainer_places, gpus)
        return self._trainer_places

    async def join(self, host: str) -> Sequence[str]:
        """Nothing is started: a trainer that waits for a host finds this one."""
        return ()

    async def leave(self, host: str, why: str) -> None:
        """The trainer, if it is there, is saved and moves, or goes once `hosts.drain_s` have passed."""
        limit_s = self.hosts.config.drain_s
        await self._leave(host, why, lambda remote: self.training.finish(limit_s))


def may_train(host: Host, config: Path) -> bool:
    """Whether it sees the run's folder, where checkpoints are, by the file of its settings."""
    return host.path(config) == config


@contextlib.asynccontextmanager
async def start_trainer(
    config: RunConfig, files: RunFiles, tell: Callable[[str], object] = logger.info
) -> AsyncGenerator[TrainerAlone]:
    """A trainer that publishes to nobody, whose processes end with the block.

    Raises:
        ConfigError: there are GPUs, and too few of them.
        ActorDiedError: a process did not start within `generation.start_timeout_s`.
    """
    needs = needs_of(config, files, generates=False)
    make = partial(TrainerAlone, config, files, tell=tell)
    async with started(files, config.hosts, needs, tell, make) as alone:
        yield alone
