"""Poison requests, which fail on every engine: they fail alone, and take at most one replica out of service, for a
moment. Virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import in_virtual_time

from benchmarks.simulated_replica import SimulatedReplica
from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.types import Completion, FinishReason, SamplingParams

NUM_TOKENS, STEP_S = 400, 0.05  # 20 s alone


class Touchy(SimulatedReplica):
    """Replica on which some requests raise unexpected errors."""

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            lambda request_id, context: 1 + NUM_TOKENS - context,
            CostModel(step=STEP_S),
            max_running=64,
            kv_tokens=1 << 40,
            stream_interval=16,
        )
        self.served: list[str] = []
        self.is_broken = self.never_answers = False
        self.failures_left = Counter[str]()  # number of failures to come, by request id

    async def stream(self, request, on_chunk=None) -> Completion:
        self.served.append(request.request_id)
        if request.request_id.startswith("poison"):
            await asyncio.sleep(float(request.request_id.split("/")[1].partition("~")[0]))
            raise RuntimeError("division by zero")
        name = request.request_id.partition("~")[0]
        if self.failures_left[name]:
            self.failures_left[name] -= 1
            raise RuntimeError("device hiccup")
        if self.is_broken:
            raise RuntimeError("device lost")
        if self.never_answers:
            while self.never_answers:  # noqa: ASYNC110
                await asyncio.sleep(1)
        return await super().stream(request, on_chunk)


class Stage:
    def __init__(self, num_replicas: int, max_attempts: int = 3) -> None:
        self.failed: list[str] = []
        self.replicas = [Touchy(name) for name in "abcd"[:num_replicas]]
        self.engines = [asyncio.ensure_future(replica.run()) for replica in self.replicas]
        self.router = GeneratorRouter(
            self.replicas,
            limits=Limits(no_replica_s=60),
            max_attempts=max_attempts,
            on_replica_failed=self.note,
        )
        self.most_out = 0

    def note(self, replica: object, error: Exception) -> None:
        self.failed.append(str(replica.name))  # pyright: ignore[reportAttributeAccessIssue]
        self.most_out = max(self.most_out, self.num_out)

    @property
    def num_out(self) -> int:
        return sum(not replica.serving for replica in self.router.replicas)

    def ask(self, request_id: str) -> asyncio.Task[Completion]:
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        return asyncio.create_task(self.router.generate([1], request_id=request_id, sampling=sampling))

    async def close(self) -> None:
        await self.router.close()
        for engine in self.engines:
            engine.cancel()


@pytest.mark.looptime
@pytest.mark.parametrize("fails_after_s", [0.0, 0.5, 30.0])
async def test_poison_request_fails_alone(fails_after_s: float) -> None:
    stage = Stage(3)
    await stage.router.pull_state_dict(1)
    before = [stage.ask(f"good {index}") for index in range(48)]
    await asyncio.sleep(1)
    began = asyncio.get_running_loop().time()
    poison = stage.ask(f"poison/{fails_after_s}")
    during = []
    while not poison.done():
        during.append(stage.ask(f"good {48 + len(during)}"))
        await asyncio.sleep(0.2)
    with pytest.raises(RequestError, match=r"failed 2 times in the same way.*division by zero"):
        await poison
    assert asyncio.get_running_loop().time() - began == pytest.approx(2 * fails_after_s + 2, abs=0.5)
    assert len(stage.failed) == 1
    await asyncio.sleep(0)
    assert stage.num_out == 0
    for completion in await asyncio.gather(*before, *during):
        assert (len(completion.token_ids), completion.finish_reason) == (NUM_TOKENS, FinishReason.LENGTH)
    assert not any("~" in name for r in stage.replicas for name in r.served if name.startswith("good"))
    await stage.close()


@pytest.mark.looptime
async def test_poison_request_fails_alone_on_a_single_replica() -> None:
    stage = Stage(1)
    good = [stage.ask(f"good {index}") for index in range(8)]
    with pytest.raises(RequestError, match="failed 3 times in the same way, on a, a, a"):
        await stage.ask("poison/0")
    assert stage.num_out == 0
    assert {len(completion.token_ids) for completion in await asyncio.gather(*good)} == {NUM_TOKENS}
    await stage.close()


@pytest.mark.looptime
@pytest.mark.parametrize("max_attempts", [3, 6])
async def test_failures_on_a_single_replica_are_not_blamed_on_the_request(max_attempts: int) -> None:
    """Failures on a single replica say nothing about the request, even if others are served well."""
    stage = Stage(1, max_attempts=max_attempts)
    good = [stage.ask(f"good {index}") for index in range(8)]
    await asyncio.sleep(1)
    stage.replicas[0].failures_left["flaky"] = max_attempts - 1
    completion = await stage.ask("flaky")
    assert len(completion.token_ids) == NUM_TOKENS
    assert stage.failed == ["a"] * (max_attempts - 1)
    assert {len(completion.token_ids) for completion in await asyncio.gather(*good)} == {NUM_TOKENS}
    await stage.close()


@pytest.mark.looptime
async def test_request_is_not_blamed_while_one_of_its_replicas_serves_nothing() -> None:
    """It failed in the same way on two replicas, of which only one works for others."""
    stage = Stage(3)
    for replica in stage.replicas[:2]:
        replica.failures_left["unlucky"] = 1
    stage.replicas[0].never_answers = True
    old = [stage.ask(f"old {index}") for index in range(6)]
    await asyncio.sleep(1)
    completion = await stage.ask("unlucky")
    assert len(completion.token_ids) == NUM_TOKENS
    stage.replicas[0].never_answers = False
    await asyncio.gather(*old)
    await stage.close()


@pytest.mark.looptime
async def test_replica_that_fails_every_new_request_is_blamed() -> None:
    """Although it continues to serve the old ones."""
    stage = Stage(2)
    old = [stage.ask(f"old {index}") for index in range(8)]
    await asyncio.sleep(1)
    stage.replicas[0].is_broken = True
    new = [stage.ask(f"new {index}") for index in range(40)]
    completions = await asyncio.gather(*old, *new)
    assert {len(completion.token_ids) for completion in completions} == {NUM_TOKENS}
    assert set(stage.failed) == {"a"}
    assert len(stage.replicas[0].served) < 4 + 30  # it is not tried again and again
    await stage.close()


POISONS = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from([0.0, 0.3, 2.5]), st.integers(1, 8)), min_size=1, max_size=6
)


@given(num_replicas=st.integers(1, 4), poisons=POISONS)
@settings(max_examples=examples(80), deadline=None)
def test_good_requests_are_served_once_despite_poison_requests(
    num_replicas: int, poisons: list[tuple[int, float, int]]
) -> None:
    """Poisons: seconds after the previous one, seconds until it fails, number of concurrent siblings."""

    async def scenario() -> None:
        stage = Stage(num_replicas)
        await stage.router.pull_state_dict(1)
        good, poisonous = list[asyncio.Task[Completion]](), list[asyncio.Task[Completion]]()

        async def keep_asking() -> None:
            while True:
                good.append(stage.ask(f"good {len(good)}"))
                await asyncio.sleep(1)

        asking = asyncio.ensure_future(keep_asking())
        await asyncio.sleep(5)
        for after_s, fails_after_s, siblings in poisons:
            await asyncio.sleep(after_s)
            for _ in range(siblings):
                poisonous.append(stage.ask(f"poison/{fails_after_s}/{len(poisonous)}"))
        for outcome in await asyncio.gather(*poisonous, return_exceptions=True):
            assert isinstance(outcome, RequestError | GenerationError), outcome
            assert "division by zero" in str(outcome)
        asking.cancel()
        answers = await asyncio.gather(*good)
        assert {len(completion.token_ids) for completion in answers} == {NUM_TOKENS}
        served = Counter(name.partition("~")[0] for replica in stage.replicas for name in replica.served)
        assert {count for name, count in served.items() if name.startswith("good")} == {1}
        assert max(count for name, count in served.items() if name.startswith("poison")) <= 3
        if all(siblings == 1 for _, _, siblings in poisons) and all(after_s > 8 for after_s, _, _ in poisons):
            assert stage.most_out <= 1
        await asyncio.sleep(60)
        assert stage.num_out == 0
        await stage.close()

    in_virtual_time(asyncio.wait_for(scenario(), 10_000))
