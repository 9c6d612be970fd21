"""Requests of groups in rollout workers, for tests."""

from __future__ import annotations

from typing import Any

from titan_rl.generation.group_requests import GroupRequests
from titan_rl.generation.recording import RecordedAnswer, Recorder
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.checked_copies import completion_of
from titan_rl.rollout.group.running_groups import RunningGroup
from titan_rl.scheduling.lease import Suspension


class Journal:
    """Journal of one training group."""

    def __init__(self) -> None:
        self.answers: list[RecordedAnswer] = []

    async def room(self) -> None: ...

    def known(self) -> dict[tuple[str, bytes], RecordedAnswer]:
        return {(answer.completion.request_id, answer.prompt_digest): answer for answer in self.answers}


def requests(journal: Journal | None = None, suspension: Suspension | None = None) -> Any:
    """Requests of a group, which is a training group if there is a journal."""
    playing = RunningGroup(1, lambda session_id: None)
    if journal is None:
        return GroupRequests(GeneratorRouter([]), playing)
    recorder = Recorder(0, journal.known, journal.answers.append, completion_of)
    return GroupRequests(
        GeneratorRouter([]), playing, recorder=recorder, suspension=suspension or Suspension(), room=journal.room
    )
