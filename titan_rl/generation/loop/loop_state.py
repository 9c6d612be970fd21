"""What the callers of an engine loop and its thread share, and the rule that decides what the thread does next."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from titan_rl.errors import EngineDeadError, GenerationError, RequestError, StateDictError
from titan_rl.generation.continuation import aborted_late
from titan_rl.generation.engine import Engine, EngineRequest
from titan_rl.generation.loop.loop_decision import LoopAction, LoopDecision
from titan_rl.generation.loop.pending import Outbox, PendingCall, with_cause
from titan_rl.generation.types import PauseMode, PullResult
from titan_rl.types import FinishReason

logger = logging.getLogger(__name__)

Waiters = list[asyncio.Future[None]]


@dataclass(frozen=True, slots=True, eq=False)
class PendingPull:
    """One `pull` call."""

    version: int
    items: Iterable[tuple[str, Any]]
    source: Iterator[tuple[str, Any]]  # what `items` reads from; closed if nobody does
    verify: Callable[[Engine], object] | None
    manifest: Any
    future: asyncio.Future[PullResult]

    def close(self) -> None:
        """Let go of what was opened. What that raises is told of in the log: it is no reason to serve no more, and says
        nothing against weights that were loaded and found right."""
        try:
            if (close := getattr(self.source, "close", None)) is not None:
                close()
        except BaseException:  # a transport's own, whatever it is
            logger.exception("the source of version %d failed to close", self.version)


class LoopState:
    """Every method takes the lock, and none holds it longer than a few dictionary operations.

    A call is in `inbox` until the decision that lets it join, then in `running` until it is resolved.
    """

    def __init__(self, version: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.version = version  # the newest weights that were loaded and found right; never goes back
        self.inbox: dict[str, PendingCall] = {}
        self.running: dict[str, PendingCall] = {}
        self.aborting: set[str] = set()  # running requests that the engine is to forget
        self.pulls: list[PendingPull] = []
        self.barriers: Waiters = []  # resolved between two steps, once nothing is being aborted
        self.drained: Waiters = []  # resolved once nothing runs
        self.paused: PauseMode | None = None
        self.closing = False
        self.distrusted: Exception | None = None  # why nobody knows which weights are loaded
        self.ended: tuple[str, BaseException | None] | None = None
        self.lock = threading.RLock()
        self._wake = threading.Condition(self.lock)

    # The callers' side.

    def require_alive(self) -> None:
        if self.ended is not None:
            reason, cause = self.ended
            raise EngineDeadError(reason) from cause

    def submit(self, call: PendingCall) -> None:
        """Queue a call, or resolve it at once."""
        request_id = call.request.request_id
        with self._wake:
            self.require_alive()
            if self.distrusted is not None:
                raise self.distrust_error()
            if self.paused is PauseMode.ABORT:
                call.future.set_result(call.completion(FinishReason.ABORT))
                return
            being_freed = request_id in self.aborting
            if request_id in self.inbox or (request_id in self.running and not being_freed):
                raise RequestError(f"request_id {request_id!r} is already in flight; ids must be unique")
            self.inbox[request_id] = call
            self._wake.notify()

    def forget(self, call: PendingCall) -> None:
        """Free a request whose caller is gone."""
        request_id = call.request.request_id
        with self._wake:
            if self.inbox.get(request_id) is call:
                del self.inbox[request_id]
            elif self.running.get(request_id) is call:
                self.aborting.add(request_id)
                self._wake.notify()

    def abort(self, request_ids: Iterable[str] | None, barrier: asyncio.Future[None]) -> None:
        """Resolve what the engine has not seen, and have it forget the rest before `barrier` resolves."""
        outbox = Outbox()
        with self._wake:
            for request_id in [*self.inbox, *self.running] if request_ids is None else request_ids:
                if (call := self.inbox.pop(request_id, None)) is not None:
                    outbox.resolve(call.future, call.completion(FinishReason.ABORT))
                if request_id in self.running:
                    self.aborting.add(request_id)
            if self.ended is None:
                self.barriers.append(barrier)
            else:
                outbox.resolve(barrier, None)
            self._wake.notify()
        outbox.send()

    def give_up(self) -> int:
        """Resolve calls whose abort the engine does not get round to, and return how many."""
        outbox = Outbox()
        with self._wake:
            calls = [self.running.pop(request_id) for request_id in self.aborting if request_id in self.running]
            for call in calls:
                outbox.resolve(call.future, call.completion(FinishReason.ABORT))
        outbox.send()
        return len(calls)

    def pause(self, mode: PauseMode, drained: asyncio.Future[None]) -> None:
        with self._wake:
            self.require_alive()
            if self.paused is not None:
                raise RuntimeError(f"already paused ({self.paused}); resume() before pausing again")
            self.paused = mode
            if mode is PauseMode.WAIT:
                self.drained.append(drained)
            else:
                drained.set_result(None)
            self._wake.notify()

    def resume(self) -> None:
        outbox = Outbox()
        with self._wake:
            self.require_alive()
            if self.paused is None:
                raise RuntimeError("not paused; pause() comes first")
            self.paused = None
            self._release(self.drained, outbox)
            self._wake.notify()
        outbox.send()

    def outdated(self, version: int) -> PullResult | None:
        """The answer to a pull of a version older than one that was loaded: what is loaded never goes back.

        Raises:
            StateDictError: nothing is served, and a version so old cannot cure it.
        """
        with self._wake:
            self.require_alive()
            if version >= self.version:
                return None
            if self.distrusted is not None:
                raise StateDictError(
                    f"version {version} is older than version {self.version}, which was served, and is not loaded; the "
                    f"weights loaded are unknown ({self.distrusted}), so pull version {self.version} or a newer one"
                )
            return PullResult(self.version, load_s=0.0, verify_s=0.0, stall_s=0.0)

    def add_pull(self, pull: PendingPull) -> PullResult | None:
        """Queue a pull, or answer it at once, as `outdated` does."""
        with self._wake:
            if (answer := self.outdated(pull.version)) is None:
                self.pulls.append(pull)
                self._wake.notify()
            return answer

    def close(self) -> None:
        with self._wake:
            self.closing = True
            self._wake.notify()

    # The engine thread's side.

    def decide(self) -> LoopDecision:
        """Sleep until there is something to do: CLOSE before PULL before ABORT before STEP."""
        with self._wake:
            while True:
                if self.closing:
                    return LoopDecision(LoopAction.CLOSE)
                if self.pulls:
                    newest = max(self.pulls, key=lambda pull: pull.version)
                    return LoopDecision(LoopAction.PULL, version=newest.version, manifest=newest.manifest)
                if self.aborting or self.barriers:
                    return LoopDecision(LoopAction.ABORT, request_ids=tuple(self.aborting))
                if self.paused is None and (self.inbox or self.running):
                    return LoopDecision(LoopAction.STEP, requests=self._admit())
                if self.paused is PauseMode.WAIT and self.running:
                    return LoopDecision(LoopAction.STEP)
                if self.drained:
                    outbox = Outbox()
                    self._release(self.drained, outbox)
                    outbox.send()
                self._wake.wait()

    def finish(self, finished: Iterable[tuple[PendingCall, FinishReason]], outbox: Outbox) -> None:
        """Resolve calls with their last token."""
        with self._wake:
            for call, finish_reason in finished:
                request_id = call.request.request_id
                if self.running.pop(request_id, None) is None:
                    continue
                completion = call.completion(finish_reason)
                if request_id in self.aborting:
                    self.aborting.discard(request_id)
                    completion = aborted_late(completion)
                outbox.resolve(call.future, completion)

    def reject(self, request_id: str, error: Exception, outbox: Outbox) -> None:
        """Fail one running call."""
        with self._wake:
            self.aborting.discard(request_id)
            if (call := self.running.pop(request_id, None)) is not None:
                outbox.resolve(call.future, error)

    def aborted(self, request_ids: Iterable[str], outbox: Outbox) -> None:
        """The engine has forgotten these."""
        with self._wake:
            for request_id in request_ids:
                self.aborting.discard(request_id)
                if (call := self.running.pop(request_id, None)) is not None:
                    outbox.resolve(call.future, call.completion(FinishReason.ABORT))
            if not self.aborting:
                self._release(self.barriers, outbox)

    def pulled(self, version: int, outcome: PullResult | Exception, outbox: Outbox) -> None:
        """Answer the pull of this version, and those of older ones that have come by now."""
        with self._wake:
            answered = [pull for pull in self.pulls if pull.version <= version]
            self.pulls = [pull for pull in self.pulls if pull.version > version]
        for pull in answered:
            pull.close()
            outbox.resolve(pull.future, outcome)

    def loaded(self, version: int) -> None:
        """The engine has these weights, and they are right: tokens from here on are theirs."""
        with self._wake:
            self.version, self.distrusted = version, None
            for call in self.running.values():
                call.mark(version)

    def distrust(self, cause: Exception, outbox: Outbox) -> tuple[str, ...]:
        """Serve nothing until a pull succeeds. Returns the requests that the engine is to forget."""
        with self._wake:
            self.distrusted = cause
            running = tuple(self.running)
            for call in (*self.inbox.values(), *self.running.values()):
                outbox.resolve(call.future, self.distrust_error())
            self.inbox.clear()
            self.running.clear()
            self.aborting.clear()
        return running

    def distrust_error(self) -> GenerationError:
        error = GenerationError(f"the weights loaded are unknown, since a pull failed ({self.distrusted}); pull again")
        return with_cause(error, self.distrusted)

    def end(self, reason: str, cause: BaseException | None) -> None:
        """Refuse later calls, and fail everything outstanding. The first reason stays."""
        outbox = Outbox()
        with self._wake:
            if self.ended is None:
                self.ended = (reason, cause)
            calls = (*self.inbox.values(), *self.running.values(), *self.pulls)
            for future in [*(call.future for call in calls), *self.drained]:
                outbox.resolve(future, with_cause(EngineDeadError(reason), cause))
            self._release(self.barriers, outbox)  # there is nothing left to abort
            for outstanding in (self.inbox, self.running, self.aborting, self.pulls, self.drained):
                outstanding.clear()
        outbox.send()

    def _admit(self) -> tuple[EngineRequest, ...]:
        if not self.inbox:
            return ()
        admitted = tuple(self.inbox.values())
        self.running.update(self.inbox)
        self.inbox.clear()
        for call in admitted:
            call.admit(self.version, len(self.running))
        return tuple(call.request for call in admitted)

    @staticmethod
    def _release(waiters: Waiters, outbox: Outbox) -> None:
        for waiter in waiters:
            outbox.resolve(waiter, None)
        waiters.clear()
