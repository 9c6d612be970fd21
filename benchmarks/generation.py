"""What the library's own work costs generation: rollouter, router, actors and swaps against the bare engine.

    python -m benchmarks.generation [--repeats 5]

Two engines in two processes each way, on the same prompts with the same seeds, stack and bare in turn, so that a drift
of the machine's speed meets both. Ratios are medians over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import cloudpickle

from titan_rl import Completion, Reward, Rollouter, RolloutStatus, Rubric, SamplingParams, TokenObservation, TokenStep
from titan_rl.actors.generator import GeneratorActor, GeneratorSettings
from titan_rl.actors.peer import Peer, call
from titan_rl.actors.process import enter_actor_process
from titan_rl.actors.replica import ActorReplica
from titan_rl.actors.supervisor import Supervisor
from titan_rl.config.sections import GenerationConfig, ModelConfig, StateDictConfig
from titan_rl.generation.engine import EngineRequest
from titan_rl.launch import run_environment
from titan_rl.rollout.rollouter import turn_seed
from titan_rl.routing import GeneratorRouter
from titan_rl.statedict.board import VersionBoard
from titan_rl.statedict.types import Manifest

from monarch.actor import Actor, concurrent_endpoint, this_proc  # isort: skip

ENGINES, GROUPS, SIBLINGS, PROMPT_TOKENS = 2, 16, 8, 24
MAX_RUNNING = 64  # requests that an engine advances at a time
Request = tuple[list[int], SamplingParams]


class BareEngine(Actor):
    """The engine and nothing else."""

    def __init__(self, settings: GeneratorSettings) -> None:
        enter_actor_process(settings.log_path)
        self._settings = settings

    @concurrent_endpoint
    async def start(self) -> None:
        from titan_rl.generation.vllm_engine import VLLMEngine

        model = self._settings.model
        self._engine = VLLMEngine(model.path, max_context=model.max_context, max_running=self._settings.max_running)

    @concurrent_endpoint
    async def run(self, requests: list[Request]) -> int:
        return await asyncio.to_thread(self._run, requests)

    def _run(self, requests: list[Request]) -> int:
        for index, (prompt, sampling) in enumerate(requests):
            self._engine.add(EngineRequest(str(index), prompt, sampling))
        num_tokens, running = 0, len(requests)
        while running:
            for delta in self._engine.step():
                num_tokens += len(delta.token_ids)
                running -= delta.finish_reason is not None
        self._engine.reset_prefix_cache()
        return num_tokens

    @concurrent_endpoint
    async def reload(self, manifest: Manifest) -> float:
        """Seconds of the engine's own reload."""
        from titan_rl.statedict.shared_memory import SharedMemoryTransport

        items = list(SharedMemoryTransport(self._settings.run_id).pull(manifest))
        began = time.perf_counter()
        self._engine.load_state_dict(items, manifest.version)
        return time.perf_counter() - began


cloudpickle.register_pickle_by_value(__import__("sys").modules[__name__])  # actor processes cannot import a script


class OneAnswer:
    """A prompt, and the end."""

    def __init__(self, prompt: list[int]) -> None:
        self._prompt = prompt

    async def reset(self) -> TokenObservation:
        return TokenObservation(self._prompt)

    async def step(self, completion: Completion) -> TokenStep:
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None: ...


def make_model(folder: Path) -> dict[str, Any]:
    """A random Qwen3 of 0.9M parameters, and its tensors."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=550,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return dict(model.state_dict())


def prompts() -> list[list[int]]:
    return [[(7 * group + 3 * token) % 500 + 10 for token in range(PROMPT_TOKENS)] for group in range(GROUPS)]


class Stack:
    """Rollouter, router and generator actors."""

    def __init__(self, replicas: Sequence[ActorReplica]) -> None:
        self.router = GeneratorRouter(replicas)
        self._rollouter = Rollouter(
            OneAnswer, Rubric([Reward(lambda rollout: 1.0, name="one")]), max_context=512,
            finish_session=self.router.finish_session,
        )  # fmt: skip

    async def run(self, length: int) -> float:
        """Completion tokens a second."""
        sampling = SamplingParams(max_tokens=length, min_tokens=length)
        began = time.perf_counter()
        groups = await asyncio.gather(
            *(
                self._rollouter.run_group(
                    self.router.generate, prompt, group_id=f"g{index}", group_size=SIBLINGS, sampling=sampling
                )
                for index, prompt in enumerate(prompts())
            )
        )
        seconds = time.perf_counter() - began
        return sum(rollout.num_completion_tokens for group in groups for rollout in group.rollouts) / seconds


async def run_bare(engines: Sequence[Any], length: int) -> float:
    requests: list[list[Request]] = [[] for _ in engines]
    for index, prompt in enumerate(prompts()):
        for sibling in range(SIBLINGS):
            sampling = SamplingParams(max_tokens=length, min_tokens=length, seed=turn_seed(0, f"g{index}/{sibling}", 0))
            requests[sibling % len(engines)].append((prompt, sampling))
    began = time.perf_counter()
    tokens = await asyncio.gather(
        *(call(e.run, batch, who="bare engine") for e, batch in zip(engines, requests, strict=True))
    )
    return sum(tokens) / (time.perf_counter() - began)


async def paired(repeats: int, first: Callable[[], Awaitable[float]], second: Callable[[], Awaitable[float]]) -> float:
    """Median of first / second, measured in turn after one round of warming up."""
    await first()
    await second()
    return median([await first() / await second() for _ in range(repeats)])


async def measure(folder: Path, repeats: int) -> list[tuple[str, float, float | None, str]]:
    from titan_rl.statedict.shared_memory import SharedMemoryTransport

    tensors = make_model(folder / "model")
    model = ModelConfig(path=str(folder / "model"), max_context=512)
    generation = GenerationConfig(num_generators=ENGINES)
    supervisor = this_proc().spawn("supervisor", Supervisor)
    board = VersionBoard()

    async def start(name: str, actor_class: Any) -> Any:
        log = str(folder / f"{name}.log")
        settings = GeneratorSettings(model, generation, StateDictConfig(), "benchmark", log, 0, MAX_RUNNING)
        actor = await call(supervisor.spawn, name, actor_class, (settings,), who="supervisor")
        await call(actor.start, who=name, timeout_s=180)
        return actor

    try:
        bare = [await start(f"bare-{index}", BareEngine) for index in range(ENGINES)]
        replicas = [
            ActorReplica(Peer(f"generator-{index}"), await start(f"generator-{index}", GeneratorActor), board)
            for index in range(ENGINES)
        ]
        for replica in replicas:
            await replica.open()
        stack = Stack(replicas)
        with SharedMemoryTransport("benchmark") as transport:
            version = 0

            async def pull() -> float:
                nonlocal version
                version += 1
                board.announce(transport.publish(version, tensors.items()))
                await stack.router.pull_state_dict(version)
                return board.worst()["stall_s"]

            async def reload() -> float:
                manifest = board.manifest_of(version)
                return max([await call(engine.reload, manifest, who="bare engine") for engine in bare])

            async def with_swaps() -> float:
                async def swap() -> None:
                    while True:
                        await asyncio.sleep(1.0)
                        await pull()

                swapping = asyncio.ensure_future(swap())
                try:
                    return await stack.run(256)
                finally:
                    swapping.cancel()

            results: list[tuple[str, float, float | None, str]] = []
            for length, target in ((64, 0.95), (256, 0.95)):
                ratio = await paired(repeats, lambda n=length: stack.run(n), lambda n=length: run_bare(bare, n))
                results.append((f"stack_tokens_per_second_vs_engine_{length}", ratio, target, "ratio"))
            results.append(("stack_tokens_per_second_vs_engine", results[-1][1], 0.95, "ratio"))
            results.append(("swap_stall_vs_reload", await paired(3 * repeats, pull, reload), 1.5, "ratio, at most"))
            swaps = await paired(repeats, with_swaps, lambda: stack.run(256))
            results.append(("throughput_with_swaps_vs_none", swaps, 0.97, "ratio"))
            await stack.router.close()
            return results
    finally:
        await call(supervisor.terminate, who="supervisor", timeout_s=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats: int = parser.parse_args().repeats
    with run_environment(), tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(Path(folder), repeats))
    for name, value, target, unit in results:
        print(json.dumps({"name": name, "value": round(value, 4), "target": target, "unit": unit}))


if __name__ == "__main__":
    main()
