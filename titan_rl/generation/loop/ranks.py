"""How the ranks of one replica keep step: rank 0 decides, the others follow, and all agree on what went wrong."""

from __future__ import annotations

import queue
from datetime import timedelta
from typing import Any, Protocol

from titan_rl.core.errors import EngineDeadError
from titan_rl.generation.loop.loop_decision import LoopDecision

IDLE_TIMEOUT = timedelta(days=365)  # a follower of an idle replica waits; one whose leader dies is told at once

REPLY_TIMEOUT_S = 60.0


class Ranks(Protocol):
    """One rank's end of the link between the ranks of a replica. Used by the engine's thread alone."""

    def broadcast(self, decision: LoopDecision) -> None:
        """Rank 0 tells the others what to do next."""
        ...

    def receive(self) -> LoopDecision:
        """The next decision of rank 0.

        Raises:
            EngineDeadError: rank 0 is gone.
        """
        ...

    def gather(self, value: Any) -> list[Any]:
        """Exchange a value that pickles. Returns those of all ranks, rank 0 first."""
        ...

    def close(self) -> None:
        """Leave. The others are told, and wait no longer."""
        ...


class OneRank:
    """A replica of one rank: nobody follows."""

    def broadcast(self, decision: LoopDecision) -> None:
        pass

    def receive(self) -> LoopDecision:
        raise RuntimeError("a single rank decides; it has nobody to follow")

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def close(self) -> None:
        pass


class ThreadRanks:
    """Ranks that are threads of one process, each with an engine of its own. What they send waits in queues, so nobody
    misses it who is slow.

    Example: `leader, follower = ThreadRanks.make(2)`.
    """

    def __init__(self, rank: int, inboxes: list[queue.Queue[Any]], replies: queue.Queue[Any]) -> None:
        self._rank = rank
        self._inboxes = inboxes  # of the followers; None says that rank 0 has left
        self._replies = replies  # to rank 0: (rank, value), or None from one that has left

    @classmethod
    def make(cls, num_ranks: int) -> list[ThreadRanks]:
        """The ends of all ranks, rank 0 first."""
        inboxes, replies = [queue.Queue[Any]() for _ in range(num_ranks)], queue.Queue[Any]()
        return [cls(rank, inboxes, replies) for rank in range(num_ranks)]

    def broadcast(self, decision: LoopDecision) -> None:
        if not self._replies.empty():  # nobody was asked anything
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
                reply = self._replies.get(timeout=REPLY_TIMEOUT_S)
            except queue.Empty:
                raise EngineDeadError(f"a rank of this replica gave no answer in {REPLY_TIMEOUT_S:g} s") from None
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


class GlooRanks:
    """Ranks that are processes of one torch.distributed world, over gloo. Made by all of them at the same time.

    Decisions have a group of their own, so that they neither wait for the engine's collectives nor run into their
    time limit while the replica is idle.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._group: Any = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    def broadcast(self, decision: LoopDecision) -> None:
        self._dist.broadcast_object_list([decision], src=0, group=self._group)

    def receive(self) -> LoopDecision:
        box: list[Any] = [None]
        try:
            self._dist.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as error:  # gloo: the connection is closed
            raise EngineDeadError(f"rank 0 has ended: {error}") from error
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._dist.get_world_size(self._group)
        self._dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        # The group ends with the process: to destroy it would wait for ranks that may be gone.
        pass


def agree(ranks: Ranks, problem: str | None) -> str | None:
    """Every rank says what went wrong with it, and all learn of the first problem, or None."""
    problems = ranks.gather(problem)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None), None)
