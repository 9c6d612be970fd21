"""Cost of a token for the controller: from the message of a generator's process to the rows of a training step.

Rollouts of one turn pass through the wire format, the router, the journal, a rollouter, `build_samples` and
`make_tensor_batch`. Times are this process's processor time, including its journal's thread. Engines, the transport
between processes and the trainer's arithmetic are left out.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controller import OneAnswer
from benchmarks.paired import Spread, report, report_computed
from benchmarks.token_lists import bytes_a_token_of_lists, journal_bytes_of_contexts, tokens_per_second_of_lists
from titan_rl import Completion, FinishReason, Reward, Rollouter, Rubric, SamplingParams, VersionSpan
from titan_rl.cluster.processes.garbage_collection import settle_heap
from titan_rl.cluster.request_stream import Packed, pack, unpack
from titan_rl.config.sections import STREAM_INTERVAL
from titan_rl.core.clock import CLOCK
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.calls import PendingCall
from titan_rl.generation.request import EngineRequest, OnChunk, Partial
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.run.journal.records import encode, group_record
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.scheduling.task_mix import Assigned
from titan_rl.training.data.packing import find_families
from titan_rl.training.data.packing import pack as pack_rows
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.training.tensor_batch import make_tensor_batch
from titan_rl.types import TokenChunk

GROUPS, SIBLINGS, PROMPT, LENGTH = 4, 8, 64, 4096
CHUNK = STREAM_INTERVAL
ROUNDS = 5
TOKENS_A_SECOND_70B = 60_000  # assumed: 32 of the GPUs generate, four an engine, each engine 7,500 tokens/s
ROLLOUTS_70B, CONTEXT_70B = 4096, 32_768
NUM_REQUESTS = GROUPS * SIBLINGS
SAMPLING = SamplingParams(max_tokens=LENGTH, min_tokens=0)


class Recorded:
    """Replica that replays the recorded messages of a generator's process.

    It sends a message in each iteration of the event loop, with a chunk for each request, as after an engine's step.

    Args:
        messages: messages to replay once all their requests have arrived.
    """

    def __init__(self, messages: list[bytes]) -> None:
        self.name = "recorded"
        self._messages = messages
        self._waiting = NUM_REQUESTS
        self._in_flight: dict[str, tuple[asyncio.Future[Completion], OnChunk]] = {}

    async def generate(self, prompt_token_ids: Sequence[int], **request: Any) -> Completion:
        raise NotImplementedError("it streams")

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._in_flight[request.request_id] = future, on_chunk
        self._waiting -= 1
        if not self._waiting:
            loop.call_soon(self._play, iter(self._messages))
        return await future

    def _play(self, messages: Iterator[bytes]) -> None:
        if (message := next(messages, None)) is None:
            return
        received: list[Packed] = pickle.loads(message)
        for packed in received:
            message = unpack(packed)
            future, on_chunk = self._in_flight[message.request_id]
            if isinstance(message, Completion):
                del self._in_flight[message.request_id]
                future.set_result(message)
            elif isinstance(message, TokenChunk):
                on_chunk(message)
        asyncio.get_running_loop().call_soon(self._play, messages)

    async def pull(self, version: int) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


def messages_of(request_ids: Sequence[str]) -> list[bytes]:
    """Messages that a generator sends for concurrent requests."""
    loop = asyncio.new_event_loop()
    calls = [
        PendingCall(EngineRequest(request_id, [1], SAMPLING), loop.create_future(), None, CLOCK)
        for request_id in request_ids
    ]
    for call in calls:
        call.admit(0, len(calls))
    messages: list[bytes] = []
    for place in range(LENGTH):
        for call in calls:
            delta = TokenDelta(call.request.request_id, [7 * place % 150_000], [-0.5 - 1e-4 * place])
            call.extend(delta, 0.0, 0.0)
        if (place + 1) % CHUNK == 0 and place + 1 < LENGTH:
            messages.append(pickle.dumps([pack(call.take_chunk()) for call in calls]))
    loop.close()
    return [*messages, pickle.dumps([pack(call.completion(FinishReason.LENGTH)) for call in calls])]


def request_ids() -> list[str]:
    return [f"g{group}/{sibling}/0" for group in range(GROUPS) for sibling in range(SIBLINGS)]


def prompt_of(index: int) -> list[int]:
    return [(7 * index + 3 * token) % 500 + 10 for token in range(PROMPT)]


async def through_the_controller() -> dict[str, float]:
    """Figures of one round: tokens per second, microseconds per token of each part, and the groups' bytes per token."""
    messages = messages_of(request_ids())
    router = GeneratorRouter([Recorded(messages)])
    rubric = Rubric([Reward(lambda rollout: float(rollout.sibling), name="one")])
    rollouter = Rollouter(OneAnswer, rubric, max_context=PROMPT + LENGTH + 1, finish_session=router.finish_session)
    num_tokens = GROUPS * SIBLINGS * LENGTH
    with tempfile.TemporaryDirectory() as folder:
        journal = RunJournal(Path(folder) / "journal")
        settle_heap()  # as a run's processes do
        began = time.process_time()

        async def play(index: int) -> RolloutGroup:
            generate = journal.record(router.generate, index)
            group = await rollouter.run_group(
                generate, prompt_of(index), group_id=f"g{index}", group_size=SIBLINGS, sampling=SAMPLING
            )
            journal.finished(Assigned(index, "task", index), group)
            return group

        groups = await asyncio.gather(*(play(index) for index in range(GROUPS)))
        played = time.process_time()
        samples = [sample for group in groups for sample in build_samples(group)]
        built = time.process_time()
        rows = pack_rows(find_families(samples, PROMPT + LENGTH), PROMPT + LENGTH).rows
        for row in rows:
            make_tensor_batch([row])
        done = time.process_time()
        journal.close()
        ended = time.process_time()
        gc.unfreeze()
    await router.close()
    return {
        "tokens_per_second": num_tokens / (ended - began),
        "generated_us": 1e6 * (played - began + ended - done) / num_tokens,
        "build_samples_us": 1e6 * (built - played) / num_tokens,
        "make_batch_us": 1e6 * (done - built) / num_tokens,
    }


def bytes_a_token() -> dict[str, float]:
    """Memory per token: of a played group, and of the samples that are made of it."""

    messages = messages_of(request_ids())

    async def held() -> dict[str, float]:
        router = GeneratorRouter([Recorded(messages)])
        rollouter = Rollouter(
            OneAnswer,
            Rubric([Reward(lambda rollout: float(rollout.sibling), name="one")]),
            max_context=PROMPT + LENGTH + 1,
        )
        tracemalloc.start()
        groups = await asyncio.gather(
            *(
                rollouter.run_group(
                    router.generate, prompt_of(index), group_id=f"g{index}", group_size=SIBLINGS, sampling=SAMPLING
                )
                for index in range(GROUPS)
            )
        )
        await router.close()
        gc.collect()
        of_group = tracemalloc.get_traced_memory()[0]
        samples = [sample for group in groups for sample in build_samples(group)]
        gc.collect()
        of_samples = tracemalloc.get_traced_memory()[0] - of_group
        tracemalloc.stop()
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        return {"group": of_group / num_tokens, "samples": of_samples / num_tokens}

    return asyncio.run(held())


def journal_bytes(rollout: Rollout) -> int:
    """Journal bytes of a group of one rollout, each of whose turns extends everything before it."""
    return len(encode(group_record(Assigned(0, "task", 0), RolloutGroup("g0", None, [rollout]))))


def long_rollout(turns: int, context: int) -> Rollout:
    added = context // (2 * turns)
    rollout = Rollout("g0/0", "g0", 0, None, reward=1.0, advantage=1.0)
    tokens: list[int] = []
    for turn in range(turns):
        tokens += [(11 * turn + 7 * place) % 150_000 for place in range(added)]
        said = [(13 * turn + 5 * place) % 150_000 for place in range(added)]
        completion = Completion(f"g0/0/{turn}", said, [-0.25] * added, FinishReason.STOP, (VersionSpan(turn, added),))
        rollout.turns.append(Turn(list(tokens), completion, sampling=SAMPLING))
        tokens += said
    return rollout


def so_far_ms(num_tokens: int = 32_768) -> tuple[float, float]:
    """Milliseconds to get the tokens of a request so far, and to join its chunks, each to all chunks before it."""
    best = float("inf")
    request = EngineRequest("g0/0/0", [1, 2, 3], SamplingParams(max_tokens=num_tokens + 1))
    partial = Partial(request)
    chunks: list[TokenChunk] = []
    with partial.attempt() as keep:
        for start in range(0, num_tokens, CHUNK):
            chunk = TokenChunk("g0/0/0", list(range(start, start + CHUNK)), [-0.5] * CHUNK, (VersionSpan(0, CHUNK),))
            received = unpack(pack(chunk))
            assert isinstance(received, TokenChunk)
            keep(received)
            chunks.append(chunk)
        for _ in range(3):
            began = time.perf_counter()
            assert len(partial.so_far.token_ids) == num_tokens
            best = min(best, time.perf_counter() - began)
    token_ids, logprobs = list[int](), list[float]()
    began = time.perf_counter()
    for chunk in chunks:
        token_ids, logprobs = [*token_ids, *chunk.token_ids], [*logprobs, *chunk.logprobs]
    return 1e3 * best, 1e3 * (time.perf_counter() - began)


def report_token_path() -> None:
    rounds = [asyncio.run(through_the_controller()) for _ in range(ROUNDS)]
    figures = {name: Spread([values[name] for values in rounds]) for name in rounds[0]}
    speed, of_lists = (
        figures["tokens_per_second"],
        max(tokens_per_second_of_lists(request_ids(), LENGTH, CHUNK) for _ in range(ROUNDS)),
    )
    way = "lists of Python objects, at most: without router, rollouter and journal"
    report("tokens_per_second_through_the_controller", speed, "tokens/s", 2e6, (of_lists, way))
    report("build_samples_us_a_token", figures["build_samples_us"], "us")
    report("make_batch_us_a_token", figures["make_batch_us"], "us")
    held, held_in_lists = bytes_a_token(), bytes_a_token_of_lists(LENGTH)
    report("memory_a_token", held["group"], "bytes", 16, (held_in_lists, "lists of Python objects"))
    report("memory_a_token_of_a_training_sample", held["samples"], "bytes")
    rollout = long_rollout(100, 56_000)
    journal, of_contexts = journal_bytes(rollout), journal_bytes_of_contexts(rollout)
    report("journal_bytes_100_turns_56k", journal, "bytes", before=(of_contexts, "whole contexts, as lists"))
    so_far, joined = so_far_ms()
    report("so_far_ms_32k", so_far, "ms", 1, (joined, "chunks joined one by one, as lists"))

    share, share_of_lists = TOKENS_A_SECOND_70B / speed.median, TOKENS_A_SECOND_70B / of_lists
    told = f"{TOKENS_A_SECOND_70B:,} tokens/s, assumed of 64 GPUs; before: {share_of_lists:.2f} or more"
    report_computed("controller_share_70b_64_gpus", share, "of a core", told)
    tokens = ROLLOUTS_70B * CONTEXT_70B / 1e9
    told = f"{ROLLOUTS_70B:,} rollouts of {CONTEXT_70B:,} tokens; before: {held_in_lists * tokens:.1f}"
    report_computed("controller_gb_70b_64_gpus", held["group"] * tokens, "GB", told)
    told = f"{ROLLOUTS_70B:,} rollouts of 100 turns and 56,000 tokens; before: {of_contexts * ROLLOUTS_70B / 1e9:.0f}"
    report_computed("journal_gb_70b_64_gpus", journal * ROLLOUTS_70B / 1e9, "GB", told)
    told = f"the answers of {ROLLOUTS_70B:,} requests, in a checkpoint; before: {joined * ROLLOUTS_70B / 1e3:.0f}"
    report_computed("so_far_s_70b_64_gpus", so_far * ROLLOUTS_70B / 1e3, "s", told)


def main() -> None:
    report_token_path()


if __name__ == "__main__":
    main()
