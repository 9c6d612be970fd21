"""Clock comparison between hosts over slow links with asymmetric delays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.cluster.hosts.preflight import LIMIT_S, NUM_ROUND_TRIPS, ClockDifference, Clocks, compare_clocks

S = 1_000_000_000
trips = st.lists(
    st.tuples(st.integers(0, 2 * S), st.integers(0, 2 * S)), min_size=NUM_ROUND_TRIPS, max_size=NUM_ROUND_TRIPS
)


class Link:
    """Link to a host whose clocks are ahead. Requests and answers take time in transit.

    Args:
        trips: Delays of each request and its answer, in nanoseconds.
    """

    def __init__(self, wall_ns: int, steady_ns: int, trips: list[tuple[int, int]]) -> None:
        self._ahead = wall_ns, steady_ns
        self._trips = iter(trips)
        self._passed = 0

    def now(self) -> Clocks:
        return Clocks(1_700_000_000 * S + self._passed, 1_000 * S + self._passed)

    async def ask(self) -> Clocks:
        there, back = next(self._trips)
        self._passed += there
        wall, steady = self._ahead
        answer = Clocks(self.now().wall_ns + wall, self.now().steady_ns + steady)
        self._passed += back
        return answer


@given(st.integers(-(10**13), 10**13), st.integers(-(10**15), 10**15), trips)
async def test_clock_difference_is_within_half_a_round_trip(
    wall_ns: int, steady_ns: int, trips: list[tuple[int, int]]
) -> None:
    link = Link(wall_ns, steady_ns, trips)
    found = await compare_clocks(link.ask, link.now)
    assert abs(found.wall_s - wall_ns / 1e9) <= found.within_s + 1e-5
    assert abs(found.steady_ns - steady_ns) <= round(found.within_s * 1e9) + 1
    assert found.within_s == pytest.approx(min(sum(trip) for trip in trips) / 2e9, abs=1e-8)


async def test_clock_difference_is_exact_over_a_symmetric_link() -> None:
    link = Link(-2 * S, 7 * S, [(S // 4, S // 4)] * NUM_ROUND_TRIPS)
    assert await compare_clocks(link.ask, link.now) == ClockDifference(-2.0, 7 * S, 0.25)


@pytest.mark.parametrize(
    ("wall_s", "within_s", "matters"),
    [(0.4, 0.0, False), (0.6, 0.0, True), (-0.6, 0.0, True), (0.6, 0.2, False), (-100.0, 2.0, True)],
)
def test_clock_difference_matters_only_if_certainly_above_the_limit(
    wall_s: float, within_s: float, matters: bool
) -> None:
    assert LIMIT_S == 0.5
    assert ClockDifference(wall_s, 0, within_s).matters is matters


def test_clock_difference_as_text() -> None:
    assert str(ClockDifference(-2.25, 0, 0.001)) == "2.25 s behind this machine's, give or take 0.001 s"
    assert str(ClockDifference(100.0, 0, 0.0015)) == "100 s ahead of this machine's, give or take 0.0015 s"
