"""Random interleavings of router calls and replica faults. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_shards import Network, router_of
from virtual_time import in_virtual_time

from titan_rl.core.errors import GenerationError, RequestError, StateDictError
from titan_rl.generation.router import Limits
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, SamplingParams

Move = tuple[str, int, float]  # action, argument, seconds until the next move

CALLS = ["cancel", "hot_swap", "drain", "keep", "wait", "abort_pause", "resume", "abort", "remove", "add"]
FAULTS = ["break", "mend", "pull_breaks", "hang", "stand_still", "cancel_calls", "poison", "cut", "refuse"]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", *CALLS, *FAULTS]),
        st.integers(0, 30),
        st.sampled_from([0.0, 0.0, 0.3, 1.0, 4.0, 20.0]),
    ),
    max_size=60,
)


class Watched(FakeReplica):
    """Replica that knows whether its last pull has succeeded."""

    stale = False
    is_shared = False  # whether several shards use it
    cancels_calls = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.moves = asyncio.Event()
        self.moves.set()

    async def generate(self, *args: Any, request_id: str, **kwargs: Any) -> Completion:
        if self.is_shared and self.stale:  # a shard may not know yet; a real engine then rejects requests
            raise GenerationError("the weights are unknown")
        assert not self.stale, "served after a failed pull"
        self._perhaps_cancel()
        if request_id.startswith("poison"):
            raise ArithmeticError("an unexpected error")
        completion = await super().generate(*args, request_id=request_id, **kwargs)
        first = len(args[0]) - 1  # the prompt is one token plus those of earlier attempts
        return replace(completion, token_ids=[first + token for token in completion.token_ids])

    async def pull(self, version: int) -> None:
        try:
            self._perhaps_cancel()
            await self.moves.wait()
            await super().pull(version)
        except BaseException:
            self.stale = True
            raise
        self.stale = False

    async def pause(self, mode: str) -> None:
        self._perhaps_cancel()
        await super().pause(mode)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._perhaps_cancel()
        await super().abort(request_ids)

    async def _step(self) -> None:
        await super()._step()
        await self.moves.wait()

    def _perhaps_cancel(self) -> None:
        if self.cancels_calls:
            raise asyncio.CancelledError


class Storm:
    """Plays moves against a router, then ends all faults and checks that everything is resolved and released."""

    def __init__(self, move_below: float | None, num_shards: int) -> None:
        Watched.is_shared = num_shards > 0
        self.replicas = [Watched(name) for name in "abc"]
        self.num_shards = num_shards
        limits = Limits(finish_s=15, abort_s=10, drain_s=15, pull_s=20, no_replica_s=200, paused_s=500, share_s=20)
        self.network = Network()
        options = {"stall_timeout_s": 60, "limits": limits, "move_below": move_below, "network": self.network}
        self.router = router_of(self.replicas, num_shards=num_shards, **options)
        self.asked: dict[str, asyncio.Task[Completion]] = {}
        self.cancelled: set[str] = set()
        self.controls: list[asyncio.Task[Any]] = []
        self.version = 0

    async def play(self, moves: list[Move]) -> None:
        for action, number, seconds in moves:
            self._move(action, number, self.replicas[number % len(self.replicas)])
            await asyncio.sleep(seconds)
        for replica in self.replicas:
            self._move("mend", 0, replica)
        answers = await asyncio.gather(*self.asked.values(), return_exceptions=True)
        controls = await asyncio.gather(*self.controls, return_exceptions=True)
        for request_id, answer in zip(self.asked, answers, strict=True):
            assert isinstance(answer, Completion | GenerationError) or (
                (isinstance(answer, RequestError) and request_id.startswith("poison"))
                or (isinstance(answer, asyncio.CancelledError) and request_id in self.cancelled)
            ), answer
            if isinstance(answer, Completion):
                assert list(answer.token_ids) == list(range(len(answer.token_ids)))
        for result in controls:
            assert not isinstance(result, BaseException) or isinstance(
                result, (RuntimeError, ValueError, StateDictError)
            ), result
        assert [answer.request_id for answer in answers if isinstance(answer, Completion)] == [
            request_id for request_id, answer in zip(self.asked, answers, strict=True) if isinstance(answer, Completion)
        ]
        await asyncio.sleep(45)  # shards report their load
        assert all((replica.load, replica.num_requests) == (0, 0) for replica in self.router.replicas)
        if self.router.paused is not None:
            await self.router.resume()
        await asyncio.sleep(200)  # every quarantine ends
        replicas = self.router.replicas
        assert all(replica.serving for replica in replicas)
        assert {replica.version for replica in replicas} <= {self.router.version}
        if replicas:
            await self.router.generate([1], request_id="last", sampling=SamplingParams(max_tokens=3))
        await self.router.close()

    def _move(self, action: str, number: int, replica: Watched) -> None:
        router = self.router
        if action in ("ask", "poison"):
            request_id = f"{'r' if action == 'ask' else action}{len(self.asked)}"
            sampling = SamplingParams(max_tokens=1 + number)
            session_id = f"g{number % 3}/0"
            answer = router.generate([1], request_id=request_id, session_id=session_id, sampling=sampling)
            self.asked[request_id] = asyncio.create_task(answer)
        elif action == "cancel" and self.asked:
            request_id = list(self.asked)[number % len(self.asked)]
            if self.asked[request_id].cancel():
                self.cancelled.add(request_id)
        elif action in ("hot_swap", "drain"):
            self.version += 1
            self._control(router.pull_state_dict(self.version, action))
        elif action in ("keep", "wait", "abort_pause"):
            self._control(router.pause(action.removesuffix("_pause")))  # pyright: ignore[reportArgumentType]
        elif action == "resume":
            self._control(router.resume())
        elif action == "abort":
            self._control(router.abort([f"r{number}", f"r{number + 1}"] if number % 2 else None))
        elif action == "break":
            replica.generate_error = GenerationError("broken")
        elif action == "pull_breaks":
            replica.pull_error = StateDictError("torn")
        elif action == "hang":
            replica.pause_hangs = replica.ignores_aborts = True
        elif action == "stand_still":
            replica.moves.clear()
        elif action == "cancel_calls":
            replica.cancels_calls = True
        elif action == "cut":
            self.network.cut(replica.name, None if number % 5 == 4 else f"shard{number % 5}")
        elif action == "refuse":
            self.network.refused.add((f"shard{number % 4}", replica.name))
        elif action == "mend":
            self.network.refused = {pair for pair in self.network.refused if pair[1] != replica.name}
            replica.moves.set()
            replica.cancels_calls = False
            replica.generate_error = replica.pull_error = None
            replica.pause_hangs = replica.ignores_aborts = False
        elif action == "remove" and any(other.name == replica.name for other in router.replicas):
            router.remove_replica(replica.name)
        elif action == "add":
            self.replicas.append(Watched(f"n{len(self.replicas)}"))
            self._control(router.add_replica(self.replicas[-1]))

    def _control(self, call: Coroutine[Any, Any, Any]) -> None:
        self.controls.append(asyncio.create_task(call))


@pytest.mark.parametrize("num_shards", [0, 4])
@given(moves=MOVES, move_below=st.sampled_from([None, 0.8]))
@settings(max_examples=examples(150), deadline=None)
def test_random_faults_resolve_every_request_and_release_its_load(
    moves: list[Move], move_below: float | None, num_shards: int
) -> None:
    async def play() -> None:
        await asyncio.wait_for(Storm(move_below, num_shards).play(moves), 50_000)

    in_virtual_time(play())
