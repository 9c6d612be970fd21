"""A policy behind this server, against the same model behind vLLM's own.

    python -m benchmarks.serving [--rounds 8] [--only vllm|overhead|history]

Both servers keep their engine in a process of its own, with the same settings, and are asked by the same clients from
a third, one server after the other, forth and back. What a chat request adds to a `router.generate` is measured on
engines that only wait, which leaves the processor to the server. One JSON line a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.controller import CHUNK, Replica
from benchmarks.paired import Spread, forth_and_back, ratio, report
from titan_rl.actors.processes.garbage import settle_heap
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.app import PolicyApp, make_app
from titan_rl.serving.conversations.tree import ConversationTree
from titan_rl.serving.server import serve
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk, VersionSpan

MODEL = Path(__file__).parents[1] / "examples" / "alphabet_sort" / "base"  # 0.9M parameters
SESSIONS, CONTEXT, TURNS = 64, 512, 100
LENGTHS = range(32, 97)  # tokens of a completion, so that requests neither come nor end together
QUESTION = "Sort these names alphabetically by first name: LenaFischer MarcusVega AnnaPetrov"
START_S = 180.0
TOKEN_S = 0.005


@dataclass(frozen=True)
class Load:
    """What clients ask of a server, each one request after the other."""

    url: str
    requests: int  # of each client
    stream: bool = False

    def body(self, rng: random.Random) -> dict[str, Any]:
        return {
            "model": "policy",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": rng.choice(LENGTHS),
            "ignore_eos": True,
            "stream": self.stream,
        }


@dataclass(frozen=True)
class Measured:
    seconds: float
    latencies: Sequence[float]  # [clients * requests], in s


def ask(load: Load) -> Measured:
    """Run in a process of its own."""
    return asyncio.run(_ask(load))


async def _ask(load: Load) -> Measured:
    import aiohttp

    latencies: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def session(number: int) -> None:
            rng = random.Random(number)
            for _ in range(load.requests):
                began = time.perf_counter()
                async with client.post(f"{load.url}/v1/chat/completions", json=load.body(rng)) as answer:
                    said = await answer.read()
                    assert answer.status == 200, said
                    assert not load.stream or said.endswith(b"data: [DONE]\n\n"), said[-200:]
                latencies.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(session(number) for number in range(SESSIONS)))
        return Measured(time.perf_counter() - began, latencies)


class Clients:
    """The process that asks."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    async def __call__(self, load: Load) -> Measured:
        return await asyncio.get_running_loop().run_in_executor(self._pool, ask, load)

    def close(self) -> None:
        self._pool.shutdown()


@asynccontextmanager
async def server(command: Sequence[str], port: int, log: Path, **environment: str) -> AsyncGenerator[str]:
    """A server in a process of its own, once it answers."""
    url, started_by = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        while True:
            if process.returncode is not None or time.monotonic() > started_by:
                raise RuntimeError(f"{command} does not serve:\n{said(log)}")
            with suppress(OSError):
                await asyncio.to_thread(urllib.request.urlopen, f"{url}/health", timeout=5)
                break
            await asyncio.sleep(0.2)
        yield url
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def said(log: Path) -> str:
    return log.read_text()[-2000:]


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@asynccontextmanager
async def vllm_server(folder: Path, stream_interval: int) -> AsyncGenerator[str]:
    from titan_rl.generation.vllm_engine import CPU_BATCHED_TOKENS, ENVIRONMENT

    port, log = free_port(), folder / "vllm.log"
    settings: dict[str, object] = {
        "model": MODEL,
        "served-model-name": "policy",
        "port": port,
        "dtype": "float32",
        "max-model-len": CONTEXT,
        "max-num-seqs": SESSIONS,
        "max-num-batched-tokens": CPU_BATCHED_TOKENS,
        "kv-cache-memory-bytes": 2**28,
        "block-size": 32,
        "stream-interval": stream_interval,
        "generation-config": "vllm",
        "distributed-executor-backend": "uni",  # with a process more for the worker it is slower on two cores
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    command += ["--no-enable-chunked-prefill", "--enforce-eager", "--disable-uvicorn-access-log"]
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHDYNAMO_DISABLE": "1"}
    async with server(command, port, log, **environment) as url:
        yield url


async def serve_model(port: int, folder: Path, stream_interval: int) -> None:
    """This server, over a generator actor."""
    from benchmarks.generation import Engines
    from titan_rl.actors.actor_replica import ActorReplica
    from titan_rl.actors.generator import GeneratorActor
    from titan_rl.actors.processes.remote_process import RemoteProcess
    from titan_rl.config.sections import GenerationConfig
    from titan_rl.weights.published_weights import PublishedWeights

    (folder / "model").symlink_to(MODEL)
    engines = Engines("server", folder)
    generation = GenerationConfig(num_generators=1, kv_cache_gib=0.25, stream_interval=stream_interval)
    try:
        (actor,) = await engines.start("generator", GeneratorActor, generation, SESSIONS)
        replica = ActorReplica(RemoteProcess("generator"), actor, PublishedWeights())
        await replica.connect()
        router = GeneratorRouter([replica])
        settle_heap()
        async with serve(chat_app(router), port=port):
            await asyncio.Event().wait()
    finally:
        await engines.end()


def chat_app(router: GeneratorRouter) -> PolicyApp:
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODEL)
    return make_app(
        router.stream,
        model="policy",
        max_context=CONTEXT,
        tokenizer=tokenizer,
        renderer=ChatTemplateRenderer(tokenizer),
        wait_until_resumed=router.wait_resumed,
    )


@asynccontextmanager
async def own_server(folder: Path, stream_interval: int) -> AsyncGenerator[str]:
    port, log = free_port(), folder / "own.log"
    own = ["--serve", str(port), "--folder", str(folder), "--stream-interval", str(stream_interval)]
    async with server([sys.executable, "-m", "benchmarks.serving", *own], port, log) as url:
        yield url


async def measure_vllm(clients: Clients, rounds: int) -> None:
    """Requests a second and latency of 64 clients, whole answers and streamed ones."""
    for name, stream, interval in (("", False, 32), ("_streamed", True, 1)):
        with tempfile.TemporaryDirectory() as folder:
            async with vllm_server(Path(folder), interval) as theirs, own_server(Path(folder), interval) as ours:
                seen: dict[str, list[Measured]] = {"own": [], "vllm": []}

                async def rate(way: str, url: str, stream: bool = stream, seen: Any = seen) -> float:
                    measured = await clients(Load(url, 8, stream))
                    seen[way].append(measured)
                    return len(measured.latencies) / measured.seconds

                ways = {"own": partial(rate, "own", ours), "vllm": partial(rate, "vllm", theirs)}
                rates = await forth_and_back(rounds, ways)
        report(f"requests_per_second_vs_vllm_server{name}", ratio(rates, "own", "vllm"), "ratio, at least", 1.0)
        p50 = {way: [median(one.latencies) for one in measured[1:]] for way, measured in seen.items()}
        ratios = Spread([own / vllm for own, vllm in zip(p50["own"], p50["vllm"], strict=True)])
        report(f"p50_latency_vs_vllm_server{name}", ratios, "ratio, at most", 1.0)
        for way in ways:
            report(f"requests_per_second_{way}{name}", Spread([values[way] for values in rates]), "1/s")
            report(f"p50_latency_{way}{name}", Spread(p50[way]), "s")


class Waiting(Replica):
    """A replica that takes 5 ms for each token, and leaves the processor to others meanwhile."""

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        token_ids = [5 + place % 380 for place in range(request.sampling.max_tokens)]
        logprobs = [-0.5] * len(token_ids)
        for first in range(0, len(token_ids), CHUNK):
            told = token_ids[first : first + CHUNK]
            await asyncio.sleep(TOKEN_S * len(told))
            spans = (VersionSpan(0, len(told)),)
            on_chunk(TokenChunk(request.request_id, told, logprobs[: len(told)], spans))
        spans = (VersionSpan(0, len(token_ids)),)
        return Completion(request.request_id, token_ids, logprobs, FinishReason.LENGTH, spans)


async def measure_overhead(clients: Clients, rounds: int) -> None:
    """64 sessions, as fast as the replicas go."""
    router = GeneratorRouter([Waiting(str(index)) for index in range(2)])
    prompt = list(range(64))

    async def generated() -> float:
        latencies: list[float] = []

        async def session(number: int) -> None:
            rng = random.Random(number)
            for turn in range(8):
                sampling = SamplingParams(rng.choice(LENGTHS))
                began = time.perf_counter()
                await router.generate(prompt, request_id=f"{number}/{turn}", session_id=str(number), sampling=sampling)
                latencies.append(time.perf_counter() - began)

        await asyncio.gather(*(session(number) for number in range(SESSIONS)))
        return median(latencies)

    settle_heap()
    async with serve(chat_app(router)) as url:

        async def chatted(stream: bool) -> float:
            return median((await clients(Load(url, 8, stream))).latencies)

        ways = {"generate": generated, "chat": partial(chatted, False), "streamed": partial(chatted, True)}
        measured = await forth_and_back(rounds, ways)
    for way, name in (("chat", "chat_overhead_ms"), ("streamed", "chat_overhead_ms_streamed")):
        added = Spread([1e3 * (values[way] - values["generate"]) for values in measured])
        report(name, added, "ms, at most", 3.0)
    await router.close()


async def measure_history(rounds: int) -> None:
    """Finding the turn that a history of a hundred turns goes on from, and tokenizing what is new."""
    renderer = ChatTemplateRenderer.from_pretrained(MODEL)
    tree = ConversationTree(renderer)
    messages: list[dict[str, Any]] = []
    timed: dict[str, Callable[[], Awaitable[float]]] = {}

    def timing(history: Sequence[dict[str, Any]], ask: Callable[[Sequence[dict[str, Any]]], object]) -> Any:
        async def way() -> float:
            began = time.perf_counter()
            for _ in range(20):
                ask(history)
            return (time.perf_counter() - began) / 20 * 1e3

        return way

    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{QUESTION} {turn}"})
        if turn in (0, 1, TURNS - 1):
            timed[f"match_{turn + 1}"] = timing(list(messages), tree.prompt)
        prompt = tree.prompt(messages)
        completion = Completion(str(turn), [5, 6, 7], [-1.0] * 3, FinishReason.STOP, [VersionSpan(0, 3)])
        messages.append(dict(tree.add(prompt, completion, {"role": "assistant", "content": "LenaFischer"}).message))
    timed["render"] = timing(list(messages), lambda history: renderer.render_ids(history, add_generation_prompt=True))
    measured = await forth_and_back(rounds, timed)
    for name in timed:
        report(f"history_{name}_ms", Spread([values[name] for values in measured]), "ms")
    report("history_match_vs_render_100", ratio(measured, f"match_{TURNS}", "render"), "ratio, at most", 1.0)


async def measure(rounds: int, only: str | None) -> None:
    clients = Clients()
    try:
        if only in (None, "history"):
            await measure_history(rounds)
        if only in (None, "overhead"):
            await measure_overhead(clients, rounds)
        if only in (None, "vllm"):
            await measure_vllm(clients, rounds)
    finally:
        clients.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", choices=("vllm", "overhead", "history"))
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stream-interval", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from titan_rl.run.machine.environment import run_environment

    with run_environment():
        if arguments.serve is not None:
            asyncio.run(serve_model(arguments.serve, arguments.folder, arguments.stream_interval))
        else:
            asyncio.run(measure(arguments.rounds, arguments.only))


if __name__ == "__main__":
    main()
