"""Cost of routing: choices compared with TitanRL's own strategies, and latency compared with a direct actor call.

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}. Targets are lower limits for
speedups, and null for figures without a target. Every ratio is of two figures from this run.

    python benchmarks/router.py [--no-actor] [--no-titanrl]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from titan_rl.generation.router import GeneratorRouter, LeastLoaded, RoundRobin, StickySession, Strategy
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

SIZES = {8: 1.0, 64: 2.0, 1024: 20.0}  # replicas: least speedup of a choice
COSTS = [random.Random(0).randint(50, 500) for _ in range(4096)]  # tokens
IN_FLIGHT_PER_REPLICA = 16
NUM_SESSIONS = 2048


def report(name: str, value: float, unit: str, target: float | None = None) -> None:
    print(json.dumps({"name": name, "value": round(value, 4), "target": target, "unit": unit}), flush=True)


class Candidate:
    """Minimal candidate for a strategy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.load = 0
        self.serving = True


def seconds_per_choice(
    choose: Callable[[int, int], Any], release: Callable[[Any, int], None], num_replicas: int, choices: int
) -> float:
    """Processor time per choice in a steady state, of this thread, so that other work on the machine does not count.

    Each choice reserves its tokens, and the oldest one in a full window is released.
    """
    window = IN_FLIGHT_PER_REPLICA * num_replicas
    in_flight: deque[tuple[Any, int]] = deque()
    for number in range(window):
        in_flight.append((choose(number, COSTS[number & 4095]), COSTS[number & 4095]))
    started = time.thread_time()
    for number in range(window, window + choices):
        cost = COSTS[number & 4095]
        in_flight.append((choose(number, cost), cost))
        release(*in_flight.popleft())
    return (time.thread_time() - started) / choices


def time_ours(strategy: Strategy, num_replicas: int, choices: int, sessions: Sequence[str | None]) -> float:
    for index in range(num_replicas):
        strategy.admit(Candidate(str(index)))

    def choose(number: int, cost: int) -> Any:
        candidate = strategy.choose(sessions[number % len(sessions)], cost)
        candidate.load += cost
        return candidate

    def release(candidate: Any, cost: int) -> None:
        candidate.load -= cost
        strategy.released(candidate)

    return seconds_per_choice(choose, release, num_replicas, choices)


def time_titanrl(strategy: Any, num_replicas: int, choices: int, sessions: Sequence[str | None]) -> float:
    from torchtitan.experiments.rl.routing.types import RoutingCandidate, RoutingContext

    class Handle(RoutingCandidate):
        reserved_load: int = 0  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    handles = [Handle() for _ in range(num_replicas)]
    contexts = [RoutingContext(session_id=session) for session in sessions]

    def choose(number: int, cost: int) -> Any:
        handle = strategy.choose(contexts[number % len(contexts)], handles)
        handle.reserved_load += cost
        return handle

    def release(handle: Any, cost: int) -> None:
        handle.reserved_load -= cost

    return seconds_per_choice(choose, release, num_replicas, choices)


def compare_choices(repeats: int = 5) -> None:
    """Medians of repeats that take turns, so that both sides have the same conditions."""
    from torchtitan.experiments.rl.routing import strategies as titanrl

    sticky_sessions = [f"g{index}/0" for index in range(NUM_SESSIONS)]
    least, sticky = titanrl.LeastLoadedRoutingStrategy, titanrl.StickySessionRoutingStrategy
    turns = titanrl.RoundRobinRoutingStrategy
    kinds: list[tuple[str, Callable[[], Strategy], Callable[[], Any], Sequence[str | None]]] = [
        ("choice", LeastLoaded, lambda: least(least.Config()), [None]),
        ("sticky_choice", StickySession, lambda: sticky(sticky.Config()), sticky_sessions),
        ("round_robin_choice", RoundRobin, lambda: turns(turns.Config()), [None]),
    ]
    for num_replicas, target in SIZES.items():
        choices = 20_000 if num_replicas < 1000 else 4_000
        for kind, build, build_titanrl, sessions in kinds:
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(repeats):
                ours.append(time_ours(build(), num_replicas, choices, sessions))
                theirs.append(time_titanrl(build_titanrl(), num_replicas, choices, sessions))
            our_s, their_s = statistics.median(ours), statistics.median(theirs)
            report(f"{kind}_us_{num_replicas}", our_s * 1e6, "us")
            report(f"titanrl_{kind}_us_{num_replicas}", their_s * 1e6, "us")
            goal = target if kind == "choice" else None
            report(f"{kind}_speedup_vs_titanrl_{num_replicas}", their_s / our_s, "x", goal)


class EchoReplica:
    """Replica without work: a request costs only the call."""

    def __init__(self, name: str, call: Callable[[str], Awaitable[str]]) -> None:
        self.name = name
        self._call = call

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        await self._call(request_id)
        return Completion(request_id, (1,), (0.0,), FinishReason.STOP, (VersionSpan(0, 1),))

    async def pull(self, version: int) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


async def latencies(call: Callable[[int], Awaitable[Any]], in_flight: int, calls: int) -> list[float]:
    """Seconds of each call, with `in_flight` callers that each start the next call at once."""
    taken: list[float] = []
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            started = time.perf_counter()
            await call(number)
            taken.append(time.perf_counter() - started)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return sorted(taken)


async def compare_latency(call: Callable[[str], Awaitable[str]], repeats: int = 3) -> None:
    """Added latency: the same actor call with and without a router, in turns."""
    router = GeneratorRouter([EchoReplica("0", call)])
    sampling = SamplingParams(max_tokens=64)
    prompt = [1] * 64

    def routed(number: int) -> Awaitable[Any]:
        return router.generate(prompt, request_id=f"r{number}", session_id=f"s{number % 100}", sampling=sampling)

    def direct(number: int) -> Awaitable[Any]:
        return call(f"r{number}")

    for in_flight in (1, 64, 1000):
        calls = 500 if in_flight == 1 else 5_000
        with_router: list[float] = []
        without: list[float] = []
        await latencies(direct, in_flight, calls)  # warm
        for _ in range(repeats):
            without += await latencies(direct, in_flight, calls)
            with_router += await latencies(routed, in_flight, calls)
        for percent in (50, 99):
            base, total = (sorted(taken)[len(taken) * percent // 100 - 1] for taken in (without, with_router))
            report(f"actor_direct_p{percent}_us_{in_flight}", base * 1e6, "us")
            report(f"router_added_p{percent}_us_{in_flight}", (total - base) * 1e6, "us")
    await router.close()


async def compare_actor_latency() -> None:
    from monarch.actor import Actor, concurrent_endpoint, this_host

    class Echo(Actor):
        @concurrent_endpoint
        async def call(self, request_id: str) -> str:
            return request_id

    processes = this_host().spawn_procs(per_host={"gpus": 1})
    actor: Any = processes.spawn("echo", Echo)

    async def call(request_id: str) -> str:
        return await actor.call.call_one(request_id)

    await compare_latency(call)
    await processes.stop()


async def measure_own_work() -> None:
    """Processor time of one request through the router, with a replica that does nothing."""

    async def call(request_id: str) -> str:
        await asyncio.sleep(0)
        return request_id

    calls = 10_000
    router = GeneratorRouter([EchoReplica("0", call)])
    sampling = SamplingParams(max_tokens=64)
    for in_flight in (1, 64, 1000):
        started = time.process_time()
        await latencies(lambda number: call(f"r{number}"), in_flight, calls)
        between = time.process_time()
        await latencies(
            lambda number: router.generate(
                [1] * 64, request_id=f"r{number}", session_id=f"s{number}", sampling=sampling
            ),
            in_flight,
            calls,
        )
        added = (time.process_time() - between) - (between - started)
        report(f"router_cpu_us_{in_flight}", added / calls * 1e6, "us")
    await router.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-actor", action="store_true", help="leave out the Monarch actor")
    parser.add_argument("--no-titanrl", action="store_true", help="leave out TitanRL, whose import takes a while")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(measure_own_work())
    if not options.no_actor:
        asyncio.run(compare_actor_latency())
    if not options.no_titanrl:
        compare_choices()


if __name__ == "__main__":
    main()
