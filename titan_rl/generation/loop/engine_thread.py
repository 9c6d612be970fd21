"""The engine thread of a loop, which carries out one decision after the other, with its gauges and trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import StateDictError
from titan_rl.core.tracing.spans import Track, count, span
from titan_rl.generation.engine import Engine, GaugedEngine
from titan_rl.generation.loop.calls import Outbox
from titan_rl.generation.loop.ranks import EngineRank, Ranks, Stepping, Weights
from titan_rl.generation.loop.state import LoopAction, LoopDecision, LoopState, PendingPull
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import GaugeSummary, KVPolicy, PullResult

REST_NS = 1_000_000
"""Between two steps, without one for so long, an engine rests; less belongs to its steps."""

TOLD_NS = 500_000_000
"""After so long steps without a rest are told of, many as one."""


class EngineTrack:
    """A lane of the timeline, and the seconds that metrics have of it."""

    def __init__(self) -> None:
        self._track = Track("engine", "generator")
        self._track.enter("idle", idle=True)
        self._begun_ns = time.monotonic_ns()  # of the steps that are told of next
        self._steps = self._tokens = 0

    def rested(self, began_ns: int, *, paused: bool) -> None:
        """There was nothing to decide from then until now."""
        if time.monotonic_ns() - began_ns > REST_NS:
            self._rest("paused" if paused else "idle", began_ns)

    def stepped(self, began_ns: int, num_tokens: int, num_running: int) -> None:
        """A step that began then has ended now."""
        if self._track.state != "generating" or began_ns - self._begun_ns >= TOLD_NS:
            self._tell()
            self._track.enter("generating", at_ns=began_ns)
            self._begun_ns = began_ns
            count("running requests", "generator", requests=num_running)
        self._steps += 1
        self._tokens += num_tokens

    def pulls(self, version: int) -> None:
        """A pull begins."""
        self._tell()
        self._track.enter("pull", kind="sync", version=version)

    def pulled(self) -> None:
        self._rest("idle", time.monotonic_ns())

    def take(self) -> dict[str, float]:
        """Seconds since it was last taken, as counts of an engine's gauges."""
        seconds = self._track.take()
        idle = seconds.pop("idle", 0.0) + seconds.pop("paused", 0.0)
        return {"idle_s": idle, "busy_s": sum(seconds.values())}

    def close(self) -> None:
        self._tell()
        self._track.close()

    def _rest(self, state: str, since_ns: int) -> None:
        if self._track.state == state:
            return
        self._tell()
        self._track.enter(state, idle=True, at_ns=since_ns)
        count("running requests", "generator", requests=0)

    def _tell(self) -> None:
        if self._steps:
            self._track.note(steps=self._steps, tokens=self._tokens)
        self._steps = self._tokens = 0


_TOTAL = "_total"


class GaugeWindow:
    """The gauges of one engine since the window was last taken. Of one that reports none there is nothing.

    Args:
        engine: asked now, for what its totals begin from.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine if isinstance(engine, GaugedEngine) else None
        self._now = self._read()
        self._before = self._now
        self._begin()

    def note_step(self) -> None:
        """The engine has taken a step."""
        if self._engine is None:
            return
        self._num_steps += 1
        self._now = self._read()
        for name, value in self._now.items():
            if not name.endswith(_TOTAL):
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._maxima[name] = max(self._maxima.get(name, value), value)

    def take(self, more: Mapping[str, float]) -> GaugeSummary:
        """The window so far; the next one begins.

        Args:
            more: counts that are not the engine's own.
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
"""While an engine steps, every request is told of its tokens this often at least, also if there are none: that is how
a router knows an engine that is busy with others from one that hangs."""


def run_engine(
    make_engine: Callable[[], Engine],
    make_ranks: Callable[[], Ranks],
    state: LoopState,
    kv_policy: KVPolicy,
    stream_interval: int,
    stepping: Stepping,
) -> None:
    """The whole life of an engine, in the thread that alone touches it. Raises nothing: the reason goes to `state`.

    Consumes: decisions, one at a time, which `state` makes of what callers have asked for.
    Waits for: the next decision, and the engine while it steps or loads. Callers are told, and never waited for.
    Produces: completions, chunks of tokens and outcomes of pulls, in an outbox that is sent after each decision.
    Unblocked by: any caller's request, abort, pull, pause, resume or close.
    Ends: by `close`, or a failure of the engine. Whatever is outstanding then fails, and later calls fail at once.
    """
    engine, ranks, driver, reason, cause = None, None, None, "the engine loop is closed", None
    outbox = Outbox()
    try:
        engine = make_engine()
        ranks = make_ranks()
        driver = EngineDriver(EngineRank(engine, ranks, kv_policy, stepping), ranks, state, outbox, stream_interval)
        while (decision := driver.next_decision()).action is not LoopAction.CLOSE:
            driver.follow(decision)
            outbox.send()
        ranks.broadcast(decision)
    except BaseException as error:
        logger.exception("the engine failed")
        reason, cause = f"the engine failed: {summary(error)}", error
    outbox.send()
    state.end(reason, cause)
    for part in (driver, ranks, engine):
        if part is not None:
            try:
                part.close()
            except Exception:
                logger.exception("%r failed to close", part)


class EngineDriver:
    """Follows one decision at a time, on rank 0, after telling the other ranks."""

    def __init__(self, rank: EngineRank, ranks: Ranks, state: LoopState, outbox: Outbox, stream_interval: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._state = state
        self._outbox = outbox
        self._stream_interval = stream_interval
        self._unstreamed_steps = 0
        self._told_at = state.clock.now()
        self._gauges = GaugeWindow(rank.engine)
        self._track = EngineTrack()

    def next_decision(self) -> LoopDecision:
        """Waits until there is something to do."""
        began_ns, paused = time.monotonic_ns(), self._state.paused is not None
        decision = self._state.decide()
        self._track.rested(began_ns, paused=paused)
        return decision

    def close(self) -> None:
        self._track.close()

    def follow(self, decision: LoopDecision) -> None:
        self._ranks.broadcast(decision)
        match decision.action:
            case LoopAction.PULL:
                assert decision.version is not None
                self._pull(decision.version)
            case LoopAction.ABORT:
                self._rank.abort(decision.request_ids)
                self._state.aborted(decision.request_ids, self._outbox)
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
            self._told_at = began  # it was idle
        rejected, deltas = self._rank.step(joining)
        self._gauges.note_step()
        self._track.stepped(began_ns, len(deltas), self._state.num_running)
        if failed := self._state.absorb(rejected, deltas, began, self._outbox):
            self._abort(failed)
        self._stream()

    def _stream(self) -> None:
        """Every `stream_interval` steps tell of the tokens since. All requests at once, because a message costs more
        than what is in it; a step gives a request one token, so none is further behind than the interval."""
        self._unstreamed_steps += 1
        now = self._state.clock.now()
        is_sign = now - self._told_at >= SIGN_S
        if self._unstreamed_steps < self._stream_interval and not is_sign:
            return
        self._unstreamed_steps = 0
        if is_sign:
            self._told_at = now
        self._state.stream(self._outbox, also_empty=is_sign)

    def _pull(self, version: int) -> None:
        """Load the newest of the pulls that wait; those of older versions share its outcome."""
        newest = self._state.pull_of(version)
        self._track.pulls(version)
        outcome: PullResult | StateDictError
        try:
            weights = self._rank.open(lambda: Weights(newest.items, newest.verify, newest.published))
        except StateDictError as error:
            outcome = error
        else:
            try:
                outcome = self._load(newest, weights)
            except StateDictError as error:
                self._distrust(error)
                outcome = error
        self._track.pulled()
        self._state.pulled(version, outcome, self._outbox)

    def _load(self, pull: PendingPull, weights: Weights) -> PullResult:
        state = self._state
        began = state.clock.now()
        with span("load", "sync"):
            self._rank.load(weights, pull.version)
        loaded = state.clock.now()
        with span("read back", "sync"):
            readback = self._rank.read_back(weights, pull.version)
        read = state.clock.now()
        with span("verify", "sync"):
            self._rank.verify(weights)
        done = state.clock.now()
        state.loaded(pull.version)
        return PullResult(
            pull.version,
            load_s=loaded - began,
            readback_s=read - loaded,
            verify_s=done - loaded,
            stall_s=done - began,
            gauges=self._gauges.take(self._track.take()),
            readback=readback,
        )

    def _distrust(self, cause: Exception) -> None:
        self._abort(self._state.distrust(cause, self._outbox))

    def _abort(self, orphans: tuple[str, ...]) -> None:
        """Have every rank forget requests whose calls have failed."""
        self._ranks.broadcast(LoopDecision(LoopAction.ABORT, request_ids=orphans))
        self._rank.abort(orphans)
