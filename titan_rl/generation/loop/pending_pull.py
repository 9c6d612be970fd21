"""One open `pull` call of an engine loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.core.tensor_checksum import TensorChecksum
from titan_rl.generation.engine import Engine
from titan_rl.generation.types import PullResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PendingPull:
    """One `pull` call."""

    version: int
    items: Iterable[tuple[str, Any]]
    source: Iterator[tuple[str, Any]]  # what `items` reads from; closed if nobody does
    verify: Callable[[Engine], object] | None
    manifest: Any
    published: Mapping[str, TensorChecksum]
    future: asyncio.Future[PullResult]

    def close(self) -> None:
        """Let go of what was opened. What that raises is told of in the log: it is no reason to serve no more, and says
        nothing against weights that were loaded and found right."""
        try:
            if (close := getattr(self.source, "close", None)) is not None:
                close()
        except BaseException:  # a transport's own, whatever it is
            logger.exception("the source of version %d failed to close", self.version)
