"""A file of a run's folder, by which a host tells whether it sees that folder. Standard library only."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

NAME = ".hosts"


class RunToken:
    """
    Attributes:
        text: of the file, which no other run has.
    """

    def __init__(self, run_dir: Path) -> None:
        self.text = secrets.token_hex(8)
        self._path = run_dir / NAME
        self._num_looking = 0

    @contextmanager
    def shown(self) -> Generator[None]:
        """The file is there within the block, and as long as another such block goes on.

        Raises:
            OSError: it cannot be written.
        """
        if not self._num_looking:
            self._path.write_text(self.text)
        self._num_looking += 1
        try:
            yield
        finally:
            self._num_looking -= 1
            if not self._num_looking:
                self._path.unlink(missing_ok=True)


def token_in(run_dir: Path) -> str | None:
    """What the file says; None where there is none."""
    try:
        return (run_dir / NAME).read_text()
    except OSError:
        return None
