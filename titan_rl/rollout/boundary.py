"""The edge to code that is not ours: environments and generation. What goes wrong behind it ends one rollout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from titan_rl.cancellation import asked_to_cancel
from titan_rl.environment.types import TokenEnv
from titan_rl.rollout.types import RolloutStatus
from titan_rl.user_code import Failure, summary

MAX_CLOSE_S = 10.0

logger = logging.getLogger(__name__)


class RolloutEnded(Exception):
    """A rollout is over, with this status and what to say about it."""

    def __init__(self, status: RolloutStatus, error: str | Failure) -> None:
        super().__init__(status, error)
        self.status = status
        self.error = error if isinstance(error, str) else error.error
        self.failure = error if isinstance(error, Failure) else None


@asynccontextmanager
async def ends_with(status: RolloutStatus, deadline: float | None = None) -> AsyncGenerator[None]:
    """What the block raises ends the rollout with `status`, or with ERROR_TIMEOUT once `deadline` has passed.

    Raises:
        RolloutEnded: nothing else, but for a cancellation of the rollout itself.
    """
    timeout = asyncio.timeout_at(deadline)
    try:
        async with timeout:
            yield
    except Exception as error:
        if timeout.expired():
            late = Failure.of(error, f"TimeoutError: {_LIMITS[status]}")
            raise RolloutEnded(RolloutStatus.ERROR_TIMEOUT, late) from error
        raise RolloutEnded(status, Failure.of(error)) from error
    except asyncio.CancelledError as error:
        if asked_to_cancel():
            raise
        # Nobody cancelled this rollout: something it waited for was, such as a future of a client that closed.
        raise RolloutEnded(status, Failure.of(error)) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # such as the SystemExit of a tool that thinks it is a program
        raise RolloutEnded(status, Failure.of(error)) from error


_LIMITS = {
    RolloutStatus.ERROR_ENV: "the environment took longer than env_timeout_s",
    RolloutStatus.ERROR_GENERATE: "the completion took longer than generate_timeout_s",
}


async def close_env(env: TokenEnv, timeout_s: float) -> str | None:
    """Close `env`; return what went wrong. Cancellation waits for that, but not longer than the time limit, which is
    at most `MAX_CLOSE_S`."""
    timeout_s = min(timeout_s, MAX_CLOSE_S)

    async def close() -> None:
        try:
            await env.close()
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error}") from error

    loop = asyncio.get_running_loop()
    closing = loop.create_task(close())
    cancelled: asyncio.CancelledError | None = None
    failure: str | None = None
    for seconds in (timeout_s, 1.0):  # the second is for its handling of being cancelled
        deadline = loop.time() + seconds
        while not closing.done() and (left := deadline - loop.time()) > 0:
            try:
                await asyncio.wait({closing}, timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
        if not closing.done():
            failure = f"TimeoutError: it took longer than {timeout_s:g} s"
            closing.cancel()
    if closing.done() and failure is None:
        error = asyncio.CancelledError() if closing.cancelled() else closing.exception()
        failure = summary(error) if error is not None else None
    if failure is not None:
        logger.warning("closing %s failed: %s", type(env).__name__, failure)
    if cancelled is not None:
        raise cancelled
    return failure
