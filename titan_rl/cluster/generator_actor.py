"""Generator process: an engine loop in its own process, or in one process per rank if the model is split."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from monarch.actor import Port, concurrent_endpoint

from titan_rl.cluster.hosts.cores import threads_each
from titan_rl.cluster.liveness.health_check import WorkProgress
from titan_rl.cluster.processes.garbage_collection import growing_heap, settle_heap
from titan_rl.cluster.processes.process import ProcessActor, ProcessSpec, policy_run_id, transport_of
from titan_rl.cluster.request_stream import Packed, RequestCallers
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import STREAM_INTERVAL, GenerationConfig, StateDictConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.tensor_checksum import TensorChecksum
from titan_rl.core.tracing.spans import flush
from titan_rl.generation.engine import AdapterSpec, Engine, EngineSpec, LoadedPolicy
from titan_rl.generation.gpu_share import CPU_KV_GIB
from titan_rl.generation.loop.calls import Items, Weights
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.loop.ranks import EngineRank, GlooRanks, follow_leader
from titan_rl.generation.registry import make_engine
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import GaugeSummary, KVPolicy, PauseMode, PullResult, describe
from titan_rl.training.settings import TARGETS, ModelConfig
from titan_rl.weights.manifest import KnownLayouts, PackedManifest
from titan_rl.weights.types import Manifest, MeasuredTransport, StateDictTransport
from titan_rl.weights.verification import MAX_MARGIN, ProbeFigures, SwapCheck


@dataclass(frozen=True, slots=True)
class GeneratorPlan:
    """Settings that all generators of a run share.

    Attributes:
        seed: Seed of the run. Each generator adds its index.
        max_running: Maximum number of requests that one engine advances at a time.
        version: Version of the weights in the model's folder.
        sleeps: Whether engines lend their memory to a trainer at times.
        adapters: Adapters that the trainer trains and publishes, by name; a single one has the name "".
    """

    model: ModelConfig
    generation: GenerationConfig
    statedict: StateDictConfig
    run_id: str
    seed: int
    max_running: int
    version: int = 0
    sleeps: bool = False
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict[str, AdapterSpec])

    def settings_of(
        self, index: int, model_path: str, *, neighbours: int = 0, beside_trainer: bool = False
    ) -> GeneratorSettings:
        """Make the settings of one generator.

        Args:
            index: Index of the generator, from 0.
            model_path: Path of the model's folder on the generator's host.
            neighbours: Number of other generators on the same GPUs.
            beside_trainer: Whether a trainer uses the same GPUs. Its memory use is unknown when the engine starts.
        """
        generation = self.generation
        kv_cache_gib = generation.kv_cache_gib
        if kv_cache_gib is None and beside_trainer and generation.gpu_share is None:
            kv_cache_gib = CPU_KV_GIB
        engine = EngineSpec(
            model_path,
            dtype=self.model.dtype,
            max_context=self.model.max_context,
            max_running=self.max_running,
            adapts=generation.max_running == "auto",
            kv_cache_gib=kv_cache_gib,
            gpu_neighbours=neighbours,
            seed=(self.seed + index) % 2**32,  # equal seeds would draw equal tokens for siblings on two generators
            routed_experts=generation.return_routed_experts,
            gpu_share=generation.gpu_share,
            prefix_cache=bool(generation.prefix_cache),
            speculative=generation.speculative.options(),
            options=generation.vllm,
            sleeps=self.sleeps,
            tensor_parallel_size=generation.tensor_parallel_size,
            generator=index,
            adapters=self.adapters,
        )
        return GeneratorSettings(engine, generation, self.statedict, self.run_id, self.version)


def adapter_specs(config: RunConfig) -> dict[str, AdapterSpec]:
    """Return the adapters of a run for its engines, by name; empty if all weights are trained."""
    num_versions = 1
    if config.generation.adapter_swap == "pinned":
        num_versions = config.scheduling.max_staleness + 2 + config.validates_beside_training
    experiments = config.experiments or {"": config}
    adapters = {name: experiment.training.adapter for name, experiment in experiments.items()}
    return {
        name: AdapterSpec(adapter.rank, adapter.alpha, adapter.targets or TARGETS, num_versions)
        for name, adapter in adapters.items()
        if adapter.is_on
    }


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """Settings of one generator process."""

    engine: EngineSpec
    generation: GenerationConfig
    statedict: StateDictConfig
    run_id: str
    version: int = 0  # of the weights in the model's folder


class AdapterPulls:
    """Pulls of one adapter's versions, or of the whole model's, in a generator.

    Attributes:
        layouts: Tensor layouts that this process knows.
    """

    def __init__(self, spec: ProcessSpec, run_id: str, statedict: StateDictConfig) -> None:
        self.layouts = KnownLayouts()
        self._open = partial(transport_of, spec, run_id, statedict)
        self._swaps = SwapCheck()

    @cached_property
    def transport(self) -> StateDictTransport:
        return self._open()

    def items(self, manifest: Manifest) -> Items:
        """Read and verify every byte before yielding the first pair. Blocks, so do not call it on the event loop."""
        return self.transport.pull(manifest)

    def verify(self, manifest: Manifest, policy: LoadedPolicy) -> ProbeFigures:
        """Compare the engine's logprobs with those that the trainer measured."""
        return self._swaps.verify(manifest, policy.score)


class GeneratorActor(ProcessActor):
    """Actor of a generator: generates, and pulls weights between two engine steps. With several ranks only the first is
    called; the others follow the decisions of its loop."""

    fork_kind = "generator"

    def __init__(self, spec: ProcessSpec, settings: GeneratorSettings) -> None:
        # An engine steps in one thread while another one answers, unless torch uses several threads for an operation.
        super().__init__(spec, WorkProgress(all_threads=threads_each() > 1))
        self._settings = settings
        generation = settings.generation
        self._kv_policy = KVPolicy(
            "recompute" if generation.pull_mode == "recompute" else "keep",
            reset_prefix_cache=generation.prefix_cache != "keep",
        )
        self._loop = EngineLoop(
            self._make_engine,
            version=settings.version,
            kv_policy=self._kv_policy,
            stream_interval=generation.stream_interval or STREAM_INTERVAL,
            routed_experts=generation.return_routed_experts,
            ranks=GlooRanks() if generation.tensor_parallel_size > 1 else None,
            stepping=self.work.in_progress,
        )
        self._adapters: dict[str, AdapterPulls] = {}
        self._callers = RequestCallers(self._loop)

    def _make_engine(self) -> Engine:
        with growing_heap():
            return make_engine(self._settings.generation.engine, self._settings.engine)

    @concurrent_endpoint
    async def start(self) -> None:
        """Start the engine. Called on every rank. The first rank returns once the engine can serve, the others at
        once."""
        if self._spec.rank == 0:
            await self._loop.start()
            settle_heap()
        else:
            threading.Thread(target=self._follow, name="engine-loop", daemon=True).start()

    def _follow(self) -> None:
        try:
            rank = EngineRank(self._make_engine, GlooRanks(), self._kv_policy, self.work.in_progress)
            follow_leader(rank, self._open)
        except BaseException:
            # The first rank waits for this one inside a collective, and only the end of the process interrupts that.
            logger.exception("rank %d failed", self._spec.rank)
            os._exit(1)

    @concurrent_endpoint
    async def reply_to(self, caller: str, port: Port[list[Packed]], replaced: Sequence[str] = ()) -> None:
        """Send the completions of a caller's requests to its port, preceded by a chunk every
        `generation.stream_interval` tokens. The requests of the callers in `replaced` end."""
        self._callers.add(caller, port, replaced)

    @concurrent_endpoint
    async def forget(self, process_id: str) -> None:
        """End the requests of all callers in a process that has ended."""
        self._callers.forget(process_id)

    @concurrent_endpoint
    async def generate(self, caller: str, requests: Sequence[EngineRequest]) -> None:
        """Start requests without waiting for them."""
        self._callers.start(caller, requests)

    @concurrent_endpoint
    async def pull(self, packed: PackedManifest, adapter: str) -> tuple[int, dict[str, float], GaugeSummary | None]:
        """Load a published version and check it against the trainer's logprobs of the manifest's probes.

        Args:
            adapter: Name of the adapter, if the run has several.

        Returns:
            Three values. The first is the version that is loaded afterwards, this or a newer one.
            The second holds the measurements: load_s, readback_s, verify_s and stall_s (how long the engine did not
            step) in seconds, probe_diff and unverified_share; from the second pull on also probe_margin and
            probe_missed, which compare the version with the previous one; and the transport's own measurements.
            The third is the summary of the engine's gauges since the previous pull.
        """
        pulls = self._pulls_of(adapter)
        (manifest,) = pulls.layouts.unpack([packed])
        probes: list[ProbeFigures] = []

        def check(policy: LoadedPolicy) -> None:
            probes.append(pulls.verify(manifest, policy))

        result = await self._loop.pull(
            manifest.version,
            lambda: pulls.items(manifest),
            check,
            manifest=(adapter, manifest),
            published=await in_thread(_checksums_of, manifest),
            adapter=adapter,
            pinned=manifest.pinned,
        )
        figures = {
            "load_s": result.load_s,
            "readback_s": result.readback_s,
            "verify_s": result.verify_s,
            "stall_s": result.stall_s,
            "probe_diff": max((each.diff for each in probes), default=0.0),
        }
        if probes:  # else another pull has loaded this version, and reports the share
            figures["unverified_share"] = self._unverified_share(result, probes[-1])
        if probes and not math.isnan(probes[-1].margin):
            figures |= {"probe_margin": probes[-1].margin, "probe_missed": probes[-1].missed}
        if isinstance(pulls.transport, MeasuredTransport):
            figures |= pulls.transport.pull_figures()
        return result.version, figures, result.gauges

    def _unverified_share(self, result: PullResult, probes: ProbeFigures) -> float:
        """Share of the weights that no check has verified: 0 if all were read back, or if the probes could distinguish
        this version from the previous one."""
        share = 1.0 if result.readback is None else result.readback.unread_share
        if share and not probes.margin <= MAX_MARGIN:
            why = "the engine cannot be read back" if result.readback is None else describe(result.readback)
            logger.warning(
                "version %d is unverified: %s, and the probes' margin is %.2g, too wide to distinguish it from the "
                "previous version; the limit is %g",
                *(result.version, why, probes.margin, MAX_MARGIN),
            )
            return share
        return 0.0

    def _open(self, adapter_manifest: tuple[str, Manifest]) -> Weights:
        adapter, manifest = adapter_manifest
        pulls = self._pulls_of(adapter)
        verify = partial(pulls.verify, manifest)
        return Weights(pulls.items(manifest), verify, _checksums_of(manifest), manifest.pinned)

    def _pulls_of(self, adapter: str) -> AdapterPulls:
        if adapter not in self._adapters:
            run_id = policy_run_id(self._settings.run_id, adapter)
            self._adapters[adapter] = AdapterPulls(self._spec, run_id, self._settings.statedict)
        return self._adapters[adapter]

    @concurrent_endpoint
    async def pause(self, mode: PauseMode) -> None:
        await self._loop.set_paused(mode)

    @concurrent_endpoint
    async def resume(self) -> None:
        await self._loop.set_paused(None)

    @concurrent_endpoint
    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await self._loop.abort(request_ids)

    @concurrent_endpoint
    async def close(self) -> None:
        await self._loop.close()
        await in_thread(flush)


def _checksums_of(manifest: Manifest) -> dict[str, TensorChecksum]:
    """Checksums of a published version. The import is local because the module imports torch, which the controller
    never does."""
    from titan_rl.weights.verification import published_checksums

    return published_checksums(manifest)
