"""Overhead of the library in generation: rollouter, router, actors and weight swaps against the bare engine.

    python -m benchmarks.generation [--rounds 12] [--only stalls]

Each variant has two engines in two processes, with the same prompts and seeds. The upper limits are the vLLM adapter in
its own process, and vLLM's own `LLM.generate`. Variants take turns, in both directions. Each round gives a ratio, and
figures are medians over the rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from benchmarks.paired import forth_and_back, ratio, report
from titan_rl import Completion, Reward, Rollouter, RolloutStatus, Rubric, SamplingParams, TokenObservation, TokenStep
from titan_rl.cluster.actor_replica import ActorReplica
from titan_rl.cluster.generator_actor import GeneratorActor, GeneratorSettings
from titan_rl.cluster.processes.garbage_collection import settle_heap
from titan_rl.cluster.processes.process import ProcessSpec, enter_actor_process
from titan_rl.cluster.processes.remote_process import RemoteProcess, call
from titan_rl.cluster.supervision import Supervisor
from titan_rl.config.sections import GenerationConfig, StateDictConfig
from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.gpu_share import CPU_KV_GIB
from titan_rl.generation.registry import make_engine
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.group.turns import turn_seed
from titan_rl.run.process.environment import run_environment
from titan_rl.weights.types import Manifest, Probe, PublishedWeights

from monarch.actor import Actor, concurrent_endpoint, this_proc  # isort: skip

ENGINES, GROUPS, SIBLINGS, PROMPT_TOKENS = 2, 16, 8, 24
MAX_RUNNING = 64  # requests that an engine advances at a time
PLACES = 16  # running requests of the engine whose stalls are measured
CROWDS = (0, PLACES, 2 * PLACES, 4 * PLACES)
Request = tuple[list[int], SamplingParams]


class BareEngine(Actor):
    """The engine without the library."""

    def __init__(self, spec: ProcessSpec, settings: GeneratorSettings) -> None:
        enter_actor_process(spec.log)
        self._settings = settings

    @concurrent_endpoint
    async def start(self) -> None:
        self._engine = make_engine("vllm", self._settings.engine)

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
        from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

        items = list(SharedMemoryTransport(self._settings.run_id).pull(manifest))
        began = time.perf_counter()
        self._engine.load_state_dict(items, manifest.version)
        return time.perf_counter() - began


class BareLLM(Actor):
    """vLLM's own offline interface, with the adapter's settings except those of scheduling."""

    def __init__(self, spec: ProcessSpec, settings: GeneratorSettings) -> None:
        enter_actor_process(spec.log)
        self._settings = settings

    @concurrent_endpoint
    async def start(self) -> None:
        from titan_rl.generation.vllm_arguments import CPU_BATCHED_TOKENS, ENVIRONMENT

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import torch._dynamo.config
        from vllm import LLM

        torch._dynamo.config.disable = True
        self._llm = LLM(
            self._settings.engine.model_path,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=self._settings.engine.max_context,
            max_num_seqs=self._settings.engine.max_running,
            max_num_batched_tokens=CPU_BATCHED_TOKENS,
            kv_cache_memory_bytes=int((self._settings.engine.kv_cache_gib or CPU_KV_GIB) * 2**30),
            block_size=32,
            enable_chunked_prefill=False,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
        )

    @concurrent_endpoint
    async def run(self, requests: list[Request]) -> int:
        return await asyncio.to_thread(self._run, requests)

    def _run(self, requests: list[Request]) -> int:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm import TokensPrompt

        params = [
            VLLMSamplingParams(
                max_tokens=sampling.max_tokens,
                min_tokens=sampling.min_tokens,
                seed=sampling.seed,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for _, sampling in requests
        ]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        self._llm.reset_prefix_cache()
        return sum(len(output.outputs[0].token_ids) for output in outputs)


cloudpickle.register_pickle_by_value(__import__("sys").modules[__name__])  # actor processes cannot import a script


class OneAnswer:
    """Environment with one prompt and one answer."""

    def __init__(self, prompt: list[int]) -> None:
        self._prompt = prompt

    async def reset(self) -> TokenObservation:
        return TokenObservation(self._prompt)

    async def step(self, completion: Completion) -> TokenStep:
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None: ...


def make_model(folder: Path) -> dict[str, Any]:
    """Create a random Qwen3 of 0.9M parameters, and return its tensors."""
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
        """Completion tokens per second."""
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


class Crowd:
    """Requests of 150 tokens, with a fixed number in flight at any time."""

    def __init__(self, replica: ActorReplica, size: int) -> None:
        self._replica = replica
        self._size = size
        self._numbers = itertools.count()
        self._names: dict[int, str] = {}

    async def __aenter__(self) -> None:
        """Start the requests, and return once they are generating."""
        advancing = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._ask(place, advancing)) for place in range(self._size)]
        if self._tasks:
            await advancing.wait()

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._replica.abort(list(self._names.values()))

    async def _ask(self, place: int, advancing: asyncio.Event) -> None:
        while True:
            name = self._names[place] = f"{id(self)}-{place}-{next(self._numbers)}"
            prompt, sampling = prompts()[place % GROUPS], SamplingParams(max_tokens=150, min_tokens=150)
            await self._replica.stream(EngineRequest(name, prompt, sampling), lambda _: advancing.set())


async def measure_stalls(engines: Engines, folder: Path, rounds: int, tensors: dict[str, Any]) -> None:
    """Measure how long an engine of 16 places stops for a version with probes, idle and oversubscribed."""
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    generation = GenerationConfig(num_generators=1, kv_cache_gib=0.25, stream_interval=4)
    published = PublishedWeights()
    (actor,) = await engines.start("crowded", GeneratorActor, generation, PLACES)
    replica = ActorReplica(RemoteProcess("crowded"), actor, published)
    await replica.connect()
    probes = tuple(Probe(tuple(range(place, place + 32)), (0.0,) * 31) for place in range(4))
    with SharedMemoryTransport("benchmark-stalls") as transport:
        versions = itertools.count(1)

        async def stall(crowd: int) -> float:
            version = next(versions)
            manifest = transport.publish(version, tensors.items())
            published.announce(replace(manifest, probes=probes, tolerance=1e9))
            async with Crowd(replica, crowd):
                await replica.pull(version)
            return published.worst()["stall_s"]

        measured = await forth_and_back(rounds, {str(crowd): partial(stall, crowd) for crowd in CROWDS})
    await replica.close()
    ratios = {crowd: ratio(measured, str(crowd), "0") for crowd in CROWDS if crowd}
    for crowd, figure in ratios.items():
        report(f"swap_stall_{crowd // PLACES}x_vs_idle", figure, "ratio, at most", 1.5)
    report("swap_stall_full_vs_idle", max(ratios.values(), key=lambda figure: figure.median), "ratio, at most", 1.5)


class Engines:
    """Context manager that starts actors, and ends all of them."""

    def __init__(self, name: str, folder: Path) -> None:
        self._folder = folder
        self._supervisor = this_proc().spawn(f"supervisor_of_{name}", Supervisor)

    async def start(self, name: str, actor_class: Any, generation: GenerationConfig, max_running: int) -> list[Any]:
        engine = EngineSpec(str(self._folder / "model"), max_running=max_running, kv_cache_gib=generation.kv_cache_gib)
        actors: list[Any] = []
        for index in range(generation.num_generators):
            spec = ProcessSpec(f"{name}-{index}", "here", "127.0.0.1", self._folder)
            settings = GeneratorSettings(engine, generation, StateDictConfig(), "benchmark")
            actor = await call(self._supervisor.spawn, spec.name, actor_class, (spec, settings), who="supervisor")
            await call(actor.start, who=name, timeout_s=180)
            actors.append(actor)
        return actors

    async def end(self) -> None:
        await call(self._supervisor.terminate, who="supervisor", timeout_s=30)


async def measure_throughput(engines: Engines, folder: Path, rounds: int, tensors: dict[str, Any]) -> None:
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    generation = GenerationConfig(num_generators=ENGINES, kv_cache_gib=0.25)
    published = PublishedWeights()
    bare = await engines.start("bare", BareEngine, generation, MAX_RUNNING)
    own = await engines.start("llm", BareLLM, generation, MAX_RUNNING)
    actors = await engines.start("generator", GeneratorActor, generation, MAX_RUNNING)
    replicas = [
        ActorReplica(RemoteProcess(f"generator-{index}"), actor, published) for index, actor in enumerate(actors)
    ]
    for replica in replicas:
        await replica.connect()
    stack = Stack(replicas)
    settle_heap()  # as a run does
    with SharedMemoryTransport("benchmark") as transport:
        version = 0

        async def pull() -> float:
            nonlocal version
            version += 1
            published.announce(transport.publish(version, tensors.items()))
            await stack.router.pull_state_dict(version)
            return published.worst()["stall_s"]

        async def reload() -> float:
            manifest = published.manifest_of(version)
            return max([await call(engine.reload, manifest, who="bare engine") for engine in bare])

        async def with_swaps() -> float:
            done = asyncio.Event()

            async def swap() -> None:
                while not done.is_set():
                    try:
                        async with asyncio.timeout(1.0):
                            await done.wait()
                    except TimeoutError:
                        await pull()

            swapping = asyncio.ensure_future(swap())
            try:
                return await stack.run(256)
            finally:
                done.set()
                await swapping

        for length in (64, 256):
            ways = {
                "stack": partial(stack.run, length),
                "engine": partial(run_bare, bare, length),
                "llm": partial(run_bare, own, length),
            }
            measured = await forth_and_back(rounds, ways)
            name = f"stack_tokens_per_second_vs_engine_{length}"
            report(name, ratio(measured, "stack", "engine"), "ratio", 0.98 if length == 256 else 0.97)
            report(f"stack_tokens_per_second_vs_llm_{length}", ratio(measured, "stack", "llm"), "ratio")
            if length == 256:
                report("stack_tokens_per_second_vs_engine", ratio(measured, "stack", "engine"), "ratio", 0.98)
        stalls = await forth_and_back(3 * rounds, {"pull": pull, "reload": reload})
        report("swap_stall_vs_reload", ratio(stalls, "pull", "reload"), "ratio, at most", 1.2)
        swaps = await forth_and_back(rounds, {"swaps": with_swaps, "none": partial(stack.run, 256)})
        report("throughput_with_swaps_vs_none", ratio(swaps, "swaps", "none"), "ratio", 0.98)
    await stack.router.close()


async def measure(folder: Path, rounds: int, only: str | None) -> None:
    tensors = make_model(folder / "model")
    for name, part in (("stalls", measure_stalls), ("throughput", measure_throughput)):
        if only in (None, name):
            engines = Engines(name, folder)
            try:
                await part(engines, folder, rounds, tensors)
            finally:
                await engines.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=("stalls", "throughput"))
    arguments = parser.parse_args()
    with run_environment(), tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), arguments.rounds, arguments.only))


if __name__ == "__main__":
    main()
