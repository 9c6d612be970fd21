"""How a run is stopped: a signal cancels it, and it ends as on a failure, with a checkpoint and no process left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast

from titan_rl.core.errors import TitanRLError
from titan_rl.run.machine.stop_signals import StopSignals

logger = logging.getLogger(__name__)

STOPPING = (
    "stopping: a step that is being trained is finished, and what is trained is saved; once more ends the run at once, "
    "without saving"
)
STOPPING_EARLY = (
    "stopping: the run is still being set up, and has trained nothing that is not saved; once more ends it at once"
)


async def run_until_signal(run: Coroutine[Any, Any, None], signals: StopSignals, failed: Callable[[], str]) -> int:
    """
    Args:
        failed: says where things stand after an error.

    Returns:
        exit code: 0, or 128 + the number of the signal that ended the run in order.

    Raises:
        Exception: what ended the run, with a note of where things stand.
    """
    task = asyncio.ensure_future(run)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        task.cancel()
        signals.reacted()

    failure: BaseException | None = None
    try:
        with signals.stopping_with(lambda: loop.call_soon_threadsafe(stop)):
            await task
    except asyncio.CancelledError:
        if signals.received is None:
            raise
        return 128 + signals.received
    except BaseExceptionGroup as group:
        logger.error("the run ended", exc_info=group)
        failure = first_cause(group)
    except Exception as error:
        logger.error("the run ended", exc_info=error)
        failure = error
    if failure is not None:  # outside the handlers, so that its cause stays its own
        failure.add_note(failed())
        raise failure
    return 0


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the run: titan_rl's own before others, and the first of several."""
    leaves = list(_leaves(group))
    return next((error for error in leaves if isinstance(error, TitanRLError)), leaves[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
