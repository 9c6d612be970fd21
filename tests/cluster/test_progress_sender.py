"""Answers and ends of rollouts on their way from a rollout worker to the controller. Virtual time."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from test_worker_pool import answer

from titan_rl import Rollout, Turn
from titan_rl.cluster.rollout_worker import MOST_UNSENT, ProgressSender
from titan_rl.core.errors import CheckpointError, GenerationError

pytestmark = pytest.mark.looptime


class Service:
    """Controller that takes a second for a message."""

    def __init__(self) -> None:
        self.note = self
        self.messages: list[list[Any]] = []
        self.finished: list[Any] = []
        self.error: Exception | None = None

    async def call_one(self, answers: list[Any], finished: list[Any]) -> None:
        await asyncio.sleep(1.0)
        if self.error is not None:
            raise self.error
        self.finished += finished
        self.messages.append([(key, answer.completion.request_id) for key, answer in answers])


async def test_answers_travel_together_while_the_controller_is_busy() -> None:
    service = Service()
    sender = ProgressSender(service)
    sender.add_answer("a", answer(0))
    await asyncio.sleep(0.5)
    for turn in (1, 2):
        sender.add_answer("a", answer(turn))
    await sender.flush()
    assert service.messages == [[("a", "g/0/0")], [("a", "g/0/1"), ("a", "g/0/2")]]


async def test_a_group_that_has_finished_brings_its_answers_itself() -> None:
    service = Service()
    sender = ProgressSender(service)
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


async def test_no_further_request_is_made_while_too_much_waits_for_the_disk() -> None:
    sender, clock = ProgressSender(Service()), asyncio.get_running_loop().time
    sender.add_answer("a", answer(0))
    await asyncio.sleep(0.5)
    sender.add_answer("a", answer(1, MOST_UNSENT + 1))
    await sender.room()
    assert clock() == pytest.approx(2.1, abs=0.02)


async def test_a_journal_that_refuses_answers_fails_the_requests_to_come() -> None:
    service = Service()
    sender = ProgressSender(service)
    service.error = CheckpointError("the disk is gone")
    sender.add_answer("a", answer(0))
    await sender.flush()
    with pytest.raises(GenerationError, match="the journal takes no answers: the disk is gone"):
        await sender.room()


async def test_a_flush_ends_although_answers_keep_coming() -> None:
    service = Service()
    sender, clock = ProgressSender(service), asyncio.get_running_loop().time

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


async def test_requests_continue_when_the_group_whose_answers_wait_for_the_disk_has_finished() -> None:
    sender, clock = ProgressSender(Service()), asyncio.get_running_loop().time
    sender.add_answer("a", answer(0))
    await asyncio.sleep(0.5)
    sender.add_answer("a", answer(1, MOST_UNSENT + 1))
    waiting = asyncio.ensure_future(sender.room())
    await asyncio.sleep(0.55)  # between two messages
    sender.drop("a")
    await asyncio.wait_for(waiting, 100)
    assert clock() == pytest.approx(1.05, abs=0.02)
