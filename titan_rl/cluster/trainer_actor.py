"""Actor of the ranks of a trainer. Each rank is a separate process."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint

from titan_rl.cluster.hosts.cores import trainer_threads, usable_cores
from titan_rl.cluster.processes.garbage_collection import growing_heap
from titan_rl.cluster.processes.process import ProcessActor, ProcessSpec, policy_run_id, transport_of
from titan_rl.config.sections import StateDictConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import CheckpointError, ModelError
from titan_rl.core.model_identity import changed_parts
from titan_rl.core.tracing.spans import Track, flush, span
from titan_rl.rollout.renderer.registry import TemplateFit
from titan_rl.training.data.step_plan import StepPlan
from titan_rl.training.settings import ModelConfig, PolicySettings
from titan_rl.training.trainer_protocol import StepResult
from titan_rl.weights.manifest import PackedManifest, pack

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of the trainer process.

    Attributes:
        policies: Settings of the trained policies by name: of several adapters, or of one policy with the name "".
    """

    model: ModelConfig
    policies: Mapping[str, PolicySettings]
    statedict: StateDictConfig | None  # None publishes nothing
    run_id: str
    seed: int
    lends_memory: bool = False  # between two steps engines on its GPUs use the memory that it does not hold
    began_with: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, Mapping[str, str]]
    )  # identity of each model that the run reads, by setting


class ModelCheck:
    """Compares the folders of the initial model and of the adapters to start from, as seen by a trainer's host, with
    those of the beginning of the run.

    Changed weights are refused only when they are used. A checkpoint that is loaded replaces them, except in the
    reference model of `kl_coef` and in the base model of an adapter, so there they are refused at once.

    Raises:
        ModelError: Other parts of a model have changed, or the changed weights serve as a reference or base model.
    """

    def __init__(self, settings: TrainerSettings, host: str) -> None:
        self._complaints: dict[str, str] = {}  # by policy
        for policy, each in settings.policies.items():
            adapter, kl_coef = each.training.adapter, each.training.kl_coef
            self._compare(settings, policy, "model.path", settings.model.path, host, bool(kl_coef or adapter.is_on))
            if adapter.start is not None:
                key = f"adapters.{policy}.training.adapter.start" if policy else "training.adapter.start"
                self._compare(settings, policy, key, adapter.start, host, bool(kl_coef))

    def _compare(self, settings: TrainerSettings, policy: str, key: str, path: str, host: str, is_kept: bool) -> None:
        """Compare one folder.

        Args:
            is_kept: Whether its weights are used even after a checkpoint is loaded.
        """
        if not (changed := changed_parts(Path(path), settings.began_with.get(key, {}))):
            return
        initial = "model" if key == "model.path" else "adapter"
        complaint = (
            f"{key} = {path!r} on host {host} is not the initial {initial} of the run: {', '.join(changed)} "
            f"changed; put that {initial} back, and continue with --resume"
        )
        if changed != ["weights"] or is_kept:
            raise ModelError(complaint)
        self._complaints[policy] = complaint

    def checkpoint_loaded(self, policy: str = "") -> None:
        """Note that a checkpoint has replaced the weights of a policy."""
        self._complaints.pop(policy, None)

    def check_weights(self, policy: str = "") -> None:
        """Check that the weights of a policy may be used.

        Raises:
            ModelError: The weights are neither from a checkpoint nor those of the beginning.
        """
        if policy in self._complaints:
            raise ModelError(self._complaints[policy])


class TrainerActor(ProcessActor):
    """Actor of one trainer rank: steps the optimizer and publishes the weights. All ranks receive the same calls and
    run them one at a time in the order of arrival. With several adapters each call names one of them."""

    fork_kind = "trainer"

    def __init__(self, spec: ProcessSpec, settings: TrainerSettings) -> None:
        super().__init__(spec)
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._track = Track("train", "trainer")  # of the trainer's thread
        self._has_stepped = False
        self._model: ModelCheck

    async def _run(self, name: str, function: Callable[..., R], *args: Any, is_work: bool = False) -> R:
        """Run a function in the trainer's thread.

        Args:
            is_work: Whether health checks watch the progress. Ranks wait for each other in such calls, so one that
                hangs blocks all.
        """
        # The context holds the calling actor, which Monarch needs.
        work = partial(self._do, name, partial(function, *args), is_work)
        return await asyncio.get_running_loop().run_in_executor(self._thread, contextvars.copy_context().run, work)

    def _do(self, name: str, function: partial[Any], is_work: bool) -> Any:
        self._track.enter(name)
        try:
            with self.work.in_progress() if is_work else nullcontext():
                return function()
        except StopIteration as error:  # from a user's loss: a future cannot hold it, so its caller would wait forever
            raise RuntimeError(f"StopIteration: {error}") from error
        finally:
            self._track.enter("idle", idle=True)

    @concurrent_endpoint
    async def start(self) -> None:
        """Load the model.

        Raises:
            ModelError: The model folder cannot be used.
        """
        await self._run("load", self._load)

    def _load(self) -> None:
        settings, statedict = self._settings, self._settings.statedict
        with growing_heap():
            from titan_rl.training.adapter_trainers import AdapterTrainers
            from titan_rl.training.publishing import WeightPublisher

            threads = trainer_threads(usable_cores())
            self._trainers = AdapterTrainers(settings.model, settings.policies, seed=settings.seed, num_threads=threads)
        self._publishers: dict[str, WeightPublisher] = {}
        if statedict is not None:
            for policy in self._trainers:
                with self._trainers.turn(policy) as trainer:
                    self._publishers[policy] = WeightPublisher(
                        trainer,
                        transport_of(self._spec, policy_run_id(settings.run_id, policy), statedict),
                        num_probes=statedict.num_probes,
                        tolerance=statedict.tolerance,
                        seed=settings.seed,
                    )
        self._model = ModelCheck(settings, self._spec.host)
        logger.info("training the model of %s", settings.model.path)

    @concurrent_endpoint
    async def train(self, plan: StepPlan, policy: str) -> StepResult:
        """Run `TrainerCore.train`, which skips minibatches that cannot be trained on. Adds the metric idle_s: the time
        in seconds that this rank was idle since the end of the previous step; 0 in the first step."""
        return await self._run("step", self._train, plan, policy, is_work=True)

    def _train(self, plan: StepPlan, policy: str) -> StepResult:
        self._track.note(step=self._trainers[policy].version + 1)
        if not self._has_stepped:
            self._track.take()
            self._has_stepped = True
        self._model.check_weights(policy)
        with self._trainers.turn(policy) as trainer:
            result = trainer.train(plan, skip=True)
        return replace(result, metrics={**result.metrics, "idle_s": self._track.take().get("idle", 0.0)})

    @concurrent_endpoint
    async def measure(self, plan: StepPlan, policy: str) -> float:
        return await self._run("measure", self._trainers[policy].measure_plan, plan, is_work=True)

    @concurrent_endpoint
    async def begin_publish(self, policy: str) -> None:
        await self._run("publish", self._begin_publish, policy)

    def _begin_publish(self, policy: str) -> None:
        self._model.check_weights(policy)
        self._publishers[policy].begin()
        if self._settings.lends_memory:
            import torch

            torch.accelerator.empty_cache()  # engines use the step's temporary memory until the next step

    @concurrent_endpoint
    async def finish_publish(self, known: frozenset[str], policy: str) -> PackedManifest:
        """Finish publishing. Returns this rank's part, packed for a receiver that knows the layouts with these
        digests."""
        return pack(await in_thread(self._publishers[policy].finish), known)

    @concurrent_endpoint
    async def hold_published(self, version: int | None, policy: str) -> bool:
        """Keep a published version in addition to the newest ones; see `WeightPublisher.hold`."""
        return await in_thread(self._publishers[policy].hold, version)

    @concurrent_endpoint
    async def begin_save(self, directory: Path, run_state: dict[str, Any], policy: str) -> int:
        return await self._run("save", self._begin_save, directory, run_state, policy)

    def _begin_save(self, directory: Path, run_state: dict[str, Any], policy: str) -> int:
        version = self._trainers[policy].version
        if run_state["step"] != version:
            raise CheckpointError(
                f"the trainer has version {version}, but the run's state is for version {run_state['step']}, so they "
                "are not saved together"
            )
        with self._trainers.turn(policy) as trainer:
            trainer.begin_save(directory, {"run_state.json": json.dumps(run_state)})
        return version

    @concurrent_endpoint
    async def finish_save(self, policy: str) -> None:
        with span("checkpoint", "checkpoint", lane="save"):
            await in_thread(self._trainers[policy].finish_save)

    @concurrent_endpoint
    async def load(self, checkpoint: Path, policy: str) -> int:
        return await self._run("load", self._load_checkpoint, checkpoint, policy)

    def _load_checkpoint(self, checkpoint: Path, policy: str) -> int:
        with self._trainers.turn(policy) as trainer:
            trainer.load(checkpoint)
            self._model.checkpoint_loaded(policy)
            return trainer.version

    @concurrent_endpoint
    async def close(self, policy: str) -> None:
        """Release the published versions of a policy."""
        if (publisher := self._publishers.get(policy)) is not None:
            await self._run("close", publisher.close)
        await in_thread(flush)

    @concurrent_endpoint
    async def export(self, path: Path, fit: TemplateFit, policy: str) -> None:
        await self._run("export", self._trainers[policy].export_hf, path, fit)
