"""The open `generate` calls of an engine loop: which wait, which run, and which the engine is to forget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.engine import TokenDelta, problem_of
from titan_rl.generation.loop.outbox import Outbox
from titan_rl.generation.loop.pending_call import PendingCall
from titan_rl.generation.partial import aborted_late
from titan_rl.generation.request import EngineRequest
from titan_rl.types import FinishReason


class PendingCalls:
    """A call waits until a step lets it join the batch, and then runs until it is resolved. Part of a `LoopState`,
    which alone touches it, and under its lock."""

    def __init__(self) -> None:
        self.waiting: dict[str, PendingCall] = {}
        self.running: dict[str, PendingCall] = {}
        self.aborting: set[str] = set()  # running requests that the engine is to forget

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, call: PendingCall) -> None:
        """Have it wait.

        Raises:
            RequestError: its id is in flight, and not being freed.
        """
        request_id = call.request.request_id
        being_freed = request_id in self.aborting
        if request_id in self.waiting or (request_id in self.running and not being_freed):
            raise RequestError(f"request_id {request_id!r} is already in flight; ids must be unique")
        self.waiting[request_id] = call

    def forget(self, call: PendingCall) -> None:
        """Its caller is gone."""
        request_id = call.request.request_id
        if self.waiting.get(request_id) is call:
            del self.waiting[request_id]
        elif self.running.get(request_id) is call:
            self.aborting.add(request_id)

    def abort(self, request_ids: Iterable[str] | None, outbox: Outbox) -> None:
        """Resolve what the engine has not seen, and have it forget the rest. None aborts all."""
        for request_id in [*self.waiting, *self.running] if request_ids is None else request_ids:
            if (call := self.waiting.pop(request_id, None)) is not None:
                outbox.resolve(call.future, call.completion(FinishReason.ABORT))
            if request_id in self.running:
                self.aborting.add(request_id)

    def give_up(self, outbox: Outbox) -> int:
        """Resolve those whose abort the engine does not get round to, and return how many."""
        calls = [self.running.pop(request_id) for request_id in self.aborting if request_id in self.running]
        for call in calls:
            outbox.resolve(call.future, call.completion(FinishReason.ABORT))
        return len(calls)

    def admit(self, version: int) -> tuple[EngineRequest, ...]:
        """Those that wait join the batch, whose next tokens are of `version`."""
        admitted = tuple(self.waiting.values())
        self.running.update(self.waiting)
        self.waiting.clear()
        for call in admitted:
            call.admit(version, len(self.running))
        return tuple(call.request for call in admitted)

    def mark(self, version: int) -> None:
        """Tokens from here on are of `version`."""
        for call in self.running.values():
            call.mark(version)

    def absorb(self, deltas: Iterable[TokenDelta], began: float, now: float, outbox: Outbox) -> tuple[str, ...]:
        """Hand what a step produced to the calls it is for.

        Returns:
            the requests that failed by it, which the engine is to forget.
        """
        failed: list[str] = []
        for delta in deltas:
            call = self.running.get(delta.request_id)
            if call is None:  # its caller no longer waits
                continue
            problem = problem_of(delta, call.request)
            if problem is None:
                try:
                    call.extend(delta, began, now)
                except (TypeError, OverflowError) as error:
                    problem = f"got what are no tokens: {error}"
            if problem is not None:
                self._reject(delta.request_id, GenerationError(f"request {delta.request_id!r} {problem}"), outbox)
                failed.append(delta.request_id)
                continue
            if delta.finish_reason is not None:
                self._finish(call, delta.finish_reason, outbox)
        return tuple(failed)

    def reject(self, errors: Mapping[str, Exception], outbox: Outbox) -> None:
        """The engine did not take these."""
        for request_id, error in errors.items():
            self._reject(request_id, error, outbox)

    def stream(self, outbox: Outbox, *, also_empty: bool) -> None:
        """Tell of the tokens since this was called last, or also of none."""
        for call in self.running.values():
            if call.on_chunk is not None and (call.num_unstreamed or also_empty):
                outbox.call(call.future.get_loop(), call.on_chunk, call.take_chunk())

    def aborted(self, request_ids: Iterable[str], outbox: Outbox) -> None:
        """The engine has forgotten these."""
        for request_id in request_ids:
            self.aborting.discard(request_id)
            if (call := self.running.pop(request_id, None)) is not None:
                outbox.resolve(call.future, call.completion(FinishReason.ABORT))

    def clear(self) -> tuple[Sequence[PendingCall], tuple[str, ...]]:
        """Know of none any more.

        Returns:
            all calls, for their owner to fail, and the ids of those that ran.
        """
        calls, running = [*self.waiting.values(), *self.running.values()], tuple(self.running)
        self.waiting.clear()
        self.running.clear()
        self.aborting.clear()
        return calls, running

    def _finish(self, call: PendingCall, finish_reason: FinishReason, outbox: Outbox) -> None:
        request_id = call.request.request_id
        del self.running[request_id]
        completion = call.completion(finish_reason)
        if request_id in self.aborting:
            self.aborting.discard(request_id)
            completion = aborted_late(completion)
        outbox.resolve(call.future, completion)

    def _reject(self, request_id: str, error: Exception, outbox: Outbox) -> None:
        self.aborting.discard(request_id)
        if (call := self.running.pop(request_id, None)) is not None:
            outbox.resolve(call.future, error)
