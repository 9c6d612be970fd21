"""Engine thread of a loop: follows one decision after the other, with gauges and a trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import StateDictError
from titan_rl.core.tracing.spans import Track, count, span
from titan_rl.generation.engine import Engine, GaugedEngine
from titan_rl.generation.loop.calls import PendingPull
from titan_rl.generation.loop.ranks import CANNOT_OPEN, EngineRank
from titan_rl.generation.loop.state import LoopAction, LoopDecision, LoopState
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import GaugeSummary, PullResult

REST_NS = 1_000_000
"""An engine without a step for this time is idle; a shorter gap belongs to its steps."""

SPAN_NS = 500_000_000
"""Consecutive steps are traced as one span, up to this length."""


class EngineTrack:
    """Lane of an engine in the timeline, and its seconds of each state for metrics."""

    def __init__(self) -> None:
        self._track = Track("engine", "generator")
        self._track.enter("idle", idle=True)
        self._span_start_ns = time.monotonic_ns()  # start of the current span of steps
        self._steps = self._tokens = 0

    def rested(self, began_ns: int, *, paused: bool) -> None:
        """Note that there has been nothing to do since `began_ns`, by `time.monotonic_ns`."""
        if time.monotonic_ns() - began_ns > REST_NS:
            self._rest("paused" if paused else "idle", began_ns)

    def stepped(self, began_ns: int, num_tokens: int, num_running: int) -> None:
        """Note the end of a step that began at `began_ns`."""
        if self._track.state != "generating" or began_ns - self._span_start_ns >= SPAN_NS:
            self._note_steps()
            self._track.enter("generating", at_ns=began_ns)
            self._span_start_ns = began_ns
            count("running requests", "generator", requests=num_running)
        self._steps += 1
        self._tokens += num_tokens

    def pulls(self, version: int) -> None:
        """Note the start of a pull."""
        self._note_steps()
        self._track.enter("pull", kind="sync", version=version)

    def pulled(self) -> None:
        self._rest("idle", time.monotonic_ns())

    def take(self) -> dict[str, float]:
        """Idle and busy seconds since the last call, as counts of an engine's gauges."""
        seconds = self._track.take()
        idle = seconds.pop("idle", 0.0) + seconds.pop("paused", 0.0)
        return {"idle_s": idle, "busy_s": sum(seconds.values())}

    def close(self) -> None:
        self._note_steps()
        self._track.close()

    def _rest(self, state: str, since_ns: int) -> None:
        if self._track.state == state:
            return
        self._note_steps()
        self._track.enter(state, idle=True, at_ns=since_ns)
        count("running requests", "generator", requests=0)

    def _note_steps(self) -> None:
        if self._steps:
            self._track.note(steps=self._steps, tokens=self._tokens)
        self._steps = self._tokens = 0


_TOTAL = "_total"


class GaugeWindow:
    """Gauges of one engine since the window was last taken. Empty for an engine without gauges.

    Args:
        engine: Engine whose totals are read now, as the base of the first window.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine if isinstance(engine, GaugedEngine) else None
        self._now = self._read()
        self._before = self._now
        self._begin()

    def note_step(self) -> None:
        """Read the gauges after a step."""
        if self._engine is None:
            return
        self._num_steps += 1
        self._now = self._read()
        for name, value in self._now.items():
            if not name.endswith(_TOTAL):
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._maxima[name] = max(self._maxima.get(name, value), value)

    def take(self, more: Mapping[str, float]) -> GaugeSummary:
        """Summary of the window. The next one begins.

        Args:
            more: Further counts, which are not gauges of the engine.
        """
        totals = dict(more) | {
            name.removesuffix(_TOTAL): value - self._before.get(name, 0.0)
            for name, value in self._now.items()
            if name.endswith(_TOTAL)
        }
        summary = GaugeSummary(self._num_steps, self._sums, self._maxima, totals)
        self._before = self._now
        self._begin()
        return summary

    def _read(self) -> Mapping[str, float]:
        return {} if self._engine is None else {name: float(value) for name, value in self._engine.gauges().items()}

    def _begin(self) -> None:
        self._num_steps = 0
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}


logger = logging.getLogger(__name__)

SIGN_S = 1.0
"""While an engine steps, every request gets a chunk at least this often, without tokens if there are none. This tells
an engine that is busy with other requests from a hanging one."""


def run_engine(rank: EngineRank, state: LoopState, stream_interval: int) -> None:
    """Drive an engine for its whole life, in the only thread that uses it. Raises nothing: the reason goes to `state`.

    Consumes: decisions of `state`, one at a time.
    Waits for: the next decision, and the engine while it steps or loads. It never waits for callers.
    Produces: completions, chunks of tokens and outcomes of pulls, delivered after each decision.
    Unblocked by: any caller's request, abort, pull, pause, resume or close.
    Ends: after `close` or a failure of the engine. Everything outstanding then fails, and later calls fail at once.
    """
    driver, reason, cause = None, "the engine loop is closed", None
    try:
        rank.start()
        driver = EngineDriver(rank, state, stream_interval)
        while (decision := driver.next_decision()).action is not LoopAction.CLOSE:
            driver.follow(decision)
            state.send_results()
        rank.ranks.broadcast(decision)
    except BaseException as error:
        logger.exception("the engine failed")
        reason, cause = f"the engine failed: {summary(error)}", error
    state.send_results()
    state.end(reason, cause)
    if driver is not None:
        driver.close()
    rank.close()


class EngineDriver:
    """Follows one decision at a time on rank 0, after sending it to the other ranks."""

    def __init__(self, rank: EngineRank, state: LoopState, stream_interval: int) -> None:
        self._rank = rank
        self._state = state
        self._stream_interval = stream_interval
        self._unstreamed_steps = 0
        self._streamed_at = state.clock.now()
        self._gauges = GaugeWindow(rank.engine)
        self._track = EngineTrack()

    def next_decision(self) -> LoopDecision:
        """Wait until there is something to do."""
        began_ns, paused = time.monotonic_ns(), self._state.paused is not None
        decision = self._state.decide()
        self._track.rested(began_ns, paused=paused)
        return decision

    def close(self) -> None:
        self._track.close()

    def follow(self, decision: LoopDecision) -> None:
        self._rank.ranks.broadcast(decision)
        match decision.action:
            case LoopAction.PULL:
                assert decision.version is not None
                self._pull(decision.version, decision.adapter)
            case LoopAction.ABORT:
                self._rank.abort(decision.request_ids)
                self._state.aborted(decision.request_ids)
            case LoopAction.SLEEP:
                self._rank.sleep()
                self._state.slept()
            case LoopAction.WAKE:
                self._rank.wake()
                self._state.woken()
            case _:
                self._step(decision.requests)

    def _step(self, joining: Sequence[EngineRequest]) -> None:
        began, began_ns = self._state.clock.now(), time.monotonic_ns()
        if len(joining) == self._state.num_running:
            self._streamed_at = began  # the engine was idle
        rejected, deltas = self._rank.step(joining)
        self._gauges.note_step()
        self._track.stepped(began_ns, len(deltas), self._state.num_running)
        self._forget(self._state.absorb(rejected, deltas, began))
        self._stream()

    def _stream(self) -> None:
        """Every `stream_interval` steps, send the new tokens of all requests, because a message costs more than its
        content. A step gives a request one token, so no request is further behind than the interval."""
        self._unstreamed_steps += 1
        now = self._state.clock.now()
        is_sign = now - self._streamed_at >= SIGN_S
        if self._unstreamed_steps < self._stream_interval and not is_sign:
            return
        self._unstreamed_steps = 0
        if is_sign:
            self._streamed_at = now
        self._state.stream(also_empty=is_sign)

    def _pull(self, version: int, adapter: str) -> None:
        """Load the newest of an adapter's waiting pulls; pulls of older versions share its outcome."""
        newest = self._state.pull_of(version, adapter)
        self._track.pulls(version)
        is_open = False
        outcome: PullResult | StateDictError
        try:
            with self._rank.together(CANNOT_OPEN):
                pass  # rank 0 has opened the version already, outside this thread
            is_open = True
            outcome = self._load(newest)
        except StateDictError as error:
            outcome = error
            if is_open:
                self._forget(self._state.distrust(error, adapter))
        self._track.pulled()
        self._state.pulled(version, adapter, outcome)

    def _load(self, pull: PendingPull) -> PullResult:
        state, weights = self._state, pull.weights
        began = state.clock.now()
        with span("load", "sync"):
            self._rank.load(weights, pull.version, pull.adapter)
        loaded = state.clock.now()
        with span("read back", "sync"):
            readback = self._rank.read_back(weights, pull.version, pull.adapter)
        read = state.clock.now()
        with span("verify", "sync"):
            self._rank.verify(weights, pull.adapter)
        done = state.clock.now()
        state.loaded(pull.version, pull.adapter, running_continue=not self._rank.pins_versions)
        return PullResult(
            pull.version,
            load_s=loaded - began,
            readback_s=read - loaded,
            verify_s=done - loaded,
            stall_s=done - began,
            gauges=self._gauges.take(self._track.take()),
            readback=readback,
        )

    def _forget(self, request_ids: tuple[str, ...]) -> None:
        """Make every rank forget requests whose calls have failed."""
        if request_ids:
            self._rank.ranks.broadcast(LoopDecision(LoopAction.ABORT, request_ids=request_ids))
            self._rank.abort(request_ids)
