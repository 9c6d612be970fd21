"""A thousand concurrent streams from one server, with frequent pauses and pulls.

    python -m benchmarks.serving_sessions [--sessions 1000] [--rounds 10]

The server is a process with two scripted engines. Their tokens are a function of the tokens before, so that the content
of each stream is known in advance. In each round every session is a new conversation of two turns. Meanwhile, ten times
a second, the server is paused in one of the modes and pulls a version. Afterwards the same number of sessions queues at
the same engines without a server, for the part of the time to the first token that is the engines' own. Prints one JSON
line per figure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.clients import free_port, server
from benchmarks.paired import report
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.types import SamplingParams

MODEL = Path(__file__).parents[1] / "examples" / "alphabet_sort" / "base"
CONTEXT, TOKENS, TURNS = 256, 32, 2
ADMIN_KEY = "of-this-benchmark"
MODES = ("keep", "abort", "wait")
make_engine = partial(ScriptedEngine, vocab_size=390, max_context=CONTEXT, max_running=512)


@asynccontextmanager
async def scripted_router() -> AsyncGenerator[GeneratorRouter]:
    loops = [EngineLoop(make_engine, stream_interval=4) for _ in range(2)]
    for loop in loops:
        await loop.start()
    router = GeneratorRouter([LocalReplica(str(index), loop, lambda _: []) for index, loop in enumerate(loops)])
    try:
        yield router
    finally:
        await router.close()


async def serve_scripted(port: int) -> None:
    import transformers

    from titan_rl.cluster.processes.garbage_collection import settle_heap
    from titan_rl.rollout.renderer import ChatTemplateRenderer
    from titan_rl.serving.api_keys import Keys
    from titan_rl.serving.app import make_app
    from titan_rl.serving.http.exchange import ServerLimits
    from titan_rl.serving.server import serve

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODEL)
    async with scripted_router() as router:
        app = make_app(
            router.stream,
            model="policy",
            max_context=CONTEXT,
            tokenizer=tokenizer,
            renderer=ChatTemplateRenderer(tokenizer),
            keys=Keys(admin=ADMIN_KEY),
            limits=ServerLimits(
                num_conversations=1024
            ),  # as many as in one round, so that memory is full in the second
            wait_until_resumed=router.wait_resumed,
            control=router,
        )
        settle_heap()
        async with serve(app, port=port):
            await asyncio.Event().wait()


async def disturbed(running: asyncio.Future[Any], disturbing: asyncio.Task[None]) -> None:
    """Wait for sessions. Raises the error of what disturbs them, which may have left the engines paused."""
    await asyncio.wait((running, disturbing), return_when=asyncio.FIRST_COMPLETED)
    if disturbing.done():
        disturbing.result()
    await running


async def queue_at_engines(num_sessions: int, rounds: int) -> list[float]:
    """Times to the first token of sessions that ask the engines without a server, with the same pauses and pulls."""
    from titan_rl.rollout.renderer import ChatTemplateRenderer
    from titan_rl.serving.policy import uninterrupted

    renderer = ChatTemplateRenderer.from_pretrained(MODEL)
    sampling = SamplingParams(TOKENS, stop_token_ids=tuple(renderer.get_stop_token_ids()))
    first_token_s: list[float] = []

    def render(content: str) -> list[int]:
        return renderer.render_ids([{"role": "user", "content": content}], add_generation_prompt=True)

    async with scripted_router() as router:
        stream = uninterrupted(router.stream, wait_until_resumed=router.wait_resumed)

        async def session(name: str, prompt: list[int]) -> None:
            for turn in range(TURNS):
                began, first = time.perf_counter(), list[float]()
                request = EngineRequest(f"{name}/{turn}", prompt, sampling, session_id=name)
                completion = await stream(request, lambda _, first=first: first.append(time.perf_counter()))
                first_token_s.append(first[0] - began)
                prompt = [*prompt, *completion.token_ids, *again]

        async def disturb_router() -> None:
            for version in itertools.count(1):
                await router.pull_state_dict(version)
                await router.pause(MODES[version % len(MODES)])
                await asyncio.sleep(0.02)
                await router.resume()
                await asyncio.sleep(0.08)

        again = render("Again")
        prompts = {name: render(f"Sort {name}") for name in map(str, range(num_sessions))}
        disturbing = asyncio.create_task(disturb_router())
        for number in range(rounds):
            running = asyncio.gather(*(session(f"{number} {name}", prompt) for name, prompt in prompts.items()))
            await disturbed(running, disturbing)
        disturbing.cancel()
        await asyncio.wait((disturbing,))
    return first_token_s


class Session:
    """Two turns of one conversation, each streamed."""

    def __init__(self, client: Any, url: str, name: str) -> None:
        self._client = client
        self._url = url
        self._messages = [{"role": "user", "content": f"Sort {name}"}]
        self.turns: list[tuple[list[int], list[int]]] = []  # prompt, and what was streamed
        self.first_token_s: list[float] = []

    async def run(self) -> None:
        for _ in range(TURNS):
            text, prompt, sampled = "", list[int](), list[int]()
            body = {"messages": self._messages, "max_tokens": TOKENS, "stream": True, "return_token_ids": True}
            began = time.perf_counter()
            async with self._client.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.read()
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[len(b"data: ") :])
                    (choice,) = event["choices"]
                    if not sampled and choice.get("token_ids"):
                        self.first_token_s.append(time.perf_counter() - began)
                    prompt += event.get("prompt_token_ids") or ()
                    sampled += choice.get("token_ids") or ()
                    text += choice["delta"].get("content") or ""
                assert choice["finish_reason"] in ("length", "stop"), choice
            self.turns.append((prompt, sampled))
            self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again"}]


def check(sessions: Sequence[Session], stop_token_ids: Sequence[int]) -> None:
    """Check that every stream has the tokens that follow from its prompt, and that turns continue each other."""
    engine = make_engine(max_running=len(sessions))
    sampling = SamplingParams(TOKENS, stop_token_ids=tuple(stop_token_ids))
    expected: dict[str, list[int]] = {}
    for turn in range(TURNS):
        for number, session in enumerate(sessions):
            prompt, _ = session.turns[turn]
            expected[str(number)] = []
            engine.add(EngineRequest(str(number), prompt, sampling))
            if turn:
                before = [token for part in session.turns[turn - 1] for token in part]
                assert prompt[: len(before)] == before, "a turn does not continue the previous one"
        running = len(sessions)
        while running:
            for delta in engine.step():
                expected[delta.request_id] += delta.token_ids
                running -= delta.finish_reason is not None
        for number, session in enumerate(sessions):
            assert session.turns[turn][1] == expected[str(number)], "a stream is incomplete or wrong"


async def disturb(client: Any, url: str) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}

    async def admin(name: str, **body: Any) -> None:
        async with client.post(f"{url}/admin/{name}", json=body, headers=headers) as answer:
            assert answer.status == 204, await answer.read()

    for version in itertools.count(1):
        await admin("pull", version=version)
        await admin("pause", mode=MODES[version % len(MODES)])
        await asyncio.sleep(0.02)
        await admin("resume")
        await asyncio.sleep(0.08)


def resident_mib(process_id: int) -> float:
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(num_sessions: int, rounds: int, folder: Path) -> float:
    """Report the figures, and return the last one.

    Raises:
        AssertionError: a stream is incomplete or wrong.
    """
    import aiohttp

    from titan_rl.rollout.renderer import ChatTemplateRenderer

    stop_token_ids = ChatTemplateRenderer.from_pretrained(MODEL).get_stop_token_ids()
    port, log = free_port(), folder / "server.log"
    first_token_s: list[float] = []
    memory: list[float] = []
    num_streams = 0
    async with (
        server([sys.executable, "-m", "benchmarks.serving_sessions", "--serve", str(port)], port, log) as (
            url,
            process_id,
        ),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        began = time.perf_counter()
        disturbing = asyncio.create_task(disturb(client, url))
        for number in range(rounds):
            sessions = [Session(client, url, f"{number} {name}") for name in range(num_sessions)]
            running = asyncio.gather(*(session.run() for session in sessions))
            await disturbed(running, disturbing)
            memory.append(resident_mib(process_id))
            check(sessions, stop_token_ids)
            first_token_s += [seconds for session in sessions for seconds in session.first_token_s]
            num_streams += num_sessions * TURNS
        seconds = time.perf_counter() - began
        disturbing.cancel()
    report("sessions_streams_right", float(num_streams), "streams, all complete and correct")
    report("sessions_streams_per_second", num_streams / seconds, "1/s")
    p99_s = quantiles(first_token_s, n=100)[98]
    own_p99_s = quantiles(await queue_at_engines(num_sessions, rounds), n=100)[98]
    report("sessions_p99_time_to_first_token", p99_s, "s")
    report("sessions_p99_time_to_first_token_vs_engines", p99_s / own_p99_s, "ratio, at most", 1.5)
    report("sessions_memory", memory[-1], "MiB")
    growth = memory[-1] / memory[min(1, rounds - 1)]
    report("sessions_memory_growth", growth, "ratio, last to second round, at most", 1.05)
    return growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve_scripted(arguments.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments.sessions, arguments.rounds, Path(folder)))


if __name__ == "__main__":
    main()
