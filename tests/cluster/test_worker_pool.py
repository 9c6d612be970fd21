"""Groups in other processes, as the controller sees them. No process is started."""

import asyncio
import copy
import logging
import threading
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from monarch.actor import ActorError

from titan_rl import Completion, EngineRequest, FinishReason, Rollout, RolloutGroup, SamplingParams, VersionSpan
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.rollout_workers import GroupHandler, WorkerPool, handler_of
from titan_rl.core.calls import stopwatch
from titan_rl.core.errors import ActorDiedError, RequestError
from titan_rl.rollout.copies import portable


class Worker:
    """Runs a group of one, whose message no process could send to another."""

    run_group = "run_group"

    name = "worker"
    excused = False

    def end(self, reason: str) -> None: ...

    async def call(self, endpoint: Any, key: str, sample: Any, group_id: str, *args: Any) -> RolloutGroup:
        sample["lock"] = threading.Lock()
        rollout = Rollout(f"{group_id}/0", group_id, 0, sample, messages=[{"role": "tool", "content": object}])
        await handler_of(key).finished(portable(rollout))
        return RolloutGroup(group_id, None, [portable(rollout)])


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
            task="sums",
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

    handler, sampling = GroupHandler("g", generate, None), SamplingParams(max_tokens=4)
    whole, own_s = await handler.generate(EngineRequest("g/0/0", [1], sampling, "g/0"), 10.0)
    assert (whole.finish_reason, own_s) == (FinishReason.STOP, pytest.approx(3.0))
    cut, own_s = await handler.generate(EngineRequest("g/0/1", [1], sampling, "g/0"), 2.0)
    assert (cut.finish_reason, own_s) == (FinishReason.ABORT, pytest.approx(2.0))


async def answer(prompt_token_ids: Any, *, request_id: str, **kwargs: Any) -> Completion:
    return Completion(request_id, [5], [-0.5], FinishReason.STOP, (VersionSpan(0, 1),))


class DyingWorker(Worker):
    """The first of two workers. What it had sent when it died arrives while its group runs in the second."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.dies = True

    async def call(self, endpoint: Any, key: str, sample: Any, group_id: str, *args: Any) -> RolloutGroup:
        self.keys.append(key)
        if self.dies:
            self.dies = False
            raise ActorDiedError("worker died")
        request = EngineRequest(f"{group_id}/0/0", [1], SamplingParams(max_tokens=1), f"{group_id}/0")
        with pytest.raises(RequestError, match="group 'g' was withdrawn from this worker"):
            await handler_of(self.keys[0]).generate(request, 10.0)
        await handler_of(key).generate(request, 10.0)
        return RolloutGroup(group_id, None, [Rollout(f"{group_id}/0", group_id, 0, None)])


async def test_what_a_dead_worker_had_asked_for_is_no_request_of_the_group_that_runs_again() -> None:
    pool, worker = WorkerPool(), DyingWorker()
    pool.add(worker, worker)  # pyright: ignore
    other: Any = copy.copy(worker)
    other.__dict__ = worker.__dict__  # one state, two processes
    pool.add(other, other)
    sampling = SamplingParams(max_tokens=1)
    group = await pool.of("sums").run_group(answer, {}, group_id="g", group_size=1, sampling=sampling)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0"]


async def test_a_worker_whose_calls_fail_as_those_of_a_dead_one_is_ended_so_that_another_takes_its_place() -> None:
    pool, ended = WorkerPool(), list[str]()

    class Replacing:
        def process_ended(self, remote: RemoteProcess) -> None:
            ended.append(f"{remote.name}: {remote.reason}")
            worker: Any = Worker()
            pool.add(worker, worker)

    class Deaf:
        class run_group:
            @staticmethod
            async def call_one(*args: Any) -> None:
                raise ActorError(ActorDiedError("controller died: connection reset"))

    pool.add(RemoteProcess("rollout-worker-0", Replacing()), Deaf)
    sampling = SamplingParams(max_tokens=1)
    group = await pool.of("sums").run_group(answer, {}, group_id="g", group_size=1, sampling=sampling)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0"]
    assert ended == ["rollout-worker-0: controller died: connection reset"]


async def test_a_closed_handler_takes_no_request_that_was_on_its_way() -> None:
    handler = GroupHandler("g", never, None)
    request = EngineRequest("g/0/0", [1], SamplingParams(max_tokens=1), "g/0")
    on_its_way = asyncio.ensure_future(handler.generate(request, 10.0))
    await handler.close()
    with pytest.raises(RequestError, match="was withdrawn"):
        await on_its_way
