"""State that an engine loop's callers share with its thread, and the decision rule of the thread."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from titan_rl.core.calls.user_code import with_cause
from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.errors import EngineDeadError, GenerationError, RequestError, StateDictError
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.calls import Outbox, PendingCall, PendingPull
from titan_rl.generation.request import EngineRequest, aborted_late
from titan_rl.generation.types import PauseMode, PullResult
from titan_rl.types import FinishReason


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
    """One decision of the loop. It can be pickled, and contains everything that a follower needs.

    Example: two requests join the batch before this step.

        LoopDecision(LoopAction.STEP, requests=(first, second))
    """

    action: LoopAction
    version: int | None = None  # PULL: the version to load
    adapter: str = ""  # PULL: the adapter of the version
    manifest: Any = None  # PULL: describes the version to followers
    request_ids: tuple[str, ...] = ()  # ABORT: the requests to forget
    requests: tuple[EngineRequest, ...] = ()  # STEP: the requests that join the batch first


Waiters = list[asyncio.Future[None]]


class LoopState:
    """Monitor that callers and the engine's thread share. Each method takes the lock, for a few dictionary operations;
    only `decide` waits, and releases the lock meanwhile.

    A request waits until a step lets it join the batch, and then runs until it is resolved. Futures are resolved in
    their event loops, through an `Outbox`: callers' methods send it before they return, the engine's thread sends it
    after each decision with `send_results`.
    """

    def __init__(self, version: int, clock: Clock = CLOCK) -> None:
        self.clock = clock
        self._lock = threading.Condition()  # reentrant; the engine's thread waits on it
        self._outbox = Outbox()
        # The newest version that was loaded and verified, by adapter ("" for the model). Versions never go back.
        self._versions: defaultdict[str, int] = defaultdict(lambda: version)
        self._waiting: dict[str, PendingCall] = {}  # by request id
        self._running: dict[str, PendingCall] = {}
        self._aborting: set[str] = set()  # running requests that the engine must forget
        self._pulls: list[PendingPull] = []
        self._barriers: Waiters = []  # resolved between two steps, when nothing is being aborted
        self._drained: Waiters = []  # resolved when nothing runs
        self._paused: PauseMode | None = None
        self._to_sleep = False  # sleep as soon as nothing is being aborted
        self._asleep = False
        self._closing = False
        self._distrusted: dict[str, Exception] = {}  # the reason why the loaded weights are unknown, by adapter
        self._ended: tuple[str, BaseException | None] | None = None

    # The callers' side.

    def version_of(self, adapter: str) -> int:
        with self._lock:
            return self._versions[adapter]

    @property
    def paused(self) -> PauseMode | None:
        with self._lock:
            return self._paused

    @property
    def num_in_flight(self) -> int:
        with self._lock:
            return len(self._waiting) + len(self._running)

    @property
    def num_running(self) -> int:
        with self._lock:
            return len(self._running)

    @property
    def running_ids(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._running)

    def require_alive(self) -> None:
        with self._lock:
            if self._ended is not None:
                reason, cause = self._ended
                raise EngineDeadError(reason) from cause

    def submit(self, call: PendingCall) -> None:
        """Queue a call, or resolve it at once.

        Raises:
            RequestError: a request with the same id is in flight, and not being aborted.
            GenerationError: the loaded weights are unknown.
        """
        request_id, adapter = call.request.request_id, call.request.adapter
        with self._changing():
            self.require_alive()
            if self._paused is not None and self._paused.ends_requests:
                self._outbox.resolve(call.future, call.completion(FinishReason.ABORT))
                return
            if adapter in self._distrusted:
                raise self._distrust_error(adapter)
            is_running = request_id in self._running and request_id not in self._aborting
            if is_running or request_id in self._waiting:
                raise RequestError(f"request_id {request_id!r} is already in flight; ids must be unique")
            self._waiting[request_id] = call

    def forget(self, call: PendingCall) -> None:
        """Free a request whose caller was cancelled."""
        request_id = call.request.request_id
        with self._changing():
            if self._waiting.get(request_id) is call:
                del self._waiting[request_id]
            elif self._running.get(request_id) is call:
                self._aborting.add(request_id)

    def abort(self, request_ids: Iterable[str] | None, barrier: asyncio.Future[None]) -> None:
        """Resolve requests that the engine has not seen, and mark the others for it to forget. None aborts all.
        `barrier` resolves when the engine has forgotten them."""
        with self._changing():
            for request_id in [*self._waiting, *self._running] if request_ids is None else request_ids:
                if (call := self._waiting.pop(request_id, None)) is not None:
                    self._outbox.resolve(call.future, call.completion(FinishReason.ABORT))
                if request_id in self._running:
                    self._aborting.add(request_id)
            if self._ended is None:
                self._barriers.append(barrier)
            else:
                self._outbox.resolve(barrier, None)

    def abandon(self) -> int:
        """Resolve the calls that are being aborted, without waiting for the engine. Returns their number."""
        with self._changing():
            calls = [self._running.pop(request_id) for request_id in self._aborting if request_id in self._running]
            for call in calls:
                self._outbox.resolve(call.future, call.completion(FinishReason.ABORT))
            return len(calls)

    def pause(self, mode: PauseMode, drained: asyncio.Future[None] | None = None) -> None:
        """Stop stepping: in mode WAIT when nothing runs, in other modes now. `drained` resolves when nothing runs; in
        mode SLEEP, when the engine sleeps."""
        with self._changing():
            self.require_alive()
            if self._paused is not None:
                raise RuntimeError(f"already paused ({self._paused}); resume() before pausing again")
            self._paused = mode
            self._to_sleep = mode is PauseMode.SLEEP
            if drained is not None:
                self._drained.append(drained)

    def resume(self) -> None:
        with self._changing():
            self.require_alive()
            if self._paused is None:
                raise RuntimeError("not paused; pause() comes first")
            self._paused, self._to_sleep = None, False
            self._resolve(self._drained)

    def outdated(self, version: int, adapter: str) -> PullResult | None:
        """The answer to a pull of a version older than the loaded one: loaded versions never go back.

        Raises:
            StateDictError: the loaded weights are unknown, and an older version must not replace them.
        """
        with self._lock:
            self.require_alive()
            if version >= (loaded := self._versions[adapter]):
                return None
            if (cause := self._distrusted.get(adapter)) is not None:
                raise StateDictError(
                    f"version {version} is older than version {loaded}, which was served, and is not loaded; the"
                    f" loaded weights are unknown ({cause}), so pull version {loaded} or a newer one"
                )
            return PullResult(loaded, load_s=0.0, verify_s=0.0, stall_s=0.0)

    def add_pull(self, pull: PendingPull) -> PullResult | None:
        """Queue a pull, or answer it at once; see `outdated`."""
        with self._changing():
            if (answer := self.outdated(pull.version, pull.adapter)) is None:
                self._pulls.append(pull)
            return answer

    def close(self) -> None:
        with self._changing():
            self._closing = True

    # The engine thread's side.

    def decide(self) -> LoopDecision:
        """Wait until there is something to do, and return the decision of highest priority; see `LoopAction`."""
        with self._lock:
            while (decision := self._next_decision()) is None:
                if self._drained:
                    self._resolve(self._drained)
                    self._outbox.send()
                else:
                    self._lock.wait()
            return decision

    def _next_decision(self) -> LoopDecision | None:
        if self._closing:
            return LoopDecision(LoopAction.CLOSE)
        if self._asleep and (self._pulls or self._paused is not PauseMode.SLEEP):
            return LoopDecision(LoopAction.WAKE)
        if self._pulls:
            adapter = self._pulls[0].adapter
            of_adapter = [pull for pull in self._pulls if pull.adapter == adapter]
            newest = max(of_adapter, key=lambda pull: pull.version)
            return LoopDecision(LoopAction.PULL, newest.version, adapter, newest.manifest)
        if self._aborting or self._barriers:
            return LoopDecision(LoopAction.ABORT, request_ids=tuple(self._aborting))
        if self._to_sleep and not self._asleep:
            return LoopDecision(LoopAction.SLEEP)
        if self._paused is None and (self._waiting or self._running):
            return LoopDecision(LoopAction.STEP, requests=self._admit())
        if self._paused is PauseMode.WAIT and self._running:
            return LoopDecision(LoopAction.STEP)
        return None

    def _admit(self) -> tuple[EngineRequest, ...]:
        """Let waiting requests join the batch; their next tokens belong to the version of their adapter."""
        admitted = tuple(self._waiting.values())
        self._running.update(self._waiting)
        self._waiting.clear()
        for call in admitted:
            wanted = call.request.version
            call.admit(self._versions[call.request.adapter] if wanted is None else wanted, len(self._running))
        return tuple(call.request for call in admitted)

    def send_results(self) -> None:
        """Deliver all results so far."""
        with self._lock:
            self._outbox.send()

    def slept(self) -> None:
        """Note that the engine has released its memory, including its weights."""
        with self._lock:
            self._to_sleep, self._asleep = False, True
            slept = StateDictError("the engine has slept, and no version was pulled since")
            self._distrusted = dict.fromkeys({*self._versions, ""}, slept)

    def woken(self) -> None:
        with self._lock:
            self._asleep = False

    def absorb(self, rejected: Mapping[str, Exception], deltas: Iterable[TokenDelta], began: float) -> tuple[str, ...]:
        """Fail the requests that a step has rejected, and pass its tokens to the others.

        Returns:
            Requests that failed because of their tokens, which the engine must forget.
        """
        failed: list[str] = []
        with self._lock:
            for request_id, error in rejected.items():
                if (call := self._take(request_id)) is not None:
                    self._outbox.resolve(call.future, error)
            now = self.clock.now()
            for delta in deltas:
                request_id = delta.request_id
                if (call := self._running.get(request_id)) is None:  # the caller no longer waits
                    continue
                if (problem := call.extend(delta, began, now)) is not None:
                    failed.append(request_id)
                    self._take(request_id)
                    self._outbox.resolve(call.future, GenerationError(f"request {request_id!r} {problem}"))
                elif delta.finish_reason is not None:
                    completion = call.completion(delta.finish_reason)
                    if request_id in self._aborting:
                        completion = aborted_late(completion)
                    self._take(request_id)
                    self._outbox.resolve(call.future, completion)
        return tuple(failed)

    def stream(self, *, also_empty: bool) -> None:
        """Send each request its tokens since the last chunk.

        Args:
            also_empty: Whether requests without new tokens receive an empty chunk.
        """
        with self._lock:
            for call in self._running.values():
                if call.on_chunk is not None and (call.num_unstreamed or also_empty):
                    self._outbox.stream(call, call.take_chunk())

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Resolve requests that the engine has forgotten."""
        with self._lock:
            for request_id in request_ids:
                if (call := self._take(request_id)) is not None:
                    self._outbox.resolve(call.future, call.completion(FinishReason.ABORT))
            if not self._aborting:
                self._resolve(self._barriers)

    def pull_of(self, version: int, adapter: str) -> PendingPull:
        """A pending pull of this version."""
        with self._lock:
            return next(pull for pull in self._pulls if (pull.version, pull.adapter) == (version, adapter))

    def pulled(self, version: int, adapter: str, outcome: PullResult | Exception) -> None:
        """Answer the pulls of this version and of older ones."""
        with self._lock:
            answered = [pull for pull in self._pulls if pull.adapter == adapter and pull.version <= version]
            self._pulls = [pull for pull in self._pulls if pull not in answered]
        for pull in answered:
            pull.close()  # runs code of a transport, so without the lock
        with self._lock:
            for pull in answered:
                self._outbox.resolve(pull.future, outcome)

    def loaded(self, version: int, adapter: str, *, running_continue: bool) -> None:
        """Note that the engine has loaded and verified this version, which produces the tokens of all requests that
        join from now on.

        Args:
            running_continue: Whether the version also produces the next tokens of running requests.
        """
        with self._lock:
            self._versions[adapter] = version
            self._distrusted.pop(adapter, None)
            for call in self._running.values() if running_continue else ():
                if call.request.adapter == adapter:
                    call.mark(version)

    def distrust(self, cause: Exception, adapter: str) -> tuple[str, ...]:
        """Fail all requests of an adapter until a pull succeeds. Returns the requests that the engine must forget."""
        with self._lock:
            self._distrusted[adapter] = cause
            running = [call for call in self._running.values() if call.request.adapter == adapter]
            waiting = [call for call in self._waiting.values() if call.request.adapter == adapter]
            for call in waiting:
                del self._waiting[call.request.request_id]
            for call in running:
                self._take(call.request.request_id)
            for call in (*waiting, *running):
                self._outbox.resolve(call.future, self._distrust_error(adapter))
        return tuple(call.request.request_id for call in running)

    def end(self, reason: str, cause: BaseException | None) -> None:
        """Fail everything outstanding, and later calls. Only the first reason is kept."""
        with self._changing():
            if self._ended is None:
                self._ended = (reason, cause)
            calls = (*self._waiting.values(), *self._running.values(), *self._pulls)
            for future in [*(call.future for call in calls), *self._drained]:
                self._outbox.resolve(future, with_cause(EngineDeadError(reason), cause))
            self._resolve(self._barriers)  # there is nothing left to abort
            for outstanding in (self._waiting, self._running, self._aborting, self._pulls, self._drained):
                outstanding.clear()

    def _take(self, request_id: str) -> PendingCall | None:
        """Remove a running call, which is resolved next."""
        self._aborting.discard(request_id)
        return self._running.pop(request_id, None)

    def _distrust_error(self, adapter: str) -> GenerationError:
        cause = self._distrusted[adapter]
        error = GenerationError(f"the loaded weights are unknown, since a pull failed ({cause}); pull again")
        return with_cause(error, cause)

    def _resolve(self, waiters: Waiters) -> None:
        for waiter in waiters:
            self._outbox.resolve(waiter, None)
        waiters.clear()

    @contextmanager
    def _changing(self) -> Generator[None]:
        """Context of a change by a caller. Afterwards it wakes the engine's thread and delivers the results."""
        with self._lock:
            yield
            self._lock.notify()
            self._outbox.send()
