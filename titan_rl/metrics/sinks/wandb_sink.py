"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping

from titan_rl.core.calls.imports import require
from titan_rl.metrics.sinks.types import SinkSpec


class WandbSink:
    """A Weights & Biases run, whose files lie in the run's folder. One that goes on is the same run there.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, spec: SinkSpec) -> None:
        wandb = require("wandb", "cpu")
        options = spec.settings.wandb
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group,
            tags=list(options.tags) or None,
            mode=options.mode,
            id=spec.run,
            resume="allow" if spec.step else None,
            name=spec.run,
            dir=str(spec.folder),
        )
        self._run.define_metric("*", step_metric="step")
        if spec.config.exists():
            self._run.save(str(spec.config), base_path=str(spec.folder), policy="now")
        if url := self._run.url:
            spec.tell(f"Weights & Biases: {url}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Their own step counter must rise with every call, but a step's validation follows its training.
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
