"""Gauges of engines, from their steps to the status of replicas in the router."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from titan_rl import EngineLoop, GeneratorRouter, LocalReplica, SamplingParams
from titan_rl.core.errors import EngineDeadError
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.generation.types import GaugeSummary


async def answer(loop: EngineLoop, prompts: list[list[int]]) -> None:
    """Answer all prompts concurrently, with four tokens each."""
    await loop.pause("keep")
    sampling = SamplingParams(max_tokens=4)
    asked = [
        asyncio.create_task(loop.generate(prompt, request_id=str(index), sampling=sampling))
        for index, prompt in enumerate(prompts)
    ]
    await asyncio.sleep(0)
    await loop.resume()
    await asyncio.gather(*asked)


def without_times(gauges: GaugeSummary | None) -> GaugeSummary:
    assert gauges is not None
    assert gauges.totals["busy_s"] > 0
    counts = {name: value for name, value in gauges.totals.items() if not name.endswith("_s")}
    return GaugeSummary(gauges.num_steps, gauges.sums, gauges.maxima, counts)


async def test_gauges_are_summarized_between_pulls() -> None:
    replica = LocalReplica("a", EngineLoop(lambda: ScriptedEngine(max_running=2)), lambda version: [])
    await replica.loop.start()
    router = GeneratorRouter([replica])
    assert router.replicas[0].gauges is None
    prompt = list(range(20))  # the prefix cache holds its first 16 tokens after the first request
    await answer(replica.loop, [prompt, prompt, [7]])
    await router.pull_state_dict(1)
    gauges = without_times(router.replicas[0].gauges)
    # First two requests run and one waits, then that one runs alone.
    assert gauges == GaugeSummary(
        8,
        {"running_requests": 2 * 3 + 1 * 3, "waiting_requests": 4},
        {"running_requests": 2, "waiting_requests": 1},
        {"prefix_cache_queries": 41, "prefix_cache_hits": 16},
    )
    assert GaugeSummary.metrics([gauges]) == {
        "running_requests_mean": 9 / 8,
        "running_requests_max": 2,
        "waiting_requests_mean": 0.5,
        "waiting_requests_max": 1,
        "prefix_cache_queries": 41,
        "prefix_cache_hits": 16,
        "prefix_cache_hit_share": 16 / 41,
    }
    await answer(replica.loop, [[7]])
    await router.pull_state_dict(2)
    later = without_times(router.replicas[0].gauges)
    assert (later.num_steps, later.totals) == (4, {"prefix_cache_queries": 1, "prefix_cache_hits": 0})
    await router.close()


def test_gauge_means_are_weighted_by_engine_steps() -> None:
    busy = GaugeSummary(3, {"running": 12.0, "usage": 1.5}, {"running": 6.0, "usage": 0.9}, {"preemptions": 2.0})
    slow = GaugeSummary(1, {"running": 4.0}, {"running": 4.0}, {"preemptions": 1.0})
    idle = GaugeSummary(0, {}, {}, {"preemptions": 0.0})
    assert GaugeSummary.metrics([busy, idle, slow]) == {
        "running_mean": 4.0,
        "running_max": 6.0,
        "usage_mean": 0.5,
        "usage_max": 0.9,
        "preemptions": 3.0,
    }


def test_shares_are_computed_over_all_engines_and_omitted_without_counts() -> None:
    guessing = GaugeSummary(3, {}, {}, {"drafts": 10.0, "draft_tokens": 30.0, "accepted_tokens": 12.0})
    unlucky = GaugeSummary(1, {}, {}, {"drafts": 2.0, "draft_tokens": 6.0, "accepted_tokens": 0.0})
    metrics = GaugeSummary.metrics([guessing, unlucky])
    assert (metrics["accepted_share"], metrics["accepted_per_draft"]) == (12 / 36, 1.0)
    silent = GaugeSummary.metrics([GaugeSummary(1, {}, {}, {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0})])
    assert not {"accepted_share", "accepted_per_draft", "prefix_cache_hit_share"} & silent.keys()


async def test_engine_without_gauges_reports_nothing() -> None:
    class Silent(ScriptedEngine):
        gauges = None  # pyright: ignore

    replica = LocalReplica("a", EngineLoop(Silent), lambda version: [])
    await replica.loop.start()
    await answer(replica.loop, [[1]])
    await replica.pull(1)
    assert GaugeSummary.metrics([without_times(replica.gauges)]) == {}
    await replica.close()


async def test_totals_exclude_counts_from_before_the_engine_loop() -> None:
    class Server(ScriptedEngine):
        """Engine that has served requests before the loop starts."""

        def gauges(self) -> Mapping[str, float]:
            return {"answers_total": 1000 + self.num_steps}

    replica = LocalReplica("a", EngineLoop(Server), lambda version: [])
    await replica.loop.start()
    await answer(replica.loop, [[1]])
    await replica.pull(1)
    assert without_times(replica.gauges).totals == {"answers": 4.0}
    await replica.close()


async def test_non_numeric_gauge_ends_the_engine_with_the_reason() -> None:
    class Broken(ScriptedEngine):
        def gauges(self) -> Mapping[str, float]:
            return {"load": "high"} if self.num_steps else {}  # pyright: ignore

    loop = EngineLoop(Broken)
    await loop.start()
    with pytest.raises(EngineDeadError, match="could not convert string to float: 'high'"):
        await answer(loop, [[1]])
    await loop.close()
