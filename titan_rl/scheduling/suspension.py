"""Suspending a group: its requests end, and it goes on later from the tokens it has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams

Abort = Callable[[Collection[str]], Awaitable[object]]
"""Ends requests by id, which then return with the tokens they have: `GeneratorRouter.abort`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call in flight. Two of the same id are two, whatever becomes of the second."""

    request_id: str
    abort: Abort


class Suspension:
    """Suspension of one group's generation. Its rollouts wait while it is suspended, and continue from their tokens.

    Example:

        suspension = Suspension()
        generate = resume_on_abort(suspension.guard(router.generate, router.abort),
                                   wait_until_resumed=suspension.wait_resumed)
        suspension.suspend()
        await suspension.abort_in_flight()   # the engines are free; `generate` has not returned
        suspension.resume()                  # it goes on, perhaps under newer weights
    """

    def __init__(self) -> None:
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._in_flight: set[_Call] = set()

    @property
    def is_suspended(self) -> bool:
        return not self._resumed.is_set()

    async def wait_resumed(self) -> None:
        await self._resumed.wait()

    def resume(self) -> None:
        self._resumed.set()

    def suspend(self) -> None:
        """From now on no request begins. `abort_in_flight` ends those that have."""
        self._resumed.clear()

    async def abort_in_flight(self) -> None:
        """Returns when the requests in flight have been told to end."""
        by_router: dict[Abort, list[str]] = {}
        for call in self._in_flight:
            by_router.setdefault(call.abort, []).append(call.request_id)
        for abort, request_ids in by_router.items():
            await abort(request_ids)

    @contextmanager
    def request(self, request_id: str, abort: Abort) -> Generator[bool]:
        """A request for the length of the block, which `abort_in_flight` ends.

        Yields:
            whether it may be sent. While the group is suspended it may not, and counts as aborted.
        """
        if self.is_suspended:
            yield False
            return
        call = _Call(request_id, abort)
        self._in_flight.add(call)
        try:
            yield True
        finally:
            self._in_flight.discard(call)

    def guard(self, generate: GenerateFn, abort: Abort) -> GenerateFn:
        """`generate`, whose requests `abort_in_flight` ends. One made while it is suspended returns aborted at once.

        Wrapped in `resume_on_abort`, with `wait_resumed` as what it waits for, the interruption is invisible.
        """

        async def guarded(
            prompt_token_ids: Sequence[int],
            *,
            request_id: str,
            session_id: str | None = None,
            sampling: SamplingParams,
        ) -> Completion:
            with self.request(request_id, abort) as may_be_sent:
                if not may_be_sent:
                    return Completion(request_id, [], [], FinishReason.ABORT, ())
                return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)

        return guarded
