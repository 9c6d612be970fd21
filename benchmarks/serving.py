"""`titan-rl serve` compared with vLLM's own server, with the same model.

    python -m benchmarks.serving [--rounds 8] [--only vllm|overhead|history]

Each server has one engine with the same settings in its own process. The same clients in a third process query one
server after the other, in both directions. The cost that a chat request adds to a `router.generate` is measured on
engines that only wait, so that the server has the processor to itself. Prints one JSON line per figure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.clients import LENGTHS, QUESTION, SESSIONS, Clients, Load, Measured, free_port, server
from benchmarks.controller import CHUNK, Replica
from benchmarks.paired import Spread, forth_and_back, ratio, report
from titan_rl.cluster.processes.garbage_collection import settle_heap
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.app import PolicyApp, make_app
from titan_rl.serving.conversations.tree import ConversationTree
from titan_rl.serving.server import serve
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk, VersionSpan

SUBJECT = ("titan_rl/serving", "titan_rl/generation")
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

MODEL = Path(__file__).parents[1] / "examples" / "alphabet_sort" / "base"  # 0.9M parameters
CONTEXT, TURNS = 512, 100
TOKEN_S = 0.005


@asynccontextmanager
async def vllm_server(folder: Path, stream_interval: int) -> AsyncGenerator[str]:
    from titan_rl.generation.vllm_arguments import CPU_BATCHED_TOKENS, ENVIRONMENT

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
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    command += ["--no-enable-chunked-prefill", "--enforce-eager", "--disable-uvicorn-access-log"]
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHDYNAMO_DISABLE": "1"}
    async with server(command, port, log, **environment) as (url, _):
        yield url


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
    port = free_port()
    settings: dict[str, object] = {
        "server.port": port,
        "generation.num_generators": 1,
        "generation.kv_cache_gib": 0.25,
        "generation.max_running": SESSIONS,
        "generation.stream_interval": stream_interval,
        "model.max_context": CONTEXT,
    }
    command = [sys.executable, "-m", "titan_rl.cli.main", "serve", str(MODEL)]
    command += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    async with server(command, port, folder / "own.log") as (url, _):
        yield url


async def measure_vllm(clients: Clients, rounds: int) -> None:
    """Requests per second and latency of 64 clients, with whole and with streamed answers."""
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
        report(f"requests_per_second_vs_vllm_server{name}", ratio(rates, "own", "vllm"), "ratio, at least", 1.1)
        p50 = {way: [median(one.latencies) for one in measured[1:]] for way, measured in seen.items()}
        ratios = Spread([own / vllm for own, vllm in zip(p50["own"], p50["vllm"], strict=True)])
        report(f"p50_latency_vs_vllm_server{name}", ratios, "ratio, at most", 0.95)
        for way in ways:
            report(f"requests_per_second_{way}{name}", Spread([values[way] for values in rates]), "1/s")
            report(f"p50_latency_{way}{name}", Spread(p50[way]), "s")


class Waiting(Replica):
    """Replica that waits 5 ms for each token, without using the processor."""

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
    """Throughput of 64 sessions, as fast as the replicas allow."""
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

    app = chat_app(router)
    settle_heap()  # as `titan-rl serve` does
    async with serve(app) as url:

        async def chatted(stream: bool) -> float:
            return median((await clients(Load(url, 8, stream))).latencies)

        ways = {"generate": generated, "chat": partial(chatted, False), "streamed": partial(chatted, True)}
        measured = await forth_and_back(rounds, ways)
    for way, name in (("chat", "chat_overhead_ms"), ("streamed", "chat_overhead_ms_streamed")):
        added = Spread([1e3 * (values[way] - values["generate"]) for values in measured])
        report(name, added, "ms, at most", 2.0)
    await router.close()


async def measure_history(rounds: int) -> None:
    """Time to find the turn that a history of a hundred turns extends, and to tokenize the new part."""
    renderer = ChatTemplateRenderer.from_pretrained(MODEL)
    tree = ConversationTree(renderer)
    messages: list[dict[str, Any]] = []
    timed: dict[str, Callable[[], Awaitable[float]]] = {}
    numbers = itertools.count()

    def timing(history: Sequence[dict[str, Any]], ask: Callable[[Sequence[dict[str, Any]]], object]) -> Any:
        async def way() -> float:
            asked = [
                [*history[:-1], {**history[-1], "content": str(next(numbers))}] for _ in range(20)
            ]  # never the same
            began = time.perf_counter()
            for messages in asked:
                ask(messages)
            return (time.perf_counter() - began) / len(asked) * 1e3

        return way

    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{QUESTION} {turn}"})
        if turn in (0, 1, TURNS - 1):
            timed[f"match_{turn + 1}"] = timing(list(messages), tree.prompt)
        prompt = tree.prompt(messages)
        completion = Completion(str(turn), [5, 6, 7], [-1.0] * 3, FinishReason.STOP, [VersionSpan(0, 3)])
        messages.append(dict(tree.add(prompt, completion, {"role": "assistant", "content": "LenaFischer"}).message))
    timed["render"] = timing(messages[:-1], lambda history: renderer.render_ids(history, add_generation_prompt=True))
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
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rounds, arguments.only))


if __name__ == "__main__":
    main()
