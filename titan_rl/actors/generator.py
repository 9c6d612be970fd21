"""One generator: an engine loop in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarch.actor import Actor, Port, concurrent_endpoint

from titan_rl.actors.process import enter_actor_process
from titan_rl.actors.token_stream import TokenOutlet
from titan_rl.config.sections import GenerationConfig, ModelConfig
from titan_rl.generation.engine import Engine
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.local_replica import pause_anew, resume_if_paused
from titan_rl.generation.types import KVPolicy
from titan_rl.statedict.probes import verify
from titan_rl.statedict.types import Manifest
from titan_rl.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """Everything a generator process needs."""

    model: ModelConfig
    generation: GenerationConfig
    run_id: str
    log_path: str
    seed: int


class GeneratorActor(Actor):
    """Generates, and pulls weights between two engine steps."""

    def __init__(self, settings: GeneratorSettings) -> None:
        enter_actor_process(settings.log_path)
        self._settings = settings
        generation = settings.generation
        self._loop = EngineLoop(
            self._make_engine,
            kv_policy=KVPolicy(generation.running_kv, generation.reset_prefix_cache),
            stream_interval=generation.stream_interval,
        )
        self._outlet: TokenOutlet | None = None

    def _make_engine(self) -> Engine:
        from titan_rl.generation.vllm_engine import VLLMEngine

        model, generation = self._settings.model, self._settings.generation
        return VLLMEngine(
            model.path,
            dtype=model.dtype,
            max_context=model.max_context,
            max_running=generation.max_running,
            kv_cache_gib=generation.kv_cache_gib,
            seed=self._settings.seed,
        )

    @concurrent_endpoint
    async def start(self) -> None:
        """Returns once the engine can serve."""
        await self._loop.start()

    @concurrent_endpoint
    async def stream_into(self, port: Port[list[Completion]]) -> None:
        """From now on requests tell this port of their tokens every `generation.stream_interval` tokens."""
        self._outlet = TokenOutlet(port)

    @concurrent_endpoint
    async def generate(
        self, prompt_token_ids: Sequence[int], request_id: str, session_id: str | None, sampling: SamplingParams
    ) -> Completion:
        return await self._loop.generate(
            prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling, on_tokens=self._outlet
        )

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> dict[str, float]:
        """Load a published version and check it against the trainer's logprobs of the manifest's probes.

        Returns:
            load_s, verify_s, stall_s (how long the engine did not step) and probe_diff.
        """
        from titan_rl.statedict.shared_memory import SharedMemoryTransport

        probe_diffs: list[float] = []

        def check(engine: Engine) -> None:
            probe_diffs.append(verify(manifest.probes, engine.score, manifest.tolerance))

        transport = SharedMemoryTransport(self._settings.run_id)
        result = await self._loop.pull(manifest.version, lambda: transport.pull(manifest), check)
        return {
            "load_s": result.load_s,
            "verify_s": result.verify_s,
            "stall_s": result.stall_s,
            "probe_diff": max(probe_diffs, default=0.0),
        }

    @concurrent_endpoint
    async def pause(self, mode: str) -> None:
        await pause_anew(self._loop, mode)

    @concurrent_endpoint
    async def resume(self) -> None:
        await resume_if_paused(self._loop)

    @concurrent_endpoint
    async def abort(self, request_ids: Sequence[str] | None) -> None:
        await self._loop.abort(request_ids)

    @concurrent_endpoint
    async def close(self) -> None:
        await self._loop.close()
