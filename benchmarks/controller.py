"""Overhead of the controller: rollouter, router and rewards, against a loop that only waits.

    python -m benchmarks.controller [--rounds 40]

There are 128 rollouts of one turn. Their replicas answer at once, and stream tokens in chunks of 32, as generators do.
The bare loop awaits the same replicas. Figures are processor times, the minimum over the rounds, because other work on
the machine only adds to them.

The limit is a loop with the tasks, futures and timers of a rollout and nothing else: a task for the rollout, one for
the calls of its environment, one for the call of the user's `GenerateFn`, one for the router's wait for the replica,
and one for the judge; a time limit for each call. Only with fewer tasks could the controller get below it: each of them
contains code that may hang, raise, or ignore its cancellation.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from benchmarks.paired import report
from titan_rl import (
    Completion,
    FinishReason,
    Reward,
    Rollouter,
    RolloutStatus,
    Rubric,
    SamplingParams,
    TokenObservation,
    TokenStep,
    VersionSpan,
)
from titan_rl.cluster.processes.garbage_collection import settled_heap
from titan_rl.core.arrays import logprob_array, token_array
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router import GeneratorRouter
from titan_rl.types import TokenChunk

T = TypeVar("T")

GROUPS, SIBLINGS, PROMPT_TOKENS, CHUNK = 16, 8, 24, 32
LENGTHS = (64, 256)  # of the completions
TARGET = 5.0
TOKENS = token_array([7 * place % 500 for place in range(256)])  # packed, as generators send them
LOGPROBS = logprob_array([-0.5 - 1e-4 * place for place in range(256)])


class Replica:
    """Replica that adds a chunk to each of its requests in each iteration of the event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._running: list[tuple[EngineRequest, OnChunk, asyncio.Future[Completion]]] = []
        self._lengths: dict[str, int] = {}

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        raise NotImplementedError("it streams")

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        loop = asyncio.get_running_loop()
        if not self._running:
            loop.call_soon(self._advance)
        future: asyncio.Future[Completion] = loop.create_future()
        self._running.append((request, on_chunk, future))
        self._lengths[request.request_id] = 0
        return await future

    def _advance(self) -> None:
        running, self._running = self._running, []
        for entry in running:
            request, on_chunk, future = entry
            request_id, most = request.request_id, request.sampling.max_tokens
            length = self._lengths[request_id] = self._lengths[request_id] + CHUNK
            if length >= most:
                del self._lengths[request_id]
                future.set_result(_completion(request_id, most))
            else:
                start = length - CHUNK
                tokens, logprobs = TOKENS[start:length], LOGPROBS[start:length]
                on_chunk(TokenChunk(request_id, tokens, logprobs, (VersionSpan(0, CHUNK),)))
                self._running.append(entry)
        if self._running:
            asyncio.get_running_loop().call_soon(self._advance)

    async def pull(self, version: int) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


def _completion(request_id: str, length: int) -> Completion:
    spans, metrics = (VersionSpan(0, length),), {"queue_s": 0.0, "inter_token_s": 1e-4}
    return Completion(request_id, TOKENS[:length], LOGPROBS[:length], FinishReason.LENGTH, spans, metrics=metrics)


class TasksOfARollout:
    """One rollout without its work: its tasks wait for each other and for the replica, each call with a time limit."""

    def __init__(self, answer: Coroutine[Any, Any, Completion]) -> None:
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._call = self._loop.create_future()  # the environment's task waits for a call
        self._made = self._loop.create_future()

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        environment = self._loop.create_task(self._environment())
        await self._call_environment()  # reset
        async with asyncio.timeout(60.0):
            await self._in_task(self._in_task(self._answer))  # the user's function, and the router's wait
        await self._call_environment()  # step
        await self._call_environment()  # close
        await environment
        tasks.create_task(self._judge())

    async def _environment(self) -> None:
        for _ in range(3):
            await self._call
            self._call = self._loop.create_future()
            self._made.set_result(None)

    async def _call_environment(self) -> None:
        async with asyncio.timeout(60.0):
            self._made = self._loop.create_future()
            self._call.set_result(None)
            await self._made

    async def _in_task(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._loop.create_task(work)

    async def _judge(self) -> float:
        async with asyncio.timeout(60.0):
            await asyncio.sleep(0)
            return 1.0


class OneAnswer:
    """Environment with one prompt and one answer."""

    def __init__(self, prompt: list[int]) -> None:
        self._prompt = prompt

    async def reset(self) -> TokenObservation:
        return TokenObservation(self._prompt)

    async def step(self, completion: Completion) -> TokenStep:
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None: ...


def prompts() -> list[list[int]]:
    return [[(7 * group + 3 * token) % 500 + 10 for token in range(PROMPT_TOKENS)] for group in range(GROUPS)]


async def measure(rounds: int) -> None:
    replicas = [Replica(str(index)) for index in range(2)]
    router = GeneratorRouter(replicas)
    rubric = Rubric([Reward(lambda rollout: 1.0, name="one")])
    rollouter = Rollouter(OneAnswer, rubric, max_context=512, finish_session=router.finish_session)

    async def bare(sampling: SamplingParams) -> None:
        requests = [
            replicas[sibling % len(replicas)].stream(
                EngineRequest(f"g{group}/{sibling}", prompt, sampling), lambda _: None
            )
            for group, prompt in enumerate(prompts())
            for sibling in range(SIBLINGS)
        ]
        await asyncio.gather(*requests)

    async def tasks_alone(sampling: SamplingParams) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group, prompt in enumerate(prompts()):
                for sibling in range(SIBLINGS):
                    request = EngineRequest(f"g{group}/{sibling}", prompt, sampling)
                    answer = replicas[sibling % len(replicas)].stream(request, lambda _: None)
                    tasks.create_task(TasksOfARollout(answer).run(tasks))

    async def stack(sampling: SamplingParams) -> None:
        groups = [
            rollouter.run_group(router.generate, prompt, group_id=f"g{group}", group_size=SIBLINGS, sampling=sampling)
            for group, prompt in enumerate(prompts())
        ]
        await asyncio.gather(*groups)

    for length in LENGTHS:
        sampling = SamplingParams(max_tokens=length, min_tokens=length)
        ways: dict[str, Callable[[SamplingParams], Awaitable[None]]] = {
            "stack": stack,
            "bare": bare,
            "tasks": tasks_alone,
        }
        least: dict[str, float] = {}
        for way in ways.values():
            await way(sampling)
        with settled_heap():
            for _ in range(rounds):
                for name, way in ways.items():
                    began = time.process_time()
                    await way(sampling)
                    least[name] = min(least.get(name, float("inf")), time.process_time() - began)
        report(f"controller_cpu_vs_bare_loop_{length}", least["stack"] / least["bare"], "x, at most", TARGET)
        report(f"controller_cpu_limit_vs_bare_loop_{length}", least["tasks"] / least["bare"], "x")
        report(f"controller_cpu_us_per_rollout_{length}", least["stack"] / (GROUPS * SIBLINGS) * 1e6, "us")
    await router.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
