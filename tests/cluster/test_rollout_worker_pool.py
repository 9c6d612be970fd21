"""Groups that run in rollout workers, as the controller sees them. No process is started."""

import asyncio
import logging
import threading
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from group_requests import Journal, requests
from monarch.actor import ActorError

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, SamplingParams, VersionSpan
from titan_rl.cluster import rollout_worker_pool
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.rollout_worker import ROOM_S, GroupOrder
from titan_rl.cluster.rollout_worker_pool import WorkerLink, WorkerPool
from titan_rl.core.errors import ActorDiedError
from titan_rl.generation.recording import RecordedAnswer
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.checked_copies import portable
from titan_rl.scheduling.lease import Suspension

SAMPLING = SamplingParams(max_tokens=1)


class Endpoint:
    def __init__(self, name: str, sent: list[Any]) -> None:
        self.name = name
        self._sent = sent

    def broadcast(self, *args: Any) -> None:
        self._sent.append((self.name, *args))


class Worker:
    """Process and actor of a worker that runs groups of one rollout."""

    name = "worker"
    excused = False
    reason: str | None = None

    def __init__(self) -> None:
        self.sent: list[Any] = []  # calls and messages
        self.orders: list[GroupOrder] = []

    def __getattr__(self, name: str) -> Endpoint:
        return Endpoint(name, self.sent)

    def end(self, reason: str) -> None: ...

    async def call(self, endpoint: Endpoint, *args: Any, timeout_s: float | None = None) -> Any:
        if endpoint.name == "run_group":
            self.orders.append(args[0])
            return await self.run(args[0])
        self.sent.append((endpoint.name, *args))
        return None

    async def run(self, order: GroupOrder) -> RolloutGroup:
        rollout = Rollout(f"{order.group_id}/0", order.group_id, 0, order.sample)
        return RolloutGroup(order.group_id, None, [rollout])


def pool_of(*workers: Any) -> WorkerPool:
    pool = WorkerPool()
    for worker in workers:
        pool.add(worker, worker)
    return pool


async def play(pool: WorkerPool, generate: Any = None, sample: Any = None, **options: Any) -> RolloutGroup:
    play = pool.of("sums").run_group
    return await play(generate or requests(), sample, group_id="g", group_size=1, sampling=SAMPLING, **options)


class RecordingWorker(Worker):
    """Records its rollout, whose sample and messages cannot be pickled, before it returns."""

    async def run(self, order: GroupOrder) -> RolloutGroup:
        order.sample["lock"] = threading.Lock()
        rollout = Rollout("g/0", "g", 0, order.sample, messages=[{"role": "tool", "content": object}])
        rollout_worker_pool.record([], [(order.key, portable(rollout))])
        return RolloutGroup("g", None, [portable(rollout)])


async def test_groups_return_their_own_sample_and_plain_data(caplog: pytest.LogCaptureFixture) -> None:
    samples: list[Any] = []

    def on_finished(rollout: Rollout) -> None:
        samples.append(rollout.sample)
        raise RuntimeError("gone")

    sample: dict[str, Any] = {"level": 3}
    with caplog.at_level(logging.WARNING):
        group = await play(pool_of(RecordingWorker()), sample=sample, on_finished=on_finished)
    assert group.sample is sample
    assert group.rollouts[0].sample is sample
    assert samples == [sample]
    assert group.rollouts[0].messages == [{"role": "tool", "content": repr(object)}]
    assert "on_finished failed: RuntimeError: gone" in caplog.text


def answer(turn: int, tokens: int = 1, reason: FinishReason = FinishReason.STOP) -> RecordedAnswer:
    spans = (VersionSpan(0, tokens),)
    completion = Completion(f"g/0/{turn}", [5] * tokens, [-0.5] * tokens, reason, spans)
    return RecordedAnswer(0, b"prompt", SAMPLING, completion)


class DyingWorkers(Worker):
    """Two workers with shared state. The first dies after an answer; a late answer of it arrives while the group runs
    in the second."""

    async def run(self, order: GroupOrder) -> RolloutGroup:
        first = self.orders[0].key
        if len(self.orders) == 1:
            rollout_worker_pool.record([(first, answer(0))], [])
            raise ActorDiedError("worker died")
        late = Rollout("g/0", "g", 0, None, error="late")
        rollout_worker_pool.record([(first, answer(1)), (order.key, answer(2))], [(first, late)])
        return await super().run(order)


async def test_group_of_a_dead_worker_is_replayed_with_recorded_answers() -> None:
    journal, finished, workers = Journal(), list[Rollout](), DyingWorkers()
    pool = pool_of(workers)
    playing = asyncio.ensure_future(play(pool, requests(journal), on_finished=finished.append))
    await asyncio.sleep(0)
    pool.add(workers, workers)  # pyright: ignore
    assert [rollout.rollout_id for rollout in (await playing).rollouts] == ["g/0"]
    assert [answer.completion.request_id for answer in workers.orders[1].known] == ["g/0/0"]
    assert [answer.completion.request_id for answer in journal.answers] == ["g/0/0", "g/0/2"]
    assert [rollout.error for rollout in finished] == [None]


async def test_group_survives_workers_that_die_together() -> None:
    class KilledTogether(Worker):
        async def call(self, endpoint: Endpoint, *args: Any, timeout_s: float | None = None) -> Any:
            for worker in together:
                worker.reason = "killed"  # the controller knows of all deaths before it runs a group again
            raise ActorDiedError("worker died: killed")

    together = [KilledTogether() for _ in range(5)]
    pool = pool_of(*together)
    playing = asyncio.ensure_future(play(pool))
    await asyncio.sleep(0)
    another: Any = Worker()
    pool.add(another, another)
    assert [rollout.rollout_id for rollout in (await playing).rollouts] == ["g/0"]


async def test_unreachable_worker_is_ended_and_replaced() -> None:
    pool, ended = WorkerPool(), list[str]()

    class Replacing:
        def process_ended(self, remote: RemoteProcess) -> None:
            ended.append(f"{remote.name}: {remote.reason}")
            worker: Any = Worker()
            pool.add(worker, worker)

    class Unreachable:
        class run_group:
            @staticmethod
            async def call_one(*args: Any) -> None:
                raise ActorError(ActorDiedError("controller died: connection reset"))

    pool.add(RemoteProcess("rollout-worker-0", Replacing()), Unreachable)
    group = await play(pool)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0"]
    assert ended == ["rollout-worker-0: controller died: connection reset"]


class SlowWorker(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def run(self, order: GroupOrder) -> RolloutGroup:
        await self.may_end.wait()
        return await super().run(order)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_each_suspend_and_resume_reaches_the_worker() -> None:
    worker, suspension = SlowWorker(), Suspension()
    playing = asyncio.ensure_future(play(pool_of(worker), requests(Journal(), suspension)))
    await settle()
    key = worker.orders[0].key
    for _ in range(2):
        suspension.suspend()
        await suspension.abort_in_flight()
        suspension.resume()
        await settle()
    assert worker.sent == [("suspend", key), ("resume", key)] * 2
    worker.may_end.set()
    await playing
    await suspension.abort_in_flight()
    assert len(worker.sent) == 4, "the group has ended"


async def test_group_suspended_again_at_once_stays_suspended() -> None:
    worker, suspension = SlowWorker(), Suspension()
    playing = asyncio.ensure_future(play(pool_of(worker), requests(Journal(), suspension)))
    await settle()
    suspension.suspend()
    await suspension.abort_in_flight()
    await settle()
    suspension.resume()
    suspension.suspend()
    await suspension.abort_in_flight()
    await settle()
    assert [name for name, *_ in worker.sent] == ["suspend", "suspend"]
    suspension.resume()
    await settle()
    assert worker.sent[-1] == ("resume", worker.orders[0].key)
    worker.may_end.set()
    await playing


async def test_suspended_group_is_sent_to_no_worker() -> None:
    worker, suspension = Worker(), Suspension()
    suspension.suspend()
    playing = asyncio.ensure_future(play(pool_of(worker), requests(Journal(), suspension)))
    await settle()
    assert worker.orders == []
    suspension.resume()
    await playing
    assert len(worker.orders) == 1


async def test_worker_that_joins_during_a_judging_pause_is_paused_too() -> None:
    first, late, later = Worker(), Worker(), Worker()
    pool: Any = pool_of(first)
    pool.pause_judging("sums")
    pool.add(late, late)
    pool.resume_judging("sums")
    pool.add(later, later)
    assert first.sent == late.sent == [("pause_judging", "sums"), ("resume_judging", "sums")]
    assert later.sent == []


async def test_judging_pauses_reach_a_retiring_worker() -> None:
    retiring, other = SlowWorker(), Worker()
    pool: Any = pool_of(retiring)
    playing = asyncio.ensure_future(play(pool))
    await settle()
    leaving = asyncio.ensure_future(pool.retire(retiring, 60))
    await settle()
    pool.add(other, other)
    pool.pause_judging("sums")
    pool.resume_judging("sums")
    assert retiring.sent == other.sent == [("pause_judging", "sums"), ("resume_judging", "sums")]
    await play(pool)
    assert (len(retiring.orders), len(other.orders)) == (1, 1), "it gets no further groups"
    retiring.may_end.set()
    await asyncio.gather(playing, leaving)


async def test_duplicate_message_is_recorded_once() -> None:
    journal, worker = Journal(), SlowWorker()
    playing = asyncio.ensure_future(play(pool_of(worker), requests(journal)))
    await settle()
    link = WorkerLink("worker.0", worker, worker, GeneratorRouter([]))  # pyright: ignore
    key = worker.orders[0].key
    for number in (1, 1, 2, 1):
        assert await link.note(number, [(key, answer(number))], [])
    assert [answer.completion.request_id for answer in journal.answers] == ["g/0/1", "g/0/2"]
    worker.may_end.set()
    await playing


@pytest.mark.looptime
async def test_note_reports_that_the_disk_does_not_keep_up() -> None:
    class Slow(Journal):
        async def room(self) -> None:
            await asyncio.sleep(1.5 * ROOM_S)

    worker = SlowWorker()
    playing = asyncio.ensure_future(play(pool_of(worker), requests(Slow())))
    await settle()
    link = WorkerLink("worker.0", worker, worker, GeneratorRouter([]))  # pyright: ignore
    message = 1, [(worker.orders[0].key, answer(0))], []
    assert not await link.note(*message)
    worker.may_end.set()
    await playing


async def test_answers_sent_during_cancellation_are_recorded() -> None:
    journal = Journal()

    class Cancelled(SlowWorker):
        async def call(self, endpoint: Endpoint, *args: Any, timeout_s: float | None = None) -> Any:
            if endpoint.name == "cancel":
                rollout_worker_pool.record([(args[0], answer(0))], [])
            return await super().call(endpoint, *args)

    worker = Cancelled()
    playing = asyncio.ensure_future(play(pool_of(worker), requests(journal)))
    await settle()
    playing.cancel()
    await asyncio.wait([playing])
    assert worker.sent == [("cancel", worker.orders[0].key)]
    assert len(journal.answers) == 1
