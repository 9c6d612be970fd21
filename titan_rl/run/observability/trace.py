"""Whether a command records what its processes do when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from titan_rl.core.tracing.spans import recording
from titan_rl.metrics.sinks.settings import LoggingConfig


def traced(
    settings: LoggingConfig, folder: Path, tell: Callable[[str], object]
) -> contextlib.AbstractContextManager[None]:
    """Within the block this process is recorded, and those that it starts, unless the settings say otherwise.

    Args:
        folder: of the files, one a process.
        tell: called with why nothing is recorded any more.
    """
    if not settings.trace:
        return contextlib.nullcontext()
    return recording(folder, "controller", settings.trace_mib << 20, tell)
