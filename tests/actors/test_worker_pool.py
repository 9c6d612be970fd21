"""Groups in other processes, as the controller sees them. No process is started."""

import asyncio
import logging
import threading
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl import Completion, EngineRequest, FinishReason, Rollout, RolloutGroup, SamplingParams, VersionSpan
from titan_rl.actors.generate_service import GroupHandler
from titan_rl.actors.worker_pool import WorkerPool
from titan_rl.calls import stopwatch
from titan_rl.rollout.copies import portable


class Worker:
    """Runs a group of one, whose message no process could send to another."""

    run_group = "run_group"

    async def call(self, endpoint: Any, sample: Any, group_id: str, *args: Any) -> RolloutGroup:
        sample["lock"] = threading.Lock()
        rollout = Rollout(f"{group_id}/0", group_id, 0, sample, messages=[{"role": "tool", "content": object}])
        await handler_of(group_id).finished(portable(rollout))
        return RolloutGroup(group_id, None, [portable(rollout)])


def handler_of(group_id: str) -> Any:
    from titan_rl.actors import generate_service

    return generate_service._handler_of(group_id)


async def never(prompt_token_ids: Any, **kwargs: Any) -> Completion:
    raise AssertionError("nothing is generated")


async def test_groups_come_back_with_their_sample_and_as_plain_data(caplog: pytest.LogCaptureFixture) -> None:
    pool, worker = WorkerPool(), Worker()
    pool.add(worker, worker)  # pyright: ignore
    told: list[Any] = []

    def on_finished(rollout: Rollout) -> None:
        told.append(rollout.sample)
        raise RuntimeError("gone")

    sample: dict[str, Any] = {"level": 3}
    with caplog.at_level(logging.WARNING):
        group = await pool.run_group(
            never,
            sample,
            group_id="g",
            group_size=1,
            sampling=SamplingParams(max_tokens=1),
            on_finished=on_finished,
        )
    assert group.sample is sample
    assert group.rollouts[0].sample is sample
    assert told == [sample]
    assert group.rollouts[0].messages == [{"role": "tool", "content": repr(object)}]
    assert "on_finished failed: RuntimeError: gone" in caplog.text


@pytest.mark.looptime
async def test_a_workers_request_is_timed_where_it_is_known_whether_it_waits() -> None:
    async def generate(prompt_token_ids: Any, *, request_id: str, **kwargs: Any) -> Completion:
        with stopwatch.paused():
            await asyncio.sleep(100.0)
        await asyncio.sleep(3.0)
        return Completion(request_id, [5], [-0.5], FinishReason.STOP, (VersionSpan(0, 1),))

    handler, sampling = GroupHandler(generate, None), SamplingParams(max_tokens=4)
    whole, own_s = await handler.generate(EngineRequest("g/0/0", [1], sampling, "g/0"), 10.0)
    assert (whole.finish_reason, own_s) == (FinishReason.STOP, pytest.approx(3.0))
    cut, own_s = await handler.generate(EngineRequest("g/0/1", [1], sampling, "g/0"), 2.0)
    assert (cut.finish_reason, own_s) == (FinishReason.ABORT, pytest.approx(2.0))
