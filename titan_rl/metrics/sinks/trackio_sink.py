"""trackio."""

from __future__ import annotations

from collections.abc import Mapping

from titan_rl.core.calls.imports import require
from titan_rl.metrics.sinks.types import SinkSpec


class TrackioSink:
    """A run of trackio, on this machine or in a Hugging Face Space. One that goes on is the same run there.

    Raises:
        MissingExtraError: trackio is not installed.
    """

    def __init__(self, spec: SinkSpec) -> None:
        trackio = require("trackio", "trackio")
        options = spec.settings.trackio
        self._run = trackio.init(
            project=options.project,
            name=spec.run,
            space_id=options.space,
            resume="allow" if spec.step else "never",
            embed=False,
        )
        spec.tell(f"trackio: {options.space or f'trackio show --project {options.project}'}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
