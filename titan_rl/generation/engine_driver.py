"""The engine thread's part of an engine loop: do what was decided, and hand back what the engine produced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from titan_rl.errors import GenerationError, RequestError, StateDictError
from titan_rl.generation.engine import Engine, EngineRequest, TokenDelta
from titan_rl.generation.loop_decision import LoopAction, LoopDecision
from titan_rl.generation.loop_state import LoopState, PendingPull
from titan_rl.generation.pending import Outbox, PendingCall, with_cause
from titan_rl.generation.types import KVPolicy, PullResult
from titan_rl.types import FinishReason

logger = logging.getLogger(__name__)


def run_engine(
    make_engine: Callable[[], Engine],
    state: LoopState,
    kv_policy: KVPolicy,
    stream_interval: int,
) -> None:
    """The whole life of an engine, in the thread that alone touches it. Raises nothing: the reason goes to `state`."""
    engine, reason, cause = None, "the engine loop is closed", None
    outbox = Outbox()
    try:
        engine = make_engine()
        driver = EngineDriver(engine, state, outbox, kv_policy, stream_interval)
        while (decision := state.decide()).action is not LoopAction.CLOSE:
            driver.follow(decision)
            outbox.send()
    except BaseException as error:
        logger.exception("the engine failed")
        reason, cause = f"the engine failed: {type(error).__name__}: {error}", error
    outbox.send()
    state.end(reason, cause)
    if engine is not None:
        try:
            engine.close()
        except Exception:
            logger.exception("the engine failed to close")


class EngineDriver:
    """Follows one decision at a time."""

    def __init__(
        self, engine: Engine, state: LoopState, outbox: Outbox, kv_policy: KVPolicy, stream_interval: int
    ) -> None:
        self._engine = engine
        self._state = state
        self._outbox = outbox
        self._kv_policy = kv_policy
        self._stream_interval = stream_interval
        self._unstreamed_steps = 0

    def follow(self, decision: LoopDecision) -> None:
        match decision.action:
            case LoopAction.PULL:
                self._pull()
            case LoopAction.ABORT:
                if decision.request_ids:
                    self._engine.abort(decision.request_ids)
                self._state.aborted(decision.request_ids, self._outbox)
            case _:
                for request in decision.requests:
                    self._add(request)
                self._absorb(self._engine.step())
                self._stream()

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except Exception as error:
            # What the engine did not foresee in one request is still no reason to fail the others.
            if not isinstance(error, RequestError):
                error = with_cause(GenerationError(f"request {request.request_id!r} was not accepted: {error}"), error)
            self._state.reject(request.request_id, error, self._outbox)

    def _absorb(self, deltas: Iterable[TokenDelta]) -> None:
        """Hand what the engine produced to the calls it is for."""
        state, finished = self._state, list[tuple[PendingCall, FinishReason]]()
        with state.lock:
            now = state.clock()
            for delta in deltas:
                call = state.running.get(delta.request_id)
                if call is None:  # its caller no longer waits
                    continue
                call.extend(delta, now)
                if delta.finish_reason is not None:
                    finished.append((call, delta.finish_reason))
            state.finish(finished, self._outbox)

    def _stream(self) -> None:
        """Every `stream_interval` steps tell of the tokens since. All requests at once, because a message costs more
        than what is in it; a step gives a request one token, so none is further behind than the interval."""
        self._unstreamed_steps += 1
        if self._unstreamed_steps < self._stream_interval:
            return
        self._unstreamed_steps = 0
        with self._state.lock:
            for call in self._state.running.values():
                if call.on_tokens is not None and call.num_unstreamed:
                    self._outbox.call(call.future.get_loop(), call.on_tokens, call.take_chunk())

    def _pull(self) -> None:
        """Load the newest of the pulls that wait; the others share its outcome."""
        state = self._state
        with state.lock:
            pulls = list(state.pulls)
        newest = max(pulls, key=lambda pull: pull.version)
        began = state.clock()
        try:
            self._load(newest)
            loaded = state.clock()
            if newest.verify is not None:
                newest.verify(self._engine)
        except Exception as error:
            outcome: PullResult | StateDictError = self._distrust(newest.version, error)
        else:
            done = state.clock()
            outcome = PullResult(newest.version, loaded - began, done - loaded, done - began)
            state.distrusted = None
            # Verifying may have advanced running requests, under these weights and not the next ones.
            self._absorb(self._engine.flush())
        for pull in pulls:
            if (close := getattr(pull.source, "close", None)) is not None:
                close()
        state.pulled(pulls, outcome, self._outbox)

    def _load(self, pull: PendingPull) -> None:
        state = self._state
        self._engine.load_state_dict(pull.items, pull.version)
        state.version = pull.version
        with state.lock:
            for call in state.running.values():
                call.mark(pull.version)
        # KV computed under unknown weights is never offered again, whatever the policy.
        if self._kv_policy.reset_prefix_cache or state.distrusted is not None:
            self._engine.reset_prefix_cache(recompute_running=self._kv_policy.running == "recompute")

    def _distrust(self, version: int, cause: Exception) -> StateDictError:
        orphans = self._state.distrust(cause, self._outbox)
        self._engine.abort(orphans)
        self._engine.flush()
        if isinstance(cause, StateDictError):
            return cause
        return with_cause(
            StateDictError(f"version {version} could not be loaded: {type(cause).__name__}: {cause}"), cause
        )
