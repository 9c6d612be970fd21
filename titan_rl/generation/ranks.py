"""How the ranks of one replica keep step: rank 0 decides, the others follow, and all agree on what went wrong."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any, Protocol

from titan_rl.errors import EngineDeadError
from titan_rl.generation.loop_decision import LoopDecision

IDLE_TIMEOUT = timedelta(days=365)  # a follower of an idle replica waits; one whose leader dies is told at once


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

    def agree(self, problem: str | None) -> str | None:
        """Every rank says what went wrong with it, and all learn of the first problem, or None."""
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

    def agree(self, problem: str | None) -> str | None:
        return problem

    def close(self) -> None:
        pass


class ThreadRanks:
    """Ranks that are threads of one process, each with an engine of its own.

    Example: `leader, follower = ThreadRanks.make(2)`.
    """

    def __init__(self, rank: int, inboxes: list[queue.Queue[Any]], meeting: threading.Barrier, said: list[Any]) -> None:
        self._rank = rank
        self._inboxes = inboxes
        self._meeting = meeting
        self._said = said

    @classmethod
    def make(cls, num_ranks: int) -> list[ThreadRanks]:
        """The ends of all ranks, rank 0 first."""
        inboxes = [queue.Queue[Any]() for _ in range(num_ranks)]
        meeting, said = threading.Barrier(num_ranks, timeout=60.0), [None] * num_ranks
        return [cls(rank, inboxes, meeting, said) for rank in range(num_ranks)]

    def broadcast(self, decision: LoopDecision) -> None:
        if self._meeting.broken:
            raise EngineDeadError("a rank of this replica has ended")
        for inbox in self._inboxes[1:]:
            inbox.put(decision)

    def receive(self) -> LoopDecision:
        decision = self._inboxes[self._rank].get()
        if decision is None:
            raise EngineDeadError("rank 0 has ended")
        return decision

    def agree(self, problem: str | None) -> str | None:
        self._said[self._rank] = problem
        try:
            self._meeting.wait()
            first = _first(self._said)
            self._meeting.wait()  # nobody speaks again before all have listened
        except threading.BrokenBarrierError:
            raise EngineDeadError("a rank of this replica has ended") from None
        return first

    def close(self) -> None:
        self._meeting.abort()
        if self._rank == 0:
            for inbox in self._inboxes[1:]:
                inbox.put(None)


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

    def agree(self, problem: str | None) -> str | None:
        said: list[Any] = [None] * self._dist.get_world_size(self._group)
        self._dist.all_gather_object(said, problem, group=self._group)
        return _first(said)

    def close(self) -> None:
        # The group ends with the process: to destroy it would wait for ranks that may be gone.
        pass


def _first(said: list[Any]) -> str | None:
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(said) if problem is not None), None)
