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

from monarch.actor import concurrent_endpoint

from titan_rl.actors.processes.garbage import growing_heap
from titan_rl.actors.processes.gpus import use_gpus
from titan_rl.actors.processes.process import ProcessActor
from titan_rl.actors.processes.remote_process import RemoteProcess
from titan_rl.calls.threads import in_thread
from titan_rl.calls.user_code import summary
from titan_rl.config.sections import StateDictConfig
from titan_rl.errors import ActorDiedError, CheckpointError, TitanRLError
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import StepPlan, plan_step
from titan_rl.training.protocol import StepResult, agreed_version
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.training.state.checkpoint import step_directory
from titan_rl.weights.shards import join
from titan_rl.weights.transports.registry import TransportSpec, make_transport
from titan_rl.weights.types import Manifest

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Everything the trainer process needs."""

    model: ModelConfig
    training: TrainingConfig
    correction: CorrectionConfig
    statedict: StateDictConfig | None  # None publishes nothing
    run_id: str
    log_path: str
    seed: int
    gpus: tuple[str, ...] = ()  # one for each rank


class TrainerActor(ProcessActor):
    """One rank: steps the optimizer and publishes the weights. Its calls run one at a time, in the order they come, and
    go to all ranks alike."""

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__(settings.log_path)
        # A rank that sees one GPU cannot take another's: torch's current device is each thread's own.
        use_gpus(settings.gpus[self._rank : self._rank + 1], local_rank=0)
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def _run(self, function: Callable[..., R], *args: Any) -> R:
        # Monarch keeps the actor that calls in the context.
        work = partial(contextvars.copy_context().run, _outcome, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @concurrent_endpoint
    async def start(self) -> None:
        """Returns once the model is loaded.

        Raises:
            ModelError: the model folder cannot be used.
        """
        await self._run(self._load)

    def _load(self) -> None:
        settings, statedict = self._settings, self._settings.statedict
        with growing_heap():
            from titan_rl.training.publishing import WeightPublisher
            from titan_rl.training.trainer import TrainerCore

            self._trainer = TrainerCore(settings.model, settings.training, settings.correction, seed=settings.seed)
        if statedict is not None:
            spec = TransportSpec(settings.run_id, statedict.pull_timeout_s, self._rank)
            self._publisher = WeightPublisher(
                self._trainer,
                make_transport(statedict.transport, spec),
                num_probes=statedict.num_probes,
                tolerance=statedict.tolerance,
                seed=settings.seed,
            )
        logger.info("training the model of %s", settings.model.path)

    @concurrent_endpoint
    async def train(self, plan: StepPlan) -> StepResult:
        return await self._run(self._trainer.train, plan)

    @concurrent_endpoint
    async def measure(self, plan: StepPlan) -> float:
        return await self._run(self._trainer.measure_plan, plan)

    @concurrent_endpoint
    async def begin_publish(self) -> None:
        await self._run(self._publisher.begin)

    @concurrent_endpoint
    async def finish_publish(self) -> Manifest:
        """This rank's part."""
        return await in_thread(self._publisher.finish)

    @concurrent_endpoint
    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        return await self._run(self._begin_save, root, run_state)

    def _begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        version = self._trainer.version
        if run_state["step"] != version:
            raise CheckpointError(
                f"the trainer has version {version}, and the run's state is that of version {run_state['step']}: "
                "they are not saved together"
            )
        self._trainer.begin_save(step_directory(root, version), {"run_state.json": json.dumps(run_state)})
        return version

    @concurrent_endpoint
    async def finish_save(self) -> None:
        await in_thread(self._trainer.finish_save)

    @concurrent_endpoint
    async def load(self, checkpoint: Path) -> int:
        await self._run(self._trainer.load, checkpoint)
        return self._trainer.version

    @concurrent_endpoint
    async def close(self) -> None:
        if self._settings.statedict is not None:
            await self._run(self._publisher.close)

    @concurrent_endpoint
    async def export(self, path: Path) -> None:
        await self._run(self._trainer.export_hf, path)


class ActorTrainer:
    """The controller's `Trainer` over the ranks of a `TrainerActor`.

    Raises:
        ActorDiedError: from every call, once a process of the trainer is gone.
    """

    def __init__(self, remote: RemoteProcess, ranks: Any, training: TrainingConfig) -> None:
        self._remote = remote
        self._plan = partial(
            plan_step,
            row_tokens=training.row_tokens,
            rows_per_micro_batch=training.rows_per_micro_batch,
            minibatches=training.minibatches,
            ranks=training.data_parallel,
            share_prompts=training.share_prompts,
        )
        self._tensor_parallel = training.tensor_parallel
        size = training.data_parallel * training.tensor_parallel
        self._ranks = [ranks.slice(procs=rank) for rank in range(size)]

    async def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        """As `TrainerCore.step`. Each rank is sent its own rows."""
        results: list[StepResult] = await self._all("train", *await self._rows(samples))
        agreed_version([result.version for result in results], "after a step")
        return results[0]

    async def measure(self, samples: Sequence[TrainingSample]) -> float:
        """As `TrainerCore.measure`. Each rank is sent its own rows."""
        return (await self._all("measure", *await self._rows(samples)))[0]

    async def _rows(self, samples: Sequence[TrainingSample]) -> list[list[StepPlan]]:
        """What each rank is sent."""
        plans = await in_thread(self._plan, samples)
        return [[plan] for plan in plans for _ in range(self._tensor_parallel)]

    async def begin_publish(self) -> None:
        await self._all("begin_publish")

    async def finish_publish(self) -> Manifest:
        """The version begun last, of which each rank has published its shard.

        Raises:
            StateDictError: a rank could not; none of them keeps a part of it.
        """
        return join(await self._all("finish_publish"))

    async def publish(self) -> Manifest:
        """Both at once: the current version."""
        await self.begin_publish()
        return await self.finish_publish()

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        saved = await self._all("begin_save", *[(root, run_state)] * len(self._ranks))
        return agreed_version(saved, "in one checkpoint")

    async def finish_save(self) -> None:
        await self._all("finish_save")

    async def load(self, checkpoint: Path) -> int:
        """Continue from a checkpoint folder, whose version is returned.

        Raises:
            DamagedCheckpointError: its bytes are not those that were written.
            CheckpointError: it is of another model.
        """
        return agreed_version(await self._all("load", *[(checkpoint,)] * len(self._ranks)), "from one checkpoint")

    async def export(self, path: Path) -> None:
        await self._all("export", *[(path,)] * len(self._ranks))

    async def close(self) -> None:
        """Give the published versions back."""
        await self._all("close", timeout_s=30.0)

    async def _all(self, endpoint: str, *arguments: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Call every rank, each with its arguments, and return what each one does."""
        calls = [
            self._remote.call(getattr(rank, endpoint), *own, timeout_s=timeout_s)
            for rank, own in zip(self._ranks, arguments or [()] * len(self._ranks), strict=True)
        ]
        try:
            return await asyncio.gather(*calls)
        except TitanRLError:
            raise
        except Exception as error:
            if len(self._ranks) == 1:
                raise
            # What no rank foresaw leaves them out of step; above all the end of one of them.
            raise ActorDiedError(f"trainer died: a rank failed with {summary(error)}") from error


def _outcome(function: Callable[..., R], *args: Any) -> R:
    try:
        return function(*args)
    except StopIteration as error:  # of a user's loss, say: no future takes it, and its caller would wait for ever
        raise RuntimeError(f"StopIteration: {error}") from error
