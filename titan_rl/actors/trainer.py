"""The trainer in a process of its own, and the handle by which the controller knows it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint

from titan_rl.actors.process import call, enter_actor_process
from titan_rl.config.sections import CorrectionConfig, ModelConfig, StateDictConfig, TrainingConfig
from titan_rl.statedict.types import Manifest
from titan_rl.training.checkpoint import atomic_directory, step_directory
from titan_rl.training.sample import TrainingSample

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
    """Steps the optimizer and publishes the weights. Its calls run one at a time, in the order they come."""

    def __init__(self, settings: TrainerSettings) -> None:
        enter_actor_process(settings.log_path)
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def _run(self, function: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    @concurrent_endpoint
    async def start(self) -> None:
        """Returns once the model is loaded.

        Raises:
            ModelError: the model folder cannot be used.
        """
        await self._run(self._load)

    def _load(self) -> None:
        from titan_rl.statedict.shared_memory import SharedMemoryTransport
        from titan_rl.training.publishing import WeightPublisher
        from titan_rl.training.trainer import TrainerCore

        settings = self._settings
        self._trainer = TrainerCore(settings.model, settings.training, settings.correction, seed=settings.seed)
        self._publisher = WeightPublisher(
            self._trainer,
            SharedMemoryTransport(settings.run_id),
            model=settings.model,
            statedict=settings.statedict,
            seed=settings.seed,
        )
        logger.info("training the model of %s", settings.model.path)

    @concurrent_endpoint
    async def step(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        return (await self._run(self._trainer.step, samples)).metrics

    @concurrent_endpoint
    async def publish(self) -> Manifest:
        return await self._run(self._publisher.publish)

    @concurrent_endpoint
    async def save(self, root: Path, run_state: dict[str, Any]) -> int:
        return await self._run(self._save, root, run_state)

    def _save(self, root: Path, run_state: dict[str, Any]) -> int:
        version = self._trainer.version
        with atomic_directory(step_directory(root, version)) as folder:
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
    """The controller's `Trainer` over one `TrainerActor`.

    Raises:
        ActorDiedError: from every call, once the trainer's process is gone.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def step(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        return await call(self._actor.step, samples, who="trainer")

    async def publish(self) -> Manifest:
        return await call(self._actor.publish, who="trainer")

    async def save(self, root: Path, run_state: dict[str, Any]) -> int:
        return await call(self._actor.save, root, run_state, who="trainer")

    async def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint folder.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        await call(self._actor.load, checkpoint, who="trainer")

    async def export(self, path: Path) -> None:
        await call(self._actor.export, path, who="trainer")

    async def close(self) -> None:
        """Give the published versions back."""
        await call(self._actor.close, who="trainer", timeout_s=30.0)
