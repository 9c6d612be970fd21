"""What may fail without ending a run: a sink of metrics, a file that a person reads."""

from __future__ import annotations

import logging
from collections.abc import Callable

from titan_rl.core.calls.ctrl_c import is_ctrl_c
from titan_rl.core.calls.user_code import summary

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Shows a line of text to whoever watches the run."""


class BestEffort:
    """Attempts of one kind. The first of several that fail in a row is told of, with the reason; so is the first that
    works again, and at the end how many were lost.

    Args:
        what: is attempted, for the messages: "writing rollouts.jsonl".
    """

    def __init__(self, what: str, tell: Tell) -> None:
        self._what = what
        self._tell = tell
        self._num_lost = 0
        self._in_a_row = 0

    @property
    def num_lost(self) -> int:
        """Attempts that failed."""
        return self._num_lost

    def attempt(self, act: Callable[[], object]) -> bool:
        """Whether `act` did not raise. Only Ctrl-C passes."""
        try:
            act()
        except BaseException as error:  # also the SystemExit of a client that thinks it is a program
            if is_ctrl_c(error):
                raise
            self.failed(error)
            return False
        self.worked()
        return True

    def failed(self, error: BaseException) -> None:
        """Count an attempt that was made elsewhere."""
        self._num_lost += 1
        self._in_a_row += 1
        if self._in_a_row == 1:
            logger.warning("%s failed", self._what, exc_info=error)
            self._tell(f"{self._what} failed, and the run goes on without it: {summary(error)}")

    def worked(self) -> None:
        if self._in_a_row:
            self._tell(f"{self._what} works again; {self._in_a_row} were lost meanwhile")
            self._in_a_row = 0

    def close(self) -> None:
        """Tell what was lost, if anything was."""
        if self._num_lost:
            self._tell(f"{self._what} failed {self._num_lost} times in this run; the log has the first reason")
