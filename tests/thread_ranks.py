"""Ranks of a replica that are threads of one process."""

from __future__ import annotations

import queue
from typing import Any

from background import HANG_S

from titan_rl.core.errors import EngineDeadError
from titan_rl.generation.loop.ranks import Ranks
from titan_rl.generation.loop.state import LoopDecision


class ThreadRanks(Ranks):
    """Ranks that are threads of one process, each with its own engine. Messages to slow ranks wait in queues.

    Example: `leader, follower = ThreadRanks.make(2)`.
    """

    def __init__(self, rank: int, inboxes: list[queue.Queue[Any]], replies: queue.Queue[Any]) -> None:
        self._rank = rank
        self._inboxes = inboxes  # of the followers; None means that rank 0 has left
        self._replies = replies  # to rank 0: (rank, value), or None if the rank has left

    @classmethod
    def make(cls, num_ranks: int) -> list[ThreadRanks]:
        """Make the connected ranks, rank 0 first."""
        inboxes, replies = [queue.Queue[Any]() for _ in range(num_ranks)], queue.Queue[Any]()
        return [cls(rank, inboxes, replies) for rank in range(num_ranks)]

    def broadcast(self, decision: LoopDecision) -> None:
        if not self._replies.empty():  # no gather is in progress, so a reply means that a rank has left
            raise EngineDeadError("a rank of this replica has ended")
        self._tell(decision)

    def receive(self) -> LoopDecision:
        decision = self._inboxes[self._rank].get()
        if decision is None:
            raise EngineDeadError("rank 0 has ended")
        return decision

    def gather(self, value: Any) -> list[Any]:
        if self._rank:
            self._replies.put((self._rank, value))
            gathered = self._inboxes[self._rank].get()
            if gathered is None:
                raise EngineDeadError("rank 0 has ended")
            return gathered
        values: list[Any] = [value] + [None] * (len(self._inboxes) - 1)
        for _ in self._inboxes[1:]:
            try:
                reply = self._replies.get(timeout=HANG_S)
            except queue.Empty:
                raise EngineDeadError(f"a rank of this replica gave no answer in {HANG_S:g} s") from None
            if reply is None:
                raise EngineDeadError("a rank of this replica has ended")
            values[reply[0]] = reply[1]
        self._tell(values)
        return values

    def close(self) -> None:
        if self._rank == 0:
            self._tell(None)
        else:
            self._replies.put(None)

    def _tell(self, message: Any) -> None:
        for inbox in self._inboxes[1:]:
            inbox.put(message)
