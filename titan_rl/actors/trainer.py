"""The trainer in processes of its own, and the handle by which the controller knows it."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint, current_rank

from titan_rl.actors.process import call, enter_actor_process, log_of_rank
from titan_rl.config.sections import ModelConfig, StateDictConfig
from titan_rl.config.training import CorrectionConfig, TrainingConfig
from titan_rl.errors import ActorDiedError, TitanRLError
from titan_rl.statedict.types import Manifest
from titan_rl.training.checkpoint import atomic_directory, step_directory, temporary_of
from titan_rl.training.sample import TrainingSample
from titan_rl.training.step_plan import StepPlan, plan_step

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Everything the trainer process needs."""

    model: ModelConfig
    training: TrainingConfig
    correction: CorrectionConfig
    statedict: StateDictConfig
    run_id: str
    log_path: str
    seed: int


class TrainerActor(Actor):
    """One rank: steps the optimizer and publishes the weights. Its calls run one at a time, in the order they come, and
    go to all ranks alike."""

    def __init__(self, settings: TrainerSettings) -> None:
        rank = current_rank().rank
        enter_actor_process(log_of_rank(settings.log_path, rank))
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def _run(self, function: Callable[..., R], *args: Any) -> R:
        # Monarch keeps the actor that calls in the context.
        work = partial(contextvars.copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @concurrent_endpoint
    async def start(self) -> None:
        """Returns once the model is loaded.

        Raises:
            ModelError: the model folder cannot be used.
        """
        await self._run(self._load)

    def _load(self) -> None:
        from titan_rl.statedict.transports import make_transport
        from titan_rl.training.publishing import WeightPublisher
        from titan_rl.training.trainer import TrainerCore

        settings = self._settings
        self._trainer = TrainerCore(settings.model, settings.training, settings.correction, seed=settings.seed)
        self._publisher = WeightPublisher(
            self._trainer,
            make_transport(settings.statedict, settings.run_id) if self._trainer.is_first else None,
            model=settings.model,
            statedict=settings.statedict,
            seed=settings.seed,
        )
        logger.info("training the model of %s", settings.model.path)

    @concurrent_endpoint
    async def train(self, plan: StepPlan) -> dict[str, float]:
        return (await self._run(self._trainer.train, plan)).metrics

    @concurrent_endpoint
    async def publish(self) -> Manifest | None:
        return await self._run(self._publisher.publish)

    @concurrent_endpoint
    async def save(self, root: Path, run_state: dict[str, Any]) -> int:
        return await self._run(self._save, root, run_state)

    def _save(self, root: Path, run_state: dict[str, Any]) -> int:
        version = self._trainer.version
        checkpoint = step_directory(root, version)
        if not self._trainer.is_first:
            self._trainer.save(temporary_of(checkpoint) / "trainer")
            return version
        with atomic_directory(checkpoint) as folder:
            self._trainer.save(folder / "trainer")
            (folder / "run_state.json").write_text(json.dumps(run_state | {"step": version}))
        return version

    @concurrent_endpoint
    async def load(self, checkpoint: Path) -> None:
        await self._run(self._trainer.load, checkpoint / "trainer")

    @concurrent_endpoint
    async def close(self) -> None:
        await self._run(self._publisher.close)

    @concurrent_endpoint
    async def export(self, path: Path) -> None:
        await self._run(self._trainer.export_hf, path)


class ActorTrainer:
    """The controller's `Trainer` over the ranks of a `TrainerActor`.

    Raises:
        ActorDiedError: from every call, once a process of the trainer is gone.
    """

    def __init__(self, ranks: Any, training: TrainingConfig) -> None:
        self._training = training
        size = training.data_parallel * training.tensor_parallel
        self._ranks = [ranks.slice(procs=rank) for rank in range(size)]

    async def step(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """As `TrainerCore.step`. Each rank is sent its own rows."""
        plans = await asyncio.to_thread(plan_step, samples, self._training)
        return await self._all("train", *([plan] for plan in plans for _ in range(self._training.tensor_parallel)))

    async def publish(self) -> Manifest:
        return await self._all("publish")

    async def save(self, root: Path, run_state: dict[str, Any]) -> int:
        return await self._all("save", *[(root, run_state)] * len(self._ranks))

    async def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint folder.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        await self._all("load", *[(checkpoint,)] * len(self._ranks))

    async def export(self, path: Path) -> None:
        await self._all("export", *[(path,)] * len(self._ranks))

    async def close(self) -> None:
        """Give the published versions back."""
        await self._all("close", timeout_s=30.0)

    async def _all(self, endpoint: str, *arguments: Sequence[Any], timeout_s: float | None = None) -> Any:
        """Call every rank, each with its arguments, and return what the first one does."""
        calls = [
            call(getattr(rank, endpoint), *own, who="trainer", timeout_s=timeout_s)
            for rank, own in zip(self._ranks, arguments or [()] * len(self._ranks), strict=True)
        ]
        try:
            first, *_ = await asyncio.gather(*calls)
        except TitanRLError:
            raise
        except Exception as error:
            if len(self._ranks) == 1:
                raise
            # What no rank foresaw leaves them out of step; above all the end of one of them.
            raise ActorDiedError(f"trainer died: a rank failed with {type(error).__name__}: {error}") from error
        return first
