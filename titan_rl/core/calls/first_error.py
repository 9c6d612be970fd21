"""The error that ended a program, which nothing that cleans up after it may hide."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from titan_rl.core.calls.user_code import summary

logger = logging.getLogger(__name__)


class FirstError:
    """Raises what ended a program in the place of what its cleanup raises, which becomes a note of it.

    Example: the journal cannot be closed on a disk that is full, and yet it is the trainer's error that is told:

        first = FirstError()
        with first.wins(), closing(journal), first.source():
            train()
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def source(self) -> Generator[None]:
        """Around the program itself, within what is cleaned up. A cancellation ends a program without an error."""
        try:
            yield
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._error = error
            raise

    @contextmanager
    def wins(self) -> Generator[None]:
        """Around all that is cleaned up.

        Raises:
            Exception: what `source` raised, unless that is, or is part or cause of, what leaves the block.
        """
        hidden: Exception | None = None
        try:
            yield
        except Exception as last:
            if self._error is None or self._error in _told_by(last):
                raise
            hidden = self._error
            logger.warning("cleaning up failed", exc_info=last)
            hidden.add_note(f"cleaning up failed, too: {summary(last)}")
        if hidden is not None:
            raise hidden from hidden.__cause__


def _told_by(error: BaseException) -> Iterator[BaseException]:
    """An error, the members of a group, and what they say they were caused by."""
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(cast("BaseExceptionGroup[Any]", one).exceptions)
