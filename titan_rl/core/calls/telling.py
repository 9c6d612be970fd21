"""What a person is shown as it happens, kept for who looks later."""

from __future__ import annotations

import logging
from collections.abc import Callable


def logged(tell: Callable[[str], object], logger: logging.Logger) -> Callable[[str], None]:
    """As `tell`, with each line in the log, too."""

    def both(text: str) -> None:
        logger.warning("%s", text)
        tell(text)

    return both
