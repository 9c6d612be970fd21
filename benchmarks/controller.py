"""Overhead of the controller: rollouter, router and rewards, against a loop that only waits.

    python -m benchmarks.controller [--rounds 40]

There are 128 rollouts of one turn. Their replicas answer at once, and stream tokens in chunks of 32, as generators do.
The bare loop awaits the same replicas. Figures are processor times, the minimum over the rounds, because other work on
the machine only adds to them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

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
from titan_rl.cluster.processes.garbage import settled_heap
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router import GeneratorRouter
from titan_rl.types import TokenChunk

GROUPS, SIBLINGS, PROMPT_TOKENS, CHUNK = 16, 8, 24, 32
TARGETS = {64: 10.4, 256: 5.2}  # by length of the completions
TOKENS = [7 * place % 500 for place in range(256)]
LOGPROBS = [-0.5 - 1e-4 * place for place in range(256)]


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

    async def stack(sampling: SamplingParams) -> None:
        groups = [
            rollouter.run_group(router.generate, prompt, group_id=f"g{group}", group_size=SIBLINGS, sampling=sampling)
            for group, prompt in enumerate(prompts())
        ]
        await asyncio.gather(*groups)

    for length, target in TARGETS.items():
        sampling = SamplingParams(max_tokens=length, min_tokens=length)
        ways: dict[str, Callable[[SamplingParams], Awaitable[None]]] = {"stack": stack, "bare": bare}
        least: dict[str, float] = {}
        for way in ways.values():
            await way(sampling)
        with settled_heap():
            for _ in range(rounds):
                for name, way in ways.items():
                    began = time.process_time()
                    await way(sampling)
                    least[name] = min(least.get(name, float("inf")), time.process_time() - began)
        report(f"controller_cpu_vs_bare_loop_{length}", least["stack"] / least["bare"], "x, at most", target)
        report(f"controller_cpu_us_per_rollout_{length}", least["stack"] / (GROUPS * SIBLINGS) * 1e6, "us")
    await router.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
