"""Moves: requests continue with their tokens on a replica with fewer requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import PROMPT, Asked, SteppingReplica, ask_two_replicas, in_virtual_time, routed, undisturbed

from titan_rl.generation.router import GeneratorRouter
from titan_rl.types import FinishReason, SamplingParams


async def until_one_is_empty(router: GeneratorRouter) -> None:
    while not any(replica.num_requests == 0 for replica in router.replicas):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def test_idle_replica_takes_over_requests_with_their_tokens():
    async def scenario() -> None:
        full, empty = SteppingReplica("full"), SteppingReplica("empty")
        router = routed(full, empty, in_turn=True)
        asked = Asked(router)
        ask_two_replicas(asked)
        answers = await asked.all()
        for request_id, answer in answers.items():
            num_tokens = 60 if request_id == "long/0/0" else 40 if request_id.startswith("long") else 4
            asked.check(answer, num_tokens)
            assert len(answer.token_ids) == num_tokens
            assert answer.finish_reason is FinishReason.LENGTH
            assert list(answer.logprobs) == undisturbed(num_tokens)[1]
        moved = [request_id for request_id, answer in answers.items() if answer.metrics.get("num_resumes")]
        assert moved == ["long/3/0", "long/4/0"]  # the last to arrive
        assert router.num_moved == len(moved)
        assert empty.prefilled[5:] == [len(PROMPT) + 4] * 2
        assert all(replica.load == 0 for replica in router.replicas)
        await router.close()

    in_virtual_time(scenario)


def test_requests_do_not_move_unless_requested():
    async def scenario() -> None:
        full, empty = SteppingReplica("full"), SteppingReplica("empty")
        router = routed(full, empty, below=None, in_turn=True)
        asked = Asked(router)
        ask_two_replicas(asked)
        await asked.all()
        assert router.num_moved is None
        assert (len(full.served), len(empty.served)) == (5, 5)
        await router.close()

    in_virtual_time(scenario)


class SlowToAbort(SteppingReplica):
    """Replica that keeps sampling for some seconds after an abort."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked = asyncio.Event()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.asked.set()
        await asyncio.sleep(3.5)
        await super().abort(request_ids)


@pytest.mark.parametrize("first", [None, 0], ids=["as loaded", "pulled"])
def test_moving_request_never_returns_to_older_weights(first: int | None):
    async def scenario() -> None:
        full, joins = SlowToAbort("full"), SteppingReplica("joins")
        router = routed(full)
        if first is not None:
            await router.pull_state_dict(first)
        sampling = SamplingParams(max_tokens=20)
        asks = [router.generate(PROMPT, request_id=f"g/{place}/0", sampling=sampling) for place in range(4)]
        answers = [asyncio.ensure_future(ask) for ask in asks]
        await asyncio.sleep(1.5)
        await router.add_replica(joins)
        joins.pull_s = 30.0
        await full.asked.wait()
        pulling = asyncio.ensure_future(router.pull_state_dict(1))
        for answer in await asyncio.gather(*answers):
            assert len(answer.token_ids) == 20
            assert [span.version for span in answer.version_spans] == [0, 1]
        assert joins.served == []
        await pulling
        await router.close()

    in_virtual_time(scenario)


@pytest.mark.parametrize("given", [{"seed": 3}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}])
def test_request_whose_sampling_depends_on_its_own_tokens_does_not_move(given: dict[str, Any]):
    """Its prompt would include the tokens of the first replica, and the rest would be sampled otherwise."""

    async def scenario() -> None:
        full, joins = SteppingReplica("full"), SteppingReplica("joins")
        router = routed(full)
        sampling = SamplingParams(max_tokens=20, **given)
        asks = [router.generate(PROMPT, request_id=f"g/{place}/0", sampling=sampling) for place in range(4)]
        answers = [asyncio.ensure_future(ask) for ask in asks]
        await asyncio.sleep(1.5)
        await router.add_replica(joins)
        await asyncio.gather(*answers)
        assert joins.served == []
        await router.close()

    in_virtual_time(scenario)


def test_session_follows_its_moved_request():
    async def scenario() -> None:
        full, joins = SteppingReplica("full"), SteppingReplica("joins")
        router = routed(full)
        asked = Asked(router)
        for place in range(5):
            asked.ask(f"g/{place}/0", 20 if place else 60)
        await asyncio.sleep(1.5)
        await router.add_replica(joins)
        for place in (1, 2, 3, 4):
            await asked.answers[f"g/{place}/0"]
        assert sorted(joins.served) == ["g/3/0~1", "g/4/0~1"]
        for place in (1, 2, 3, 4):
            asked.ask(f"g/{place}/1", 2)
        await asked.all()
        assert sorted(joins.served[2:]) == ["g/3/1", "g/4/1"]
        await router.close()

    in_virtual_time(scenario)


def test_joining_replica_takes_its_share_of_requests():
    async def scenario() -> None:
        full, joins = SteppingReplica("full"), SteppingReplica("joins")
        router = routed(full)
        asked = Asked(router)
        for place in range(9):
            asked.ask(f"g/{place}/0", 30)
        await asyncio.sleep(10)
        await router.add_replica(joins)
        await asked.all()
        assert len(joins.served) == 4
        for request_id, task in asked.answers.items():
            assert len(task.result().token_ids) == 30
            asked.check(task.result(), 30)
            assert request_id == task.result().request_id
        await router.close()

    in_virtual_time(scenario)


def test_request_that_finishes_before_its_move_keeps_its_finish_reason():
    async def scenario() -> None:
        full, empty = SteppingReplica("full", hears_after_s=9.5), SteppingReplica("empty")
        router = routed(full, empty, in_turn=True)
        asked = Asked(router)
        ask_two_replicas(asked, long=1, short=4)
        answers = await asked.all()
        assert {answer.finish_reason for answer in answers.values()} == {FinishReason.LENGTH}
        await router.close()

    in_virtual_time(scenario)


def test_early_abort_of_a_moving_request_is_repeated():
    async def scenario() -> None:
        full, empty = SteppingReplica("full", hears_after_s=9.5), SteppingReplica("empty")
        router = routed(full, empty, in_turn=True)
        asked = Asked(router)
        ask_two_replicas(asked)
        await asked.all()
        assert router.num_moved == 2
        await router.close()

    in_virtual_time(scenario)


@pytest.mark.parametrize("lost", ["kill", "remove"])
def test_move_falls_back_to_any_replica_when_its_target_is_lost(lost: str):
    async def scenario() -> None:
        full, empty = SteppingReplica("full"), SteppingReplica("empty")
        router = routed(full, empty, in_turn=True)
        asked = Asked(router)
        ask_two_replicas(asked)
        await until_one_is_empty(router)
        await asyncio.sleep(1.0)  # two of its requests are being aborted
        if lost == "kill":
            empty.dead = True
        else:
            router.remove_replica("empty")
        num_served = len(empty.served)
        for answer in (await asked.all()).values():
            assert answer.finish_reason is FinishReason.LENGTH
            asked.check(answer, 60)
        assert lost == "kill" or len(empty.served) == num_served
        await router.close()

    in_virtual_time(scenario)


@pytest.mark.parametrize("below", [0, 1, -0.5, 2])
def test_invalid_move_below_is_rejected(below: float):
    async def scenario() -> None:
        with pytest.raises(ValueError, match=r"move_below is .*; it must be above 0 and less than 1, or None"):
            routed(SteppingReplica("a"), below=below)

    in_virtual_time(scenario)


ACTIONS = ["ask", "ask", "ask", "kill", "mend", "swap", "keep", "abort", "add", "remove"]
EVENTS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40), st.sampled_from([0.0, 0.4, 1.0, 3.0, 9.0])), max_size=40
)


@given(EVENTS)
@settings(max_examples=examples(60), deadline=None)
def test_moves_neither_lose_nor_repeat_tokens(events: list[tuple[str, int, float]]) -> None:
    async def scenario() -> None:
        replicas = [SteppingReplica(name) for name in "abc"]
        router = routed(*replicas, below=0.9)
        asked, budgets, version = Asked(router), dict[str, int](), 0
        for action, number, seconds in events:
            replica = replicas[number % len(replicas)]
            others = [one for one in replicas if one is not replica and router.has_replica(one.name)]
            is_needed = all(one.dead for one in others)
            if action == "ask":
                request_id = f"g/{len(budgets)}/0"
                budgets[request_id] = 1 + number
                asked.ask(request_id, budgets[request_id])
            elif action in ("kill", "mend"):
                replica.dead = action == "kill" and not is_needed
            elif action == "swap":
                version += 1
                await router.pull_state_dict(version)
            elif action in ("keep", "abort"):
                await router.pause(action)
                await asyncio.sleep(number / 4)
                await router.resume()
            elif action == "add":
                replicas.append(SteppingReplica(f"n{len(replicas)}"))
                await router.add_replica(replicas[-1])
            elif action == "remove" and not is_needed and len(others) > 1 and router.has_replica(replica.name):
                router.remove_replica(replica.name)
            await asyncio.sleep(seconds)
        for replica in replicas:
            replica.dead = False
        for request_id, answer in (await asked.all()).items():
            asked.check(answer, budgets[request_id])
            was_aborted = answer.finish_reason is FinishReason.ABORT
            assert was_aborted or len(answer.token_ids) == budgets[request_id]
            assert not was_aborted or any(action == "abort" for action, _, _ in events)
            versions = [span.version for span in answer.version_spans]
            assert versions == sorted(versions)
        assert all((one.load, one.num_requests) == (0, 0) for one in router.replicas)
        await router.close()

    in_virtual_time(scenario)


def test_abort_ends_a_request_that_waits_for_a_replica_at_once():
    async def scenario() -> None:
        replica = SteppingReplica("dead")
        replica.dead = True
        router = routed(replica)
        waiting = asyncio.ensure_future(router.generate(PROMPT, request_id="r", sampling=SamplingParams(max_tokens=4)))
        await asyncio.sleep(5)  # the replica has failed the request and is out of service
        began = asyncio.get_running_loop().time()
        await router.abort(["r"])
        completion = await waiting
        assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.ABORT, 0)
        assert asyncio.get_running_loop().time() - began < 1
        await router.close()

    in_virtual_time(scenario)
