"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

from titan_rl.core.calls.imports import require
from titan_rl.metrics.sinks.types import SinkSpec


class TensorBoardSink:
    """TensorBoard events under `tensorboard/` of the run's folder. Steps that are run again replace what was.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, spec: SinkSpec) -> None:
        require("tensorboard", "cpu")
        module = require("torch.utils.tensorboard", "cpu")
        folder = spec.folder / "tensorboard"
        self._writer = module.SummaryWriter(
            str(folder),
            purge_step=spec.step + 1 if spec.step else None,
            flush_secs=spec.settings.tensorboard.flush_s,
        )
        if spec.config.exists():
            self._writer.add_text("config", f"```toml\n{spec.config.read_text(encoding='utf-8')}\n```")
        spec.tell(f"TensorBoard: tensorboard --logdir {folder}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
