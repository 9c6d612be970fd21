"""Router with 16 shards, compared with one router: balance, prefix hits, and the cost of control. In virtual time.

    python -m benchmarks.shards                       # 256 generators of 64 requests each
    python -m benchmarks.shards --generators 2048

The router, its shards and their messages are the real ones. Messages are pickled, and arrive after a random time of up
to 50 ms. Engines are simulated: a step takes 40 ms, an answer 10 s. All run in one process, and processor time is
attributed to the router, the shards and the engines by the context of each callback. A group of 8 rollouts begins in
the shard whose group ended, and a version is pulled every 10 s. The balance is that of rollouts with one turn and the
default strategy; prefix hits are those of two turns and group affinity. Finished groups stay in their shard: the cost
of sending them to the controller, and that of Monarch, are not included.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import pickle
import random
import time
from asyncio.events import Handle
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from statistics import median
from typing import Any
from unittest.mock import patch

import looptime

from benchmarks.paired import report
from titan_rl import Completion, FinishReason, SamplingParams, VersionSpan
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.router.shard import RouterShard, ShardReplica
from titan_rl.generation.router.shard_control import Ended, FromShard, ToShard
from titan_rl.generation.router.strategies import make_strategy

NUM_SHARDS = 16
REQUESTS, GROUP_SIZE = 64, 8  # in flight on each generator, on average; siblings
LENGTHS, STEP_S = (64, 448), 0.04  # tokens of an answer, evenly spread; step of an engine
IN_FLIGHT = 256 / (64 + 384 * 8 / 9)  # share of a group's rollouts, from its begin to the end of its longest
LATENCY_S = 0.05  # longest latency of a message
LOAD_S, PULL_EVERY_S = 1.0, 10.0
WARM_S, SECONDS = 15, 20
CONTROL = ("balance", "balance_worst", "control_cpu_per_s", "control_messages_per_s", "control_bytes_per_token")
WORKLOADS = (
    (
        "sticky",
        1,
        ("balance", "balance_worst", "control_cpu_per_s", "control_messages_per_s", "control_bytes_per_token"),
    ),
    ("group_affinity", 2, ("prefix_hits",)),
)
"""Strategy, turns of a rollout, and figures."""
PROMPT = list(range(128))
TOKENS = list(range(LENGTHS[1]))
LOGPROBS = [-0.5] * LENGTHS[1]

owner: ContextVar[str] = ContextVar("owner", default="router")


class ProcessorTime:
    """Processor time of the callbacks of an event loop, by their owner."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    def run(self, handle: Any, run: Callable[[Any], None]) -> None:
        began = time.thread_time()
        run(handle)
        self.seconds[handle._context.get(owner, "router")] += time.thread_time() - began


def context_of(name: str) -> Context:
    context = copy_context()
    context.run(owner.set, name)
    return context


class SimulatedEngine:
    """The router's replica of one generator, and the generator itself."""

    def __init__(self, name: str, hits: Counter[str]) -> None:
        self.name = self.address = name
        self.num_running = 0
        self._version = 0
        self._seen = set[str]()  # groups and sessions whose prompts it has computed
        self._hits = hits

    async def generate(
        self, prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None, sampling: SamplingParams
    ) -> Completion:
        session, turn = str(session_id), request_id.partition("@")[0].rpartition("/")[2]
        prefix = session.rpartition("/")[0] if turn == "0" else session
        self._hits["asked"] += 1
        self._hits["hit"] += prefix in self._seen
        self._seen.update((session, session.rpartition("/")[0]))
        length = random.Random(request_id).randint(*LENGTHS)
        self.num_running += 1
        try:
            await asyncio.sleep(length * STEP_S)
        finally:
            self.num_running -= 1
        self._hits["tokens"] += length
        spans = (VersionSpan(self._version, length),)
        return Completion(request_id, TOKENS[:length], LOGPROBS[:length], FinishReason.STOP, spans)

    async def pull(self, version: int) -> int:
        await asyncio.sleep(LOAD_S)
        self._version = version
        return version

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...

    def forget(self, shard: str) -> None: ...


class Connection(ShardReplica):
    """A shard's connection to an engine."""

    def __init__(self, name: str, engine: SimulatedEngine) -> None:
        super().__init__(name)
        self.generate, self.abort = engine.generate, engine.abort

    async def close(self) -> None: ...


class Traffic:
    def __init__(self) -> None:
        self.num_messages = self.num_bytes = 0

    def pickled(self, message: Any) -> bytes:
        payload = pickle.dumps(message)
        self.num_messages += 1
        self.num_bytes += len(payload)
        return payload


class Link:
    """A shard, and the router's connection to it."""

    def __init__(
        self, name: str, router: GeneratorRouter, engines: dict[str, SimulatedEngine], strategy: str, traffic: Traffic
    ) -> None:
        self.name = name
        self.context = context_of("shards")
        self._random = random.Random(name)
        self._router = router
        self._traffic = traffic
        self._routers_context = copy_context()
        self.shard = self.context.run(
            lambda: RouterShard(
                lambda name, address: Connection(name, engines[address]),
                self._report,
                make_strategy(strategy),
                origin=f"@{name}",
            )
        )

    async def call(self, number: int, message: ToShard) -> Ended:
        payload = self._traffic.pickled(message)
        await asyncio.sleep(self._random.uniform(0, LATENCY_S))
        answer = await asyncio.get_running_loop().create_task(self._carry_out(number, payload), context=self.context)
        return pickle.loads(answer)

    async def _carry_out(self, number: int, payload: bytes) -> bytes:
        return self._traffic.pickled(await self.shard.receive_message(number, pickle.loads(payload)))

    def end(self, reason: str) -> None:
        raise RuntimeError(f"{self.name}: {reason}")

    def _report(self, message: FromShard) -> None:
        payload, delay_s = self._traffic.pickled(message), self._random.uniform(0, LATENCY_S)
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, self._receive, payload, context=self._routers_context)

    def _receive(self, payload: bytes) -> None:
        self._router.receive(self, pickle.loads(payload))


async def play(router: GeneratorRouter, name: str, num_groups: int, num_turns: int) -> None:
    """Keep that many groups in flight."""

    async def rollout(session_id: str) -> None:
        for turn in range(num_turns):
            await router.generate(
                PROMPT,
                request_id=f"{session_id}/{turn}",
                session_id=session_id,
                sampling=SamplingParams(max_tokens=LENGTHS[1]),
            )
        router.finish_session(session_id)

    async def groups(place: int) -> None:
        number = 0
        while True:
            await asyncio.gather(*(rollout(f"{name}.{place}.{number}/{sibling}") for sibling in range(GROUP_SIZE)))
            number += 1

    async with asyncio.TaskGroup() as playing:
        for place in range(num_groups):
            playing.create_task(groups(place))
            await asyncio.sleep(10.0 / num_groups)  # answers end at all times


async def measure(
    num_generators: int, num_shards: int, strategy: str, num_turns: int, spent: ProcessorTime
) -> dict[str, float]:
    """Figures of the strategy with that many shards, or with one router where there are none."""
    hits, traffic = Counter[str](), Traffic()
    engines = {f"generator_{index}": SimulatedEngine(f"generator_{index}", hits) for index in range(num_generators)}
    router = GeneratorRouter(engines.values(), make_strategy(strategy))
    links = [Link(f"shard_{number}", router, engines, strategy, traffic) for number in range(num_shards)]
    await asyncio.gather(*(router.join(link) for link in links))
    routers = {link.name: (link.shard, link.context) for link in links} or {"one": (router, context_of("shards"))}
    loop, num_groups = (
        asyncio.get_running_loop(),
        round(num_generators * REQUESTS / GROUP_SIZE / IN_FLIGHT / len(routers)),
    )
    playing = [
        loop.create_task(play(one, name, num_groups, num_turns), context=context)
        for name, (one, context) in routers.items()
    ]

    async def pulls() -> None:
        version = 0
        while True:
            version += 1
            await router.pull_state_dict(version)
            await asyncio.sleep(PULL_EVERY_S)

    playing.append(asyncio.create_task(pulls()))
    await asyncio.sleep(WARM_S)
    hits.clear()
    traffic.num_messages = traffic.num_bytes = 0
    spent.seconds.clear()
    ratios: list[float] = []
    for _ in range(SECONDS):
        await asyncio.sleep(1.0)
        counts = [engine.num_running for engine in engines.values()]
        ratios.append(max(counts) * num_generators / sum(counts))
    figures = {
        "balance": median(ratios),
        "balance_worst": max(ratios),
        "prefix_hits": hits["hit"] / hits["asked"],
        "control_cpu_per_s": spent.seconds["router"] / SECONDS,
        "control_messages_per_s": traffic.num_messages / SECONDS,
        "control_bytes_per_token": traffic.num_bytes / hits["tokens"],
    }
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    await asyncio.gather(*(link.shard.close() for link in links))
    await router.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=256)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    spent, run = ProcessorTime(), Handle._run
    with patch.object(Handle, "_run", lambda handle: spent.run(handle, run)):
        for strategy, num_turns, wanted in WORKLOADS:
            for way, num_shards in (("one_router", 0), ("shards", NUM_SHARDS)):
                with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
                    figures = runner.run(measure(options.generators, num_shards, strategy, num_turns, spent))
                for name in wanted:
                    if num_shards or not name.startswith("control"):
                        report(f"{way}_{name}_{options.generators}", figures[name], "")


if __name__ == "__main__":
    main()
