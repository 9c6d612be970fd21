"""Moves of requests while replicas fail, pull and pause."""

from __future__ import annotations

import asyncio

from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import Asked, SteppingReplica, ask_two_replicas, in_virtual_time, routed

from titan_rl.generation.router import GeneratorRouter
from titan_rl.types import FinishReason


def requests_of(router: GeneratorRouter) -> list[int]:
    return [replica.num_requests for replica in router.replicas]


def test_move_to_a_failing_replica_uses_no_attempt_and_is_not_repeated():
    async def scenario() -> None:
        full, fails, fails_too = (SteppingReplica(name) for name in ("full", "fails", "fails too"))
        fails.fails_after = fails_too.fails_after = 2
        router = routed(full, max_attempts=1)
        asked = Asked(router)
        for place in range(9):
            asked.ask(f"g/{place}/0", 60)
        await asyncio.sleep(2.5)
        await router.add_replica(fails)
        await router.add_replica(fails_too)
        for answer in (await asked.all()).values():
            assert answer.finish_reason is FinishReason.LENGTH
            asked.check(answer, 60)
        assert [len(replica.served) for replica in (fails, fails_too)] == [3, 3]
        await router.close()

    in_virtual_time(scenario)


def test_failed_replica_receives_moves_again_after_answering_a_request():
    async def scenario() -> None:
        full, fails = SteppingReplica("full"), SteppingReplica("fails")
        fails.fails_after = 2
        router = routed(full)
        asked = Asked(router)
        for place in range(8):
            asked.ask(f"g/{place}/0", 200)
        await asyncio.sleep(2.5)
        await router.add_replica(fails)
        await asyncio.sleep(10)
        fails.fails_after = None
        await asyncio.sleep(60)
        failed = {request_id.partition("~")[0] for request_id in fails.served}
        assert requests_of(router) == [8, 0]
        asked.ask("placed/0/0", 2)
        await asyncio.sleep(10)
        assert requests_of(router) == [4, 4]
        assert not failed & {request_id.partition("~")[0] for request_id in fails.served[len(failed) :]}
        await asked.all()
        await router.close()

    in_virtual_time(scenario)


def test_drain_waits_for_moving_requests():
    async def scenario() -> None:
        full, empty = SteppingReplica("full", hears_after_s=9.5), SteppingReplica("empty")
        router = routed(full, empty, in_turn=True)
        asked = Asked(router)
        ask_two_replicas(asked)
        await asyncio.sleep(7)  # the abort of two of its requests has been sent, but has not arrived
        await router.pull_state_dict(1, "drain")
        for answer in (await asked.all()).values():
            assert len(answer.version_spans) == 1
        assert router.num_moved == 2
        await router.close()

    in_virtual_time(scenario)


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "ask", "drain", "add"]), st.integers(0, 40), st.integers(0, 6))),
    st.sampled_from([0.0, 3.0]),
)
@settings(max_examples=examples(30), deadline=None)
def test_completions_have_one_version_when_pulls_drain(events: list[tuple[str, int, int]], hears_after_s: float):
    async def scenario() -> None:
        router = routed(*(SteppingReplica(name, hears_after_s=hears_after_s) for name in "abc"), below=0.9)
        asked, pulls = Asked(router), list[asyncio.Task[object]]()
        for place, (action, number, seconds) in enumerate(events):
            if action == "ask":
                asked.ask(f"g/{place}/0", 1 + number)
            elif action == "drain":
                pulls.append(asyncio.create_task(router.pull_state_dict(place, "drain")))
            else:
                await router.add_replica(SteppingReplica(f"n{place}"))
            await asyncio.sleep(seconds)
        for answer in (await asked.all()).values():
            assert len(answer.version_spans) == 1
        await asyncio.gather(*pulls)
        assert all((one.load, one.num_requests) == (0, 0) for one in router.replicas)
        await router.close()

    in_virtual_time(scenario)


def test_request_does_not_move_to_older_weights():
    async def scenario() -> None:
        full, pulls_slowly = SteppingReplica("full", hears_after_s=9.5), SteppingReplica("slow")
        pulls_slowly.pull_s = 50
        router = routed(full, pulls_slowly, in_turn=True)
        asked = Asked(router)
        ask_two_replicas(asked)
        await asyncio.sleep(7)
        await router.pull_state_dict(1)
        for answer in (await asked.all()).values():
            versions = [span.version for span in answer.version_spans]
            assert versions == sorted(versions)
            assert len(answer.token_ids) in (4, 40, 60)
        await router.close()

    in_virtual_time(scenario)


def test_requests_do_not_move_to_a_replica_that_already_has_newer_weights():
    async def scenario() -> None:
        full, pulled = SteppingReplica("full"), SteppingReplica("pulled")
        full.pull_s = 12
        router = routed(full, pulled, in_turn=True)
        asked = Asked(router)
        ask_two_replicas(asked)
        pulling = asyncio.ensure_future(router.pull_state_dict(1))
        await asyncio.sleep(10)  # `pulled` has answered its requests and has version 1; `full` serves version 0
        assert router.num_moved == 0
        await pulling
        await asked.all()
        assert router.num_moved == 2
        await router.close()

    in_virtual_time(scenario)


def test_moving_requests_finish_during_a_wait_pause():
    async def scenario() -> None:
        full, joins = SteppingReplica("full", hears_after_s=9.5), SteppingReplica("joins")
        router = routed(full)
        asked = Asked(router)
        for place in range(6):
            asked.ask(f"g/{place}/0", 40)
        await asyncio.sleep(2.5)
        await router.add_replica(joins)
        await asyncio.sleep(1.5)  # aborts have been sent, but have not arrived
        report = await router.pause("wait")
        assert report.aborted == ()
        assert all(answer.done() for answer in asked.answers.values())
        assert len(joins.served) == router.num_moved == 3
        await router.close()

    in_virtual_time(scenario)


def test_replica_that_joins_during_a_pause_takes_its_share_on_resume():
    async def scenario() -> None:
        full, joins = SteppingReplica("full"), SteppingReplica("joins")
        router = routed(full)
        asked = Asked(router)
        for place in range(6):
            asked.ask(f"g/{place}/0", 40)
        await asyncio.sleep(2.5)
        await router.pause("keep")
        await router.add_replica(joins)
        await asyncio.sleep(5)
        assert requests_of(router) == [6, 0]
        await router.resume()
        await asyncio.sleep(3)
        assert requests_of(router) == [3, 3]
        await asked.all()
        await router.close()

    in_virtual_time(scenario)


def test_moved_request_moves_again_after_its_tokens_doubled():
    async def scenario() -> None:
        replicas = [SteppingReplica(name) for name in "abc"]
        router = routed(replicas[0])
        asked = Asked(router)
        for place in range(8):
            asked.ask(f"g/{place}/0", 100)
        await asyncio.sleep(10)
        await router.add_replica(replicas[1])
        await asyncio.sleep(3)
        for place in range(4):
            asked.answers[f"g/{place}/0"].cancel()  # all requests that have never moved
        await asyncio.sleep(2)
        assert requests_of(router) == [0, 4]
        await asyncio.sleep(10)
        assert requests_of(router) == [2, 2]
        await asyncio.gather(*asked.answers.values(), return_exceptions=True)
        await router.close()

    in_virtual_time(scenario)


def test_requests_do_not_move_only_to_swap_two_replicas():
    """The fullest replica has only requests that must stay, and the next one a single request more than the target."""

    async def scenario() -> None:
        replicas = [SteppingReplica(name) for name in ("seeded", "two", "one")]
        router = routed(*replicas, below=0.9, in_turn=True)
        asked = Asked(router)
        for request_id, seed in [("a", 1), ("b", None), ("c", None), ("d", 2), ("e", None)]:
            asked.ask(f"{request_id}/0", 40, seed=seed)
        asked.ask("short/0", 4)  # for the last replica, which then has room
        for request_id, seed in [("f", 3), ("g", None)]:
            asked.ask(f"{request_id}/0", 4 if seed is None else 40, seed=seed)
        await asyncio.sleep(12)
        assert requests_of(router) == [3, 2, 1]
        assert router.num_moved == 0
        await asked.all()
        await router.close()

    in_virtual_time(scenario)


def test_requests_move_from_the_fullest_replica_with_movable_ones():
    async def scenario() -> None:
        seeded, full, joins = (SteppingReplica(name) for name in ("seeded", "full", "joins"))
        router = routed(seeded, full, in_turn=True)
        asked = Asked(router)
        for place in range(8):
            asked.ask(f"seeded/{place}/0", 40, seed=place)
            asked.ask(f"full/{place}/0", 40)
        await asyncio.sleep(2.5)
        await router.add_replica(joins)
        await asyncio.sleep(3)
        assert requests_of(router) == [8, 4, 4]
        await asked.all()
        await router.close()

    in_virtual_time(scenario)
