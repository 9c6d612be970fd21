"""State shared by the callers of an engine loop and its thread, and the rule that decides what the thread does next."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from titan_rl.core.calls.user_code import with_cause
from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.errors import EngineDeadError, GenerationError, StateDictError
from titan_rl.core.tensor_checksum import TensorChecksum
from titan_rl.generation.engine import Engine, TokenDelta
from titan_rl.generation.loop.calls import Outbox, PendingCall, PendingCalls
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import PauseMode, PullResult
from titan_rl.types import FinishReason

logger = logging.getLogger(__name__)


class LoopAction(StrEnum):
    """Actions of a loop, by priority."""

    CLOSE = "close"
    WAKE = "wake"
    PULL = "pull"
    ABORT = "abort"
    SLEEP = "sleep"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class LoopDecision:
    """One turn of the loop. It pickles, and names everything that a follower needs.

    Example: two requests join the batch before this step.

        LoopDecision(LoopAction.STEP, requests=(first, second))
    """

    action: LoopAction
    version: int | None = None  # PULL: the version to load
    manifest: Any = None  # PULL: what a follower opens the version from
    request_ids: tuple[str, ...] = ()  # ABORT: the requests to forget
    requests: tuple[EngineRequest, ...] = ()  # STEP: what joins the batch first


@dataclass(frozen=True, slots=True, eq=False)
class PendingPull:
    """One `pull` call."""

    version: int
    items: Iterable[tuple[str, Any]]
    source: Iterator[tuple[str, Any]]  # what `items` reads from; closed if nobody does
    verify: Callable[[Engine], object] | None
    manifest: Any
    published: Mapping[str, TensorChecksum]
    future: asyncio.Future[PullResult]

    def close(self) -> None:
        """Let go of what was opened. What that raises is told of in the log: it is no reason to serve no more, and says
        nothing against weights that were loaded and found right."""
        try:
            if (close := getattr(self.source, "close", None)) is not None:
                close()
        except BaseException:  # a transport's own, whatever it is
            logger.exception("the source of version %d failed to close", self.version)


Waiters = list[asyncio.Future[None]]


class LoopState:
    """A monitor: the one object that both sides touch, by its methods alone. Each of them takes the lock, which is seen
    nowhere else, and none holds it longer than a few dictionary operations; only `decide` sleeps, and lets go of it.

    Futures are resolved by way of an `Outbox`, which is sent without the lock: by the callers' methods before they
    return, and by the engine's thread once a turn and before it sleeps.
    """

    def __init__(self, version: int, clock: Clock = CLOCK) -> None:
        self.clock = clock
        self._lock = threading.Condition()  # reentrant; the engine's thread sleeps on it
        self._version = version  # the newest weights that were loaded and found right; never goes back
        self._calls = PendingCalls()
        self._pulls: list[PendingPull] = []
        self._barriers: Waiters = []  # resolved between two steps, once nothing is being aborted
        self._drained: Waiters = []  # resolved once nothing runs
        self._paused: PauseMode | None = None
        self._to_sleep = False  # once nothing is being aborted
        self._asleep = False
        self._closing = False
        self._distrusted: Exception | None = None  # why nobody knows which weights are loaded
        self._ended: tuple[str, BaseException | None] | None = None

    # The callers' side.

    @property
    def version(self) -> int:
        with self._lock:
            return self._version

    @property
    def paused(self) -> PauseMode | None:
        with self._lock:
            return self._paused

    @property
    def num_in_flight(self) -> int:
        with self._lock:
            return len(self._calls)

    @property
    def num_running(self) -> int:
        with self._lock:
            return len(self._calls.running)

    @property
    def running_ids(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._calls.running)

    def require_alive(self) -> None:
        with self._lock:
            if self._ended is not None:
                reason, cause = self._ended
                raise EngineDeadError(reason) from cause

    def submit(self, call: PendingCall) -> None:
        """Queue a call, or resolve it at once."""
        outbox = Outbox()
        with self._lock:
            self.require_alive()
            if self._paused is not None and self._paused.ends_requests:
                outbox.resolve(call.future, call.completion(FinishReason.ABORT))
            elif self._distrusted is not None:
                raise self._distrust_error()
            else:
                self._calls.add(call)
                self._lock.notify()
        outbox.send()

    def forget(self, call: PendingCall) -> None:
        """Free a request whose caller is gone."""
        with self._lock:
            self._calls.forget(call)
            self._lock.notify()

    def abort(self, request_ids: Iterable[str] | None, barrier: asyncio.Future[None]) -> None:
        """Resolve what the engine has not seen, and have it forget the rest before `barrier` resolves."""
        outbox = Outbox()
        with self._lock:
            self._calls.abort(request_ids, outbox)
            if self._ended is None:
                self._barriers.append(barrier)
            else:
                outbox.resolve(barrier, None)
            self._lock.notify()
        outbox.send()

    def give_up(self) -> int:
        """Resolve calls whose abort the engine does not get round to, and return how many."""
        outbox = Outbox()
        with self._lock:
            count = self._calls.give_up(outbox)
        outbox.send()
        return count

    def pause(self, mode: PauseMode, drained: asyncio.Future[None] | None = None) -> None:
        """Step no more; in mode WAIT once nothing runs, with which `drained` resolves, and in mode SLEEP once the
        engine sleeps."""
        with self._lock:
            self.require_alive()
            if self._paused is not None:
                raise RuntimeError(f"already paused ({self._paused}); resume() before pausing again")
            self._paused = mode
            self._to_sleep = mode is PauseMode.SLEEP
            if drained is not None:
                self._drained.append(drained)
            self._lock.notify()

    def resume(self) -> None:
        outbox = Outbox()
        with self._lock:
            self.require_alive()
            if self._paused is None:
                raise RuntimeError("not paused; pause() comes first")
            self._paused, self._to_sleep = None, False
            _resolve_all(self._drained, outbox)
            self._lock.notify()
        outbox.send()

    def outdated(self, version: int) -> PullResult | None:
        """The answer to a pull of a version older than one that was loaded: what is loaded never goes back.

        Raises:
            StateDictError: nothing is served, and a version so old cannot cure it.
        """
        with self._lock:
            self.require_alive()
            if version >= self._version:
                return None
            if self._distrusted is not None:
                raise StateDictError(
                    f"version {version} is older than version {self._version}, which was served, and is not loaded; the"
                    f" weights loaded are unknown ({self._distrusted}), so pull version {self._version} or a newer one"
                )
            return PullResult(self._version, load_s=0.0, verify_s=0.0, stall_s=0.0)

    def add_pull(self, pull: PendingPull) -> PullResult | None:
        """Queue a pull, or answer it at once, as `outdated` does."""
        with self._lock:
            if (answer := self.outdated(pull.version)) is None:
                self._pulls.append(pull)
                self._lock.notify()
            return answer

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify()

    # The engine thread's side.

    def decide(self) -> LoopDecision:
        """Sleep until there is something to do: see `LoopAction` for what goes first."""
        while True:
            outbox = Outbox()
            with self._lock:
                if (decision := self._next_decision()) is not None:
                    return decision
                if self._drained:
                    _resolve_all(self._drained, outbox)
                else:
                    self._lock.wait()
            outbox.send()

    def _next_decision(self) -> LoopDecision | None:
        calls = self._calls
        if self._closing:
            return LoopDecision(LoopAction.CLOSE)
        if self._asleep and (self._pulls or self._paused is not PauseMode.SLEEP):
            return LoopDecision(LoopAction.WAKE)
        if self._pulls:
            newest = max(self._pulls, key=lambda pull: pull.version)
            return LoopDecision(LoopAction.PULL, version=newest.version, manifest=newest.manifest)
        if calls.aborting or self._barriers:
            return LoopDecision(LoopAction.ABORT, request_ids=tuple(calls.aborting))
        if self._to_sleep and not self._asleep:
            return LoopDecision(LoopAction.SLEEP)
        if self._paused is None and len(calls):
            return LoopDecision(LoopAction.STEP, requests=calls.admit(self._version))
        if self._paused is PauseMode.WAIT and calls.running:
            return LoopDecision(LoopAction.STEP)
        return None

    def slept(self) -> None:
        """The engine has given its memory back, and its weights with it."""
        with self._lock:
            self._to_sleep, self._asleep = False, True
            self._distrusted = StateDictError("the engine has slept, and no version was pulled since")

    def woken(self) -> None:
        with self._lock:
            self._asleep = False

    def absorb(
        self, rejected: Mapping[str, Exception], deltas: Iterable[TokenDelta], began: float, outbox: Outbox
    ) -> tuple[str, ...]:
        """Record the outcome of a step.

        Returns:
            the requests that failed by it, which the engine is to forget.
        """
        with self._lock:
            self._calls.reject(rejected, outbox)
            return self._calls.absorb(deltas, began, self.clock.now(), outbox)

    def stream(self, outbox: Outbox, *, also_empty: bool) -> None:
        """Send each request its tokens since the last call, or also an empty chunk."""
        with self._lock:
            self._calls.stream(outbox, also_empty=also_empty)

    def aborted(self, request_ids: Iterable[str], outbox: Outbox) -> None:
        """The engine has forgotten these."""
        with self._lock:
            self._calls.aborted(request_ids, outbox)
            if not self._calls.aborting:
                _resolve_all(self._barriers, outbox)

    def pull_of(self, version: int) -> PendingPull:
        """One that waits for this version."""
        with self._lock:
            return next(pull for pull in self._pulls if pull.version == version)

    def pulled(self, version: int, outcome: PullResult | Exception, outbox: Outbox) -> None:
        """Answer the pull of this version, and those of older ones that have come by now."""
        with self._lock:
            answered = [pull for pull in self._pulls if pull.version <= version]
            self._pulls = [pull for pull in self._pulls if pull.version > version]
        for pull in answered:
            pull.close()
            outbox.resolve(pull.future, outcome)

    def loaded(self, version: int) -> None:
        """The engine has these weights, and they are right: tokens from here on are theirs."""
        with self._lock:
            self._version, self._distrusted = version, None
            self._calls.mark(version)

    def distrust(self, cause: Exception, outbox: Outbox) -> tuple[str, ...]:
        """Serve nothing until a pull succeeds. Returns the requests that the engine is to forget."""
        with self._lock:
            self._distrusted = cause
            calls, running = self._calls.clear()
            for call in calls:
                outbox.resolve(call.future, self._distrust_error())
        return running

    def end(self, reason: str, cause: BaseException | None) -> None:
        """Refuse later calls, and fail everything outstanding. The first reason stays."""
        outbox = Outbox()
        with self._lock:
            if self._ended is None:
                self._ended = (reason, cause)
            calls, _ = self._calls.clear()
            for future in [*(call.future for call in (*calls, *self._pulls)), *self._drained]:
                outbox.resolve(future, with_cause(EngineDeadError(reason), cause))
            _resolve_all(self._barriers, outbox)  # there is nothing left to abort
            self._pulls.clear()
            self._drained.clear()
        outbox.send()

    def _distrust_error(self) -> GenerationError:
        error = GenerationError(f"the weights loaded are unknown, since a pull failed ({self._distrusted}); pull again")
        return with_cause(error, self._distrusted)


def _resolve_all(waiters: Waiters, outbox: Outbox) -> None:
    for waiter in waiters:
        outbox.resolve(waiter, None)
    waiters.clear()
