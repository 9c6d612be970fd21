"""Routing strategies, tested with stand-ins for replicas that have three attributes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.generation.router import (
    ConsistentHash,
    GeneratorRouter,
    GroupAffinity,
    LeastLoaded,
    RoundRobin,
    StickySession,
    Strategy,
)
from titan_rl.testing.fake_replica import FakeReplica


@dataclass(eq=False)
class Candidate:
    name: str
    load: int = 0
    serving: bool = False


def admitted(strategy: Strategy, *candidates: Candidate) -> None:
    for candidate in candidates:
        candidate.serving = True
        strategy.admit(candidate)


def withdraw(strategy: Strategy, candidate: Candidate) -> None:
    candidate.serving = False
    strategy.withdraw(candidate)


def take(strategy: Strategy, session_id: str | None = None, cost: int = 10) -> Candidate:
    chosen = strategy.choose(session_id, cost)
    assert isinstance(chosen, Candidate)
    assert chosen.serving
    chosen.load += cost
    return chosen


def give_back(strategy: Strategy, candidate: Candidate, cost: int = 10) -> None:
    candidate.load -= cost
    strategy.released(candidate)


@pytest.fixture
def three() -> list[Candidate]:
    return [Candidate("a"), Candidate("b"), Candidate("c")]


def test_least_loaded_counts_tokens_not_calls(three: list[Candidate]) -> None:
    strategy = LeastLoaded()
    admitted(strategy, *three)
    heavy = take(strategy, cost=1000)
    for _ in range(20):
        assert take(strategy, cost=10) is not heavy


def test_least_loaded_breaks_ties_by_least_recently_chosen(three: list[Candidate]) -> None:
    strategy = LeastLoaded()
    admitted(strategy, *three)
    order: list[str] = []
    for _ in range(6):
        chosen = take(strategy)
        give_back(strategy, chosen)
        order.append(chosen.name)
    assert order == ["a", "b", "c", "a", "b", "c"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 50)),
            st.tuples(st.just("give"), st.integers(0, 200)),
            st.tuples(st.just("direct"), st.integers(0, 5)),
            st.tuples(st.just("toggle"), st.integers(0, 5)),
        ),
        max_size=200,
    )
)
def test_least_loaded_agrees_with_a_linear_scan(moves: list[tuple[str, int]]) -> None:
    strategy = LeastLoaded()
    candidates = [Candidate(str(index)) for index in range(6)]
    admitted(strategy, *candidates)
    held: list[tuple[Candidate, int]] = []
    for move, number in moves:
        serving = [candidate for candidate in candidates if candidate.serving]
        if move == "take" and serving:
            least = min(candidate.load for candidate in serving)
            chosen = take(strategy, cost=number)
            assert chosen.load - number == least
            held.append((chosen, number))
        elif move == "give" and held:
            candidate, cost = held.pop(number % len(held))
            give_back(strategy, candidate, cost)
        elif move == "direct":  # another strategy, such as a sticky one, sent a request there
            candidates[number].load += 7
            held.append((candidates[number], 7))
        elif move == "toggle":
            if candidates[number].serving:
                withdraw(strategy, candidates[number])
            else:
                admitted(strategy, candidates[number])


def test_round_robin_skips_replicas_out_of_service(three: list[Candidate]) -> None:
    strategy = RoundRobin()
    admitted(strategy, *three)
    assert [take(strategy).name for _ in range(4)] == ["a", "b", "c", "a"]
    withdraw(strategy, three[2])
    assert Counter(take(strategy).name for _ in range(10)) == {"a": 5, "b": 5}


def test_sticky_session_moves_once_when_its_replica_leaves(three: list[Candidate]) -> None:
    strategy = StickySession()
    admitted(strategy, *three)
    home = take(strategy, "s")
    assert all(take(strategy, "s") is home for _ in range(10))
    withdraw(strategy, home)
    second = take(strategy, "s")
    admitted(strategy, home)
    assert take(strategy, "s") is second is not home


def test_finished_or_evicted_session_is_placed_again(three: list[Candidate]) -> None:
    strategy = StickySession(fallback=RoundRobin(), max_sessions=2)
    admitted(strategy, *three)
    assert [take(strategy, session).name for session in ("s", "t", "s")] == ["a", "b", "a"]
    take(strategy, "u")  # forgets t, the least recently used
    assert take(strategy, "s").name == "a"
    assert take(strategy, "t").name == "a"  # forgets u
    strategy.finish_session("t")
    strategy.finish_session("unknown")
    assert take(strategy, "t").name == "b"


def test_consistent_hash_moves_only_sessions_of_a_withdrawn_replica(three: list[Candidate]) -> None:
    strategy = ConsistentHash()
    admitted(strategy, *three)
    sessions = [f"g{index}/0" for index in range(300)]
    before = {session: take(strategy, session) for session in sessions}
    assert min(Counter(candidate.name for candidate in before.values()).values()) > 50
    withdraw(strategy, three[0])
    for session in sessions:
        assert (take(strategy, session) is before[session]) == (before[session] is not three[0])
    admitted(strategy, three[0])
    assert {session: take(strategy, session) for session in sessions} == before
    assert {take(strategy, None).name for _ in range(20)}


def test_group_keeps_its_replica_until_its_last_session_ends(three: list[Candidate]):
    strategy = GroupAffinity(RoundRobin())
    admitted(strategy, *three)
    first = take(strategy, "g/0")
    assert take(strategy, "g/1") is first
    strategy.finish_session("g/0")
    assert take(strategy, "g/2") is first
    strategy.finish_session("g/1")
    strategy.finish_session("g/2")
    assert take(strategy, "g/3") is not first


def test_siblings_share_the_replica_of_their_first_turn(three: list[Candidate]) -> None:
    strategy = StickySession(fallback=GroupAffinity(RoundRobin()))
    admitted(strategy, *three)
    first = {take(strategy, f"g0/{sibling}").name for sibling in range(4)}
    other = {take(strategy, f"g1/{sibling}").name for sibling in range(4)}
    assert (first, other) == ({"a"}, {"b"})
    for sibling in range(4):
        strategy.finish_session(f"g0/{sibling}")
    assert take(strategy, "g0/0").name == "c"


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: StickySession(max_sessions=0), "max_sessions"),
        (lambda: ConsistentHash(points=0), "points"),
        (lambda: GroupAffinity(max_groups=0), "max_groups"),
    ],
)
def test_invalid_setting_is_named(build: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        build()


@pytest.mark.parametrize(
    "make", [RoundRobin, LeastLoaded, StickySession, ConsistentHash, lambda: StickySession(GroupAffinity())]
)
async def test_strategy_shared_by_two_routers_is_rejected(make: Callable[[], Strategy]) -> None:
    strategy = make()
    GeneratorRouter([FakeReplica("a")], strategy)
    with pytest.raises(ValueError, match=f"{type(strategy).__name__} is the strategy of another router"):
        GeneratorRouter([FakeReplica("b")], strategy)


async def test_fallback_shared_by_two_strategies_is_rejected() -> None:
    fallback = LeastLoaded()
    GeneratorRouter([FakeReplica("a")], StickySession(fallback))
    with pytest.raises(ValueError, match="LeastLoaded is the strategy of another router"):
        GeneratorRouter([FakeReplica("b")], ConsistentHash(fallback=fallback))


async def test_custom_strategy_without_super_init_belongs_to_one_router() -> None:
    class First(RoundRobin):
        def __init__(self) -> None:
            self._turns = deque()

    strategy = First()
    GeneratorRouter([FakeReplica("a")], strategy)
    with pytest.raises(ValueError, match="another router"):
        GeneratorRouter([FakeReplica("b")], strategy)
