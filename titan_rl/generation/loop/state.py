"""State that an engine loop's callers share with its thread, and the decision rule of the thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any

from titan_rl.core.calls.user_code import summary, with_cause
from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.errors import EngineDeadError, GenerationError, StateDictError, UnavailableWeightsError
from titan_rl.core.tensor_checksum import TensorChecksum
from titan_rl.generation.engine import LoadedPolicy, TokenDelta
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


Items = Iterable[tuple[str, Any]]
Verify = Callable[[LoadedPolicy], object]


@dataclass(frozen=True, slots=True)
class Weights:
    """One version as a rank reads it."""

    items: Items
    verify: Verify | None = None  # checks the loaded engine, and raises if the weights are wrong
    published: Mapping[str, TensorChecksum] = field(default_factory=dict[str, TensorChecksum])
    pinned: int | None = None  # version that an engine which pins versions keeps beside this one


class PendingPull:
    """One `pull` call. Constructed in the caller's event loop; see `EngineLoop.pull` for the arguments."""

    def __init__(self, version: int, manifest: Any, adapter: str = "") -> None:
        self.version = version
        self.adapter = adapter
        self.manifest = manifest
        self.future: asyncio.Future[PullResult] = asyncio.get_running_loop().create_future()
        self.weights = Weights(())
        self._source: Any = None

    def open(
        self, make_items: Callable[[], Items], verify: Verify | None, published: Any, pinned: int | None = None
    ) -> None:
        """Read the first pair, before which a transport does all its checks, and put it back.

        Raises:
            UnavailableWeightsError: the version could not be opened or read.
        """
        try:
            self._source = iter(make_items())
            first = next(self._source, None)
        except StateDictError as error:
            raise UnavailableWeightsError(str(error)) from error
        except BaseException as error:  # CancelledError would look like the caller's; futures cannot hold StopIteration
            raise UnavailableWeightsError(f"version {self.version} could not be opened: {summary(error)}") from error
        items = () if first is None else chain([first], self._source)
        self.weights = Weights(items, verify, published or {}, pinned)

    def close(self) -> None:
        """Close the source of the items. An error is only logged, because the weights were loaded and verified."""
        try:
            if (close := getattr(self._source, "close", None)) is not None:
                close()
        except BaseException:  # raised by a transport, of any type
            logger.exception("the source of version %d failed to close", self.version)


Waiters = list[asyncio.Future[None]]


class LoopState:
    """Monitor that callers and the engine's thread share. Each method takes the lock, for a few dictionary operations;
    only `decide` waits, and releases the lock meanwhile.

    Futures are resolved in their event loops, through an `Outbox`: callers' methods send it before they return, the
    engine's thread sends it after each decision with `send_results`.
    """

    def __init__(self, version: int, clock: Clock = CLOCK) -> None:
        self.clock = clock
        self._lock = threading.Condition()  # reentrant; the engine's thread waits on it
        self._outbox = Outbox()
        # The newest version that was loaded and verified, by adapter ("" for the model). Versions never go back.
        self._versions: defaultdict[str, int] = defaultdict(lambda: version)
        self._calls = PendingCalls(self._outbox)
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
        with self._changing():
            self.require_alive()
            if self._paused is not None and self._paused.ends_requests:
                self._outbox.resolve(call.future, call.completion(FinishReason.ABORT))
            elif (adapter := call.request.adapter) in self._distrusted:
                raise self._distrust_error(adapter)
            else:
                self._calls.add(call)

    def forget(self, call: PendingCall) -> None:
        """Free a request whose caller was cancelled."""
        with self._changing():
            self._calls.forget(call)

    def abort(self, request_ids: Iterable[str] | None, barrier: asyncio.Future[None]) -> None:
        """Resolve requests that the engine has not seen. `barrier` resolves when the engine has forgotten the
        others."""
        with self._changing():
            self._calls.abort(request_ids)
            if self._ended is None:
                self._barriers.append(barrier)
            else:
                self._outbox.resolve(barrier, None)

    def give_up(self) -> int:
        """Resolve the calls that are being aborted, without waiting for the engine. Returns their number."""
        with self._changing():
            return self._calls.give_up()

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
                    f" weights loaded are unknown ({cause}), so pull version {loaded} or a newer one"
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
        calls = self._calls
        if self._closing:
            return LoopDecision(LoopAction.CLOSE)
        if self._asleep and (self._pulls or self._paused is not PauseMode.SLEEP):
            return LoopDecision(LoopAction.WAKE)
        if self._pulls:
            adapter = self._pulls[0].adapter
            of_adapter = [pull for pull in self._pulls if pull.adapter == adapter]
            newest = max(of_adapter, key=lambda pull: pull.version)
            return LoopDecision(LoopAction.PULL, newest.version, adapter, newest.manifest)
        if calls.aborting or self._barriers:
            return LoopDecision(LoopAction.ABORT, request_ids=tuple(calls.aborting))
        if self._to_sleep and not self._asleep:
            return LoopDecision(LoopAction.SLEEP)
        if self._paused is None and len(calls):
            return LoopDecision(LoopAction.STEP, requests=calls.admit(self._versions))
        if self._paused is PauseMode.WAIT and calls.running:
            return LoopDecision(LoopAction.STEP)
        return None

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
        """Record the outcome of a step.

        Returns:
            Requests that failed, which the engine is to forget.
        """
        with self._lock:
            self._calls.reject(rejected)
            return self._calls.absorb(deltas, began, self.clock.now())

    def stream(self, *, also_empty: bool) -> None:
        """Send each request its tokens since the last chunk; see `PendingCalls.stream`."""
        with self._lock:
            self._calls.stream(also_empty=also_empty)

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Resolve requests that the engine has forgotten."""
        with self._lock:
            self._calls.aborted(request_ids)
            if not self._calls.aborting:
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
            if running_continue:
                self._calls.mark(version, adapter)

    def distrust(self, cause: Exception, adapter: str) -> tuple[str, ...]:
        """Fail all requests of an adapter until a pull succeeds. Returns the requests that the engine is to forget."""
        with self._lock:
            self._distrusted[adapter] = cause
            calls, running = self._calls.clear(adapter)
            for call in calls:
                self._outbox.resolve(call.future, self._distrust_error(adapter))
        return running

    def end(self, reason: str, cause: BaseException | None) -> None:
        """Fail everything outstanding, and later calls. Only the first reason is kept."""
        with self._changing():
            if self._ended is None:
                self._ended = (reason, cause)
            calls, _ = self._calls.clear()
            for future in [*(call.future for call in (*calls, *self._pulls)), *self._drained]:
                self._outbox.resolve(future, with_cause(EngineDeadError(reason), cause))
            self._resolve(self._barriers)  # there is nothing left to abort
            self._pulls.clear()
            self._drained.clear()

    def _distrust_error(self, adapter: str) -> GenerationError:
        cause = self._distrusted[adapter]
        error = GenerationError(f"the weights loaded are unknown, since a pull failed ({cause}); pull again")
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
