"""Retries of calls to a service: growing pauses between them, within a time limit, and reports of its outages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from contextlib import contextmanager

from titan_rl.core.console import LOG, Console

REPORTED_AFTER_S = 5.0
"""Least duration of an outage that is reported, so that a few failed requests are not."""

SILENT_S = 60.0
"""Time without an answer to any request after which a service counts as hanging."""


class Backoff:
    """Pauses before the retries of one call. Each is twice as long as the one before, up to a limit.

    Example:

        backoff = Backoff(0.5, 30.0, limit_s=900.0)
        while True:
            try:
                async with asyncio.timeout(backoff.left_s):
                    return await ask()
            except GenerationError:
                if backoff.is_over:
                    raise
            await backoff.pause()

    Args:
        first_s: Length of the first pause.
        longest_s: Length of the longest pause.
        limit_s: Time for all attempts and pauses, from now on.
    """

    def __init__(self, first_s: float, longest_s: float, *, limit_s: float = math.inf) -> None:
        self.next_s = first_s
        self._longest_s = longest_s
        self._clock = asyncio.get_running_loop().time
        self._ends_at = self._clock() + limit_s

    @property
    def left_s(self) -> float | None:
        """Time left for the next attempt; None without a limit."""
        return None if math.isinf(self._ends_at) else max(0.0, self._ends_at - self._clock())

    @property
    def is_over(self) -> bool:
        """Whether no time would be left for an attempt after the next pause."""
        return self._clock() + self.next_s > self._ends_at

    def extend(self, seconds: float) -> None:
        """Move the end of the time limit, after a wait for which the service is not responsible."""
        self._ends_at += seconds

    async def pause(self) -> None:
        await asyncio.sleep(self.next_s)
        self.next_s = min(2 * self.next_s, self._longest_s)


class Outage:
    """Reports on a console that a service fails, once, and that it answers again.

    Example:

        outage = Outage("the teacher http://10.0.0.1:8000")
        with outage.waiting(limit_s=1800):  # shown if no request is answered for 60 s
            ...
        outage.failed(error, limit_s=1800)  # shown if the first failure was 5 s ago
        outage.answered()  # shown if the outage was shown

    Args:
        service: Name of the service, which begins the messages.
        console: Shows the messages.
    """

    def __init__(self, service: str, console: Console = LOG) -> None:
        self.console = console
        self._service = service
        self._began: float | None = None  # time of the first failure since the last answer
        self._is_reported = False
        self._num_waiting = 0  # requests in flight
        self._silent_since = 0.0  # time of the last answer, or since which requests are in flight

    @property
    def is_on(self) -> bool:
        """Whether no request has been answered since one failed."""
        return self._began is not None

    @contextmanager
    def waiting(self, limit_s: float) -> Generator[None]:
        """Count a request as in flight during the block. A service that answers none for `SILENT_S` seconds has an
        outage.

        Args:
            limit_s: See `failed`.
        """
        loop = asyncio.get_running_loop()
        if not self._num_waiting:
            self._silent_since = loop.time()
        self._num_waiting += 1
        timer = loop.call_later(SILENT_S, self._check_silence, limit_s)
        try:
            yield
        finally:
            timer.cancel()
            self._num_waiting -= 1

    def _check_silence(self, limit_s: float) -> None:
        silent_s = asyncio.get_running_loop().time() - self._silent_since
        if silent_s >= SILENT_S:
            self._began = self._silent_since if self._began is None else self._began
            self.failed(f"it has answered none of {self._num_waiting} requests for {silent_s:.0f} s", limit_s)

    def failed(self, reason: object, limit_s: float) -> None:
        """Note that a request has failed.

        Args:
            reason: Reason of the failure, for the message.
            limit_s: Time for which the request is repeated.
        """
        now = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = now
        if not self._is_reported and now - self._began >= REPORTED_AFTER_S:
            self._is_reported = True
            self.console.warning(
                f"{self._service} fails: {reason}; requests are repeated for up to {limit_s / 60:g} min, and finished "
                "groups wait for it in their slots"
            )

    def answered(self) -> None:
        """Note that a request has been answered."""
        self._silent_since = asyncio.get_running_loop().time()
        if self._is_reported and self._began is not None:
            lasted_s = asyncio.get_running_loop().time() - self._began
            self.console.warning(f"{self._service} answers again, after {lasted_s:.0f} s")
        self._began, self._is_reported = None, False
