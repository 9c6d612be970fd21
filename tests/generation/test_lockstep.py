"""Ranks of one replica, as threads with an engine each: they take the same steps, and fail together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadRanks

from titan_rl.core.errors import EngineDeadError, GenerationError, RequestError, StateDictError
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.calls import Weights
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.loop.ranks import EngineRank, agree, follow_leader
from titan_rl.generation.loop.state import LoopAction, LoopDecision
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.types import FinishReason, SamplingParams

WEIGHTS = [("weight", 1.0)]


class Watched(ScriptedEngine):
    """Engine that records its calls, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.fail_loading = False
        self.fail_stepping = False

    def add(self, request: EngineRequest) -> None:
        self.calls.append(("add", request.request_id))
        super().add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = sorted(request_ids)
        self.calls.append(("abort", ids))
        super().abort(ids)

    def step(self) -> list[TokenDelta]:
        if self.fail_stepping:
            raise OSError("no more memory")
        deltas = super().step()
        self.calls.append(("step", [(delta.request_id, tuple(delta.token_ids)) for delta in deltas]))
        return deltas

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        self.calls.append(("load", version, list(items)))
        if self.fail_loading:
            raise OSError("a shard is missing")
        super().load_state_dict(items, version)

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        self.calls.append(("reset", recompute_running))
        super().reset_prefix_cache(recompute_running=recompute_running)


class Replica:
    def __init__(self, num_ranks: int, open_weights: Callable[[Any], Weights]) -> None:
        self.engines = [Watched() for _ in range(num_ranks)]
        self.ended: list[BaseException | None] = [None] * num_ranks
        leader, *followers = ThreadRanks.make(num_ranks)
        self.loop = EngineLoop(lambda: self.engines[0], ranks=leader)

        def follow(rank: int, ranks: ThreadRanks) -> None:
            try:
                follow_leader(EngineRank(lambda: self.engines[rank], ranks), open_weights)
            except BaseException as error:
                self.ended[rank] = error

        self.threads = [
            threading.Thread(target=follow, args=(rank, ranks), daemon=True)
            for rank, ranks in enumerate(followers, start=1)
        ]

    async def generate(self, request_id: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 6) -> Any:
        sampling = SamplingParams(max_tokens=max_tokens)
        return await self.loop.generate(prompt, request_id=request_id, sampling=sampling)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def opened(_: Any) -> Weights:
    return Weights(WEIGHTS)


@asynccontextmanager
async def replica_of(num_ranks: int, open_weights: Callable[[Any], Weights] = opened) -> AsyncIterator[Replica]:
    replica = Replica(num_ranks, open_weights)
    for thread in replica.threads:
        thread.start()
    await replica.loop.start()
    yield replica
    await replica.loop.close()
    replica.join()


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("generate"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 8)),
        st.tuples(st.just("pull"), st.integers(0, 8)),
        st.tuples(st.just("bad"), st.just(0)),
        st.tuples(st.just("yield"), st.integers(1, 3)),
    ),
    max_size=20,
)


@settings(max_examples=examples(50), deadline=None)
@given(num_ranks=st.integers(1, 3), commands=COMMANDS)
async def test_every_rank_does_what_rank_0_does(num_ranks: int, commands: list[tuple[str, int]]) -> None:
    async with replica_of(num_ranks) as replica:
        calls: list[asyncio.Task[Any]] = []
        version = 0
        for command, number in commands:
            match command:
                case "generate":
                    calls.append(asyncio.create_task(replica.generate(f"r{len(calls)}", max_tokens=number)))
                case "bad":
                    calls.append(asyncio.create_task(replica.generate(f"r{len(calls)}", [])))
                case "abort":
                    await replica.loop.abort([f"r{number}"])
                case "pull":
                    result = await replica.loop.pull(number, lambda: WEIGHTS, manifest=number)
                    version = max(version, number)
                    assert result.version == replica.loop.version == version
                case _:
                    for _ in range(number):
                        await asyncio.sleep(0)
        await asyncio.gather(*calls, return_exceptions=True)
    assert all(engine.calls == replica.engines[0].calls for engine in replica.engines)
    assert all(engine.versions == sorted(engine.versions) for engine in replica.engines)
    assert replica.ended == [None] * num_ranks


async def test_bad_request_fails_alone_on_every_rank() -> None:
    async with replica_of(2) as replica:
        good = asyncio.create_task(replica.generate("good"))
        with pytest.raises(RequestError):
            await replica.generate("bad", [])
        assert (await good).finish_reason is not FinishReason.ABORT
        assert (await replica.generate("after")).token_ids


async def test_load_failure_on_one_rank_blocks_serving_until_the_next_pull() -> None:
    async with replica_of(2) as replica:
        replica.engines[1].fail_loading = True
        with pytest.raises(StateDictError, match=r"rank 1.*a shard is missing"):
            await replica.loop.pull(1, lambda: WEIGHTS, manifest=1)
        with pytest.raises(GenerationError, match="unknown"):
            await replica.generate("refused")
        replica.engines[1].fail_loading = False
        await replica.loop.pull(2, lambda: WEIGHTS, manifest=2)
        assert (await replica.generate("served")).version_spans[0].version == 2


async def test_open_failure_on_one_rank_keeps_the_old_weights_on_all() -> None:
    def torn(_: Any) -> Weights:
        raise StateDictError("checksum")

    async with replica_of(2, torn) as replica:
        with pytest.raises(StateDictError, match="rank 1: checksum"):
            await replica.loop.pull(1, lambda: WEIGHTS, manifest=1)
        assert (await replica.generate("served")).version_spans[0].version == 0
    assert not any(call[0] == "load" for engine in replica.engines for call in engine.calls)


async def test_verification_failure_on_one_rank_fails_the_pull() -> None:
    def suspicious(_: Any) -> Weights:
        def verify(_: Any) -> None:
            raise ValueError("logprobs differ")

        return Weights(WEIGHTS, verify)

    async with replica_of(2, suspicious) as replica:
        with pytest.raises(StateDictError, match=r"rank 1.*logprobs differ"):
            await replica.loop.pull(1, lambda: WEIGHTS, lambda engine: None, manifest=1)
        with pytest.raises(GenerationError, match="unknown"):
            await replica.generate("refused")


async def test_follower_engine_failure_ends_the_replica() -> None:
    async with replica_of(2) as replica:
        replica.engines[1].fail_stepping = True
        with pytest.raises(EngineDeadError, match="rank"):
            await replica.generate("a", max_tokens=1000)
        replica.join()
        assert isinstance(replica.ended[1], OSError)


async def test_leader_engine_failure_releases_its_followers() -> None:
    async with replica_of(3) as replica:
        replica.engines[0].fail_stepping = True
        with pytest.raises(EngineDeadError, match="no more memory"):
            await replica.generate("a")
        replica.join()
        assert all(isinstance(error, EngineDeadError) for error in replica.ended[1:])


def test_slow_follower_misses_no_message_of_a_closing_leader() -> None:
    for _ in range(50):
        leader, follower = ThreadRanks.make(2)
        heard: list[Any] = []

        def listen(follower: ThreadRanks = follower, heard: list[Any] = heard) -> None:
            heard.append(agree(follower, None))
            heard.append(follower.receive().action)

        thread = threading.Thread(target=listen)
        thread.start()
        agree(leader, "torn")
        leader.broadcast(LoopDecision(LoopAction.CLOSE))
        leader.close()
        thread.join(10)
        assert heard == ["rank 0: torn", LoopAction.CLOSE]
