"""Ranks of one replica: rank 0 decides, the others follow, and all agree on failures."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from titan_rl.core.calls.user_code import summary, with_cause
from titan_rl.core.errors import EngineDeadError, RequestError, StateDictError
from titan_rl.core.tensor_checksum import TensorChecksum
from titan_rl.generation.engine import Engine, SleepingEngine, TokenDelta, check_sampling
from titan_rl.generation.loop.state import LoopAction, LoopDecision
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import KVPolicy, Readback, compare, read_back

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


logger = logging.getLogger(__name__)

Items = Iterable[tuple[str, Any]]
Verify = Callable[[Engine], object]
Stepping = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Weights:
    """One version as a rank reads it."""

    items: Items
    verify: Verify | None = None  # looks at the loaded engine, and raises if the weights are not right
    published: Mapping[str, TensorChecksum] = field(default_factory=dict[str, TensorChecksum])


class EngineRank:
    """Advances one engine. What can go wrong on one rank alone is agreed on, so that all stay alike.

    Args:
        stepping: entered for the length of each step.
    """

    def __init__(self, engine: Engine, ranks: Ranks, kv_policy: KVPolicy, stepping: Stepping = nullcontext) -> None:
        self.engine = engine
        self._ranks = ranks
        self._kv_policy = kv_policy
        self._stepping = stepping
        self._distrusted = False  # nobody knows which weights are loaded

    def step(self, requests: Sequence[EngineRequest]) -> tuple[dict[str, Exception], list[TokenDelta]]:
        """Let requests join and advance all.

        Returns:
            those that could not join with the reason, and what the others gained.
        """
        rejected: dict[str, Exception] = {}
        for request in requests:
            try:
                check_sampling(self.engine, request)
                self.engine.add(request)
            except BaseException as error:  # nothing is awaited here, so that a CancelledError is the engine's own
                # What the engine did not foresee is the request's doing, and would happen on every replica.
                if not isinstance(error, RequestError):
                    problem = f"request {request.request_id!r} was not accepted: {summary(error)}"
                    error = with_cause(RequestError(problem), error)
                rejected[request.request_id] = error
        with self._stepping():
            return rejected, self.engine.step()

    def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self.engine.abort(request_ids)

    def sleep(self) -> None:
        """Give the engine's memory back, once nothing runs.

        Raises:
            EngineDeadError: the engine cannot.
        """
        if not isinstance(self.engine, SleepingEngine):
            raise EngineDeadError(
                f"{type(self.engine).__name__} cannot sleep; set scheduling.on_batch_ready to something else than "
                "'sleep'"
            )
        self._distrusted = True  # the weights are gone
        self.engine.sleep()

    def wake(self) -> None:
        assert isinstance(self.engine, SleepingEngine)
        self.engine.wake()

    def open(self, open_weights: Callable[[], Weights]) -> Weights:
        """Open a version on this rank.

        Raises:
            StateDictError: a rank could not; the old weights are untouched on every rank.
        """
        return self._together("the version could not be opened", open_weights)

    def load(self, weights: Weights, version: int) -> None:
        """Swap weights, and treat the KV cache as the policy says.

        Raises:
            StateDictError: a rank could not. The weights loaded are unknown until a later load succeeds.
        """
        distrusted, self._distrusted = self._distrusted, True
        self._together(
            f"version {version} could not be loaded", lambda: self.engine.load_state_dict(weights.items, version)
        )
        # KV computed under unknown weights is never offered again, whatever the policy.
        if self._kv_policy.reset_prefix_cache or distrusted:
            self.engine.reset_prefix_cache(recompute_running=self._kv_policy.running == "recompute")

    def read_back(self, weights: Weights, version: int) -> Readback | None:
        """Compare what the engines of all ranks hold with the checksums of what was published.

        Returns:
            None where there is nothing to compare with, or no engine that can be read.

        Raises:
            VerificationError: they differ.
            StateDictError: an engine cannot be read though it should.
        """
        if not weights.published:
            return None
        mine = self._together("the weights loaded could not be read", lambda: read_back(self.engine, weights.published))
        held = self._ranks.gather(mine)
        if not any(held):
            return None
        return self._together("the weights loaded differ", lambda: compare(weights.published, held, version))

    def verify(self, weights: Weights) -> None:
        """Run the check that came with the version. The weights are trusted from here on.

        Raises:
            StateDictError: as `load`.
        """
        if weights.verify is not None:
            verify = weights.verify
            self._together("the weights loaded could not be verified", lambda: verify(self.engine))
        self._distrusted = False

    def _together(self, complaint: str, action: Callable[[], Any]) -> Any:
        result, mine = None, None
        try:
            result = action()
        except BaseException as error:
            if not isinstance(error, StateDictError):
                error = with_cause(StateDictError(f"{complaint}: {summary(error)}"), error)
            mine = error
        problem = agree(self._ranks, None if mine is None else str(mine))
        if mine is not None:
            raise mine
        if problem is not None:
            raise StateDictError(problem)
        return result


def follow_leader(
    make_engine: Callable[[], Engine],
    make_ranks: Callable[[], Ranks],
    open_weights: Callable[[Any], Weights],
    kv_policy: KVPolicy | None = None,
    stepping: Stepping = nullcontext,
) -> None:
    """The whole life of an engine that is not on rank 0. Returns once rank 0 closes.

    Args:
        open_weights: opens a version from the manifest that rank 0 was told to pull.
        stepping: entered for the length of each step.

    Raises:
        EngineDeadError: rank 0 is gone.
        Exception: the engine failed. The other ranks cannot go on without this one.
    """
    engine = make_engine()
    ranks = make_ranks()
    rank = EngineRank(engine, ranks, kv_policy or KVPolicy(), stepping)
    try:
        while (decision := ranks.receive()).action is not LoopAction.CLOSE:
            match decision.action:
                case LoopAction.ABORT:
                    rank.abort(decision.request_ids)
                case LoopAction.PULL:
                    assert decision.version is not None
                    try:
                        weights = rank.open(lambda manifest=decision.manifest: open_weights(manifest))
                        rank.load(weights, decision.version)
                        rank.read_back(weights, decision.version)
                        rank.verify(weights)
                    except StateDictError:
                        logger.exception("version %s was not pulled", decision.version)
                case LoopAction.SLEEP:
                    rank.sleep()
                case LoopAction.WAKE:
                    rank.wake()
                case _:
                    rank.step(decision.requests)
    finally:
        ranks.close()
        engine.close()
