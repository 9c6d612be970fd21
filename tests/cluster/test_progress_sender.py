"""Answers and finished rollouts that a rollout worker sends to the controller, in virtual time."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from test_rollout_worker_pool import answer

from titan_rl import Rollout, Turn
from titan_rl.cluster.rollout_worker import GIVE_UP_S, MOST_UNSENT, ProgressSender
from titan_rl.core.errors import ActorDiedError, CheckpointError

pytestmark = pytest.mark.looptime


class Service:
    """Controller that takes a second for a message.

    Args:
        errors: Errors of the first messages.
        loses_answers: The failing messages are recorded; only the replies to them are lost.
        num_full: Number of later messages answered with "the disk does not keep up".
    """

    def __init__(self, errors: Sequence[Exception] = (), *, loses_answers: bool = False, num_full: int = 0) -> None:
        self.note = self
        self.numbers: list[int] = []
        self.messages: list[list[Any]] = []
        self.finished: list[Any] = []
        self.errors = [*errors]
        self._loses_answers = loses_answers
        self._num_full = num_full

    async def call_one(self, worker: str, number: int, answers: list[Any], finished: list[Any]) -> bool:
        await asyncio.sleep(1.0)
        self.numbers.append(number)
        error = self.errors.pop(0) if self.errors else None
        if error is not None and not self._loses_answers:
            raise error
        if number > len(self.messages):
            self.finished += finished
            self.messages.append([(key, answer.completion.request_id) for key, answer in answers])
        if error is not None:
            raise error
        self._num_full -= 1
        return self._num_full < 0


def sender_to(service: Service) -> ProgressSender:
    return ProgressSender(service, "rollout-worker-0.0")


async def test_answers_are_batched_while_the_controller_is_busy() -> None:
    service = Service()
    sender = sender_to(service)
    sender.add_answer("a", answer(0))
    await asyncio.sleep(0.5)
    for turn in (1, 2):
        sender.add_answer("a", answer(turn))
    await sender.flush()
    assert service.messages == [[("a", "g/0/0")], [("a", "g/0/1"), ("a", "g/0/2")]]


async def test_drop_discards_unsent_progress_and_finished_rollouts_carry_no_turns() -> None:
    service = Service()
    sender = sender_to(service)
    sender.add_answer("a", answer(0))
    await asyncio.sleep(0.5)
    sender.add_answer("a", answer(1))
    sender.add_answer("b", answer(2))
    for key in ("a", "b"):
        sender.add_finished(key, Rollout(f"{key}/0", key, 0, "sample", turns=[Turn([1], answer(0).completion)]))
    sender.drop("a")
    await sender.flush()
    assert service.messages == [[("a", "g/0/0")], [("b", "g/0/2")]]
    assert [(key, rollout.turns, rollout.sample) for key, rollout in service.finished] == [("b", [], None)]


async def test_room_waits_while_too_much_is_unsent() -> None:
    sender, clock = sender_to(Service()), asyncio.get_running_loop().time
    sender.add_answer("a", answer(0))
    await asyncio.sleep(0.5)
    sender.add_answer("a", answer(1, MOST_UNSENT + 1))
    await sender.room()
    assert clock() == pytest.approx(2.1, abs=0.02)


@pytest.mark.parametrize("loses_answers", [False, True])
async def test_failed_message_is_resent_with_the_same_number(loses_answers: bool) -> None:
    service = Service([ConnectionError("reset"), ConnectionError("reset")], loses_answers=loses_answers)
    sender = sender_to(service)
    sender.add_answer("a", answer(0))
    await sender.flush()
    await sender.room()
    sender.add_answer("a", answer(1))
    await sender.flush()
    assert service.numbers == [1, 1, 1, 2]
    assert service.messages == [[("a", "g/0/0")], [("a", "g/0/1")]]


async def test_controller_that_accepts_no_message_fails_the_worker_and_its_requests() -> None:
    sender, clock = sender_to(Service([CheckpointError("the disk is gone")] * 100)), asyncio.get_running_loop().time
    sender.check()
    sender.add_answer("a", answer(0, MOST_UNSENT + 1))
    waiting = asyncio.ensure_future(sender.room())
    with pytest.raises(ActorDiedError, match=r"could not be sent to the controller's journal.*the disk is gone"):
        await sender.flush()
    for check in (waiting, sender.room(), sender.flush()):
        with pytest.raises(ActorDiedError, match="the disk is gone"):
            await check
    with pytest.raises(ActorDiedError, match="the disk is gone"):
        sender.check()
    assert 20 < clock() <= GIVE_UP_S + 2
    sender.add_answer("a", answer(1, MOST_UNSENT + 1))  # nobody waits for it
    with pytest.raises(ActorDiedError):
        await sender.room()


async def test_slow_disk_does_not_fail_the_worker() -> None:
    service = Service(num_full=1000)
    sender = sender_to(service)
    sender.add_answer("a", answer(0, MOST_UNSENT + 1))
    await sender.room()
    sender.check()
    assert asyncio.get_running_loop().time() > 10 * GIVE_UP_S
    assert service.messages == [[("a", "g/0/0")]]


async def test_flush_ends_although_answers_keep_coming() -> None:
    service = Service()
    sender, clock = sender_to(service), asyncio.get_running_loop().time

    async def play() -> None:
        for turn in range(100):
            sender.add_answer("a", answer(turn))
            await asyncio.sleep(0.5)

    playing = asyncio.ensure_future(play())
    await asyncio.sleep(0.75)
    await sender.flush()
    assert clock() == pytest.approx(2.0, abs=0.02)
    assert service.messages == [[("a", "g/0/0")], [("a", "g/0/1"), ("a", "g/0/2")]]
    playing.cancel()


async def test_dropping_a_group_frees_room_for_waiting_requests() -> None:
    sender, clock = sender_to(Service()), asyncio.get_running_loop().time
    sender.add_answer("a", answer(0))
    await asyncio.sleep(0.5)
    sender.add_answer("a", answer(1, MOST_UNSENT + 1))
    waiting = asyncio.ensure_future(sender.room())
    await asyncio.sleep(0.55)  # between two messages
    sender.drop("a")
    await asyncio.wait_for(waiting, 100)
    assert clock() == pytest.approx(1.05, abs=0.02)
