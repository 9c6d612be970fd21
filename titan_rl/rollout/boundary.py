"""The edge to code that is not ours: environments and generation. What goes wrong behind it ends one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from titan_rl.cancellation import asked_to_cancel
from titan_rl.rollout.types import RolloutStatus
from titan_rl.user_code import Failure


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
