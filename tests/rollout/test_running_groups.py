"""Running groups: the parts of a run for which they wait, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from titan_rl.rollout.group.running_groups import RunningGroups, join_waits


@pytest.mark.looptime
async def test_waits_name_the_part_the_groups_and_the_longest_wait() -> None:
    groups = RunningGroups(lambda session_id: None)
    with groups.one(2) as acting, groups.one(1) as judged, groups.one(1) as taught, groups.one(1) as generating:
        await asyncio.sleep(10)
        for group in (judged, taught):
            group.ended("g/0")
        taught.scored_by("the teacher big")
        with generating.request(None):
            await asyncio.sleep(5)
            assert groups.waits() == {
                "environments or agents": (1, 15.0),
                "rewards": (1, 5.0),
                "the teacher big": (1, 5.0),
            }
            with acting.request("s"):
                await asyncio.sleep(1)
                assert "environments or agents" not in groups.waits()
            await asyncio.sleep(2)
            assert groups.waits()["environments or agents"] == (1, 2.0)
        assert groups.waits()["environments or agents"] == (2, 2.0)
    assert groups.waits() == {}


def test_joined_waits_have_the_sum_of_the_groups_and_the_longest_wait() -> None:
    joined = join_waits([{"rewards": (1, 5.0)}, {"rewards": (2, 3.0), "the teacher big": (1, 1.0)}])
    assert joined == {"rewards": (3, 5.0), "the teacher big": (1, 1.0)}
