"""A gate between one group's rollouts and what generates for them: a closed one suspends the group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams

Abort = Callable[[Collection[str]], Awaitable[object]]
"""Ends requests by id, which then return with the tokens they have: `GeneratorRouter.abort`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call in flight. Two of the same id are two, whatever becomes of the second."""

    request_id: str
    abort: Abort


class Gate:
    """Open or closed. A rollout behind a closed gate waits where it is, and goes on from its tokens when it opens.

    Example:

        gate = Gate()
        generate = resume_on_abort(gate.guard(router.generate, router.abort), wait_until_resumed=gate.wait)
        gate.close()
        await gate.end_in_flight()   # the engines are free; `generate` has not returned
        gate.open()                  # it goes on, perhaps under newer weights
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight: set[_Call] = set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait(self) -> None:
        await self._open.wait()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    async def end_in_flight(self) -> None:
        """Returns when the requests in flight have been told to end."""
        by_router: dict[Abort, list[str]] = {}
        for call in self._in_flight:
            by_router.setdefault(call.abort, []).append(call.request_id)
        for abort, request_ids in by_router.items():
            await abort(request_ids)

    def guard(self, generate: GenerateFn, abort: Abort) -> GenerateFn:
        """`generate`, whose requests `end_in_flight` ends. One that finds the gate closed returns aborted at once.

        Wrapped in `resume_on_abort`, with `wait` as what it waits for, the interruption is invisible.
        """

        async def guarded(
            prompt_token_ids: Sequence[int],
            *,
            request_id: str,
            session_id: str | None = None,
            sampling: SamplingParams,
        ) -> Completion:
            if not self.is_open:
                return Completion(request_id, [], [], FinishReason.ABORT, ())
            call = _Call(request_id, abort)
            self._in_flight.add(call)
            try:
                return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)
            finally:
                self._in_flight.discard(call)

        return guarded
