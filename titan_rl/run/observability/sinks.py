"""Where metrics go: always into the run directory, on request to Weights & Biases and TensorBoard too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

from titan_rl.calls.imports import require
from titan_rl.config.sections import LoggingConfig
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.best_effort import BestEffort, Tell
from titan_rl.run.observability.metric_sink import BackgroundSink, MetricSink

EXTRA = "cpu"  # brings wandb and tensorboard, as dependencies of torchtitan


class JSONLSink:
    """`metrics.jsonl` of the run directory."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run_dir.write_metrics(step, metrics)

    def close(self) -> None:
        self._run_dir.close()


class WandbSink:
    """A Weights & Biases run, whose files lie in the run directory. `WANDB_MODE=offline` needs no login.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, run_dir: RunDirectory, project: str) -> None:
        wandb = require("wandb", EXTRA)
        self._run = wandb.init(project=project, name=run_dir.run_id, dir=str(run_dir.path))
        if run_dir.config.exists():
            self._run.save(str(run_dir.config), base_path=str(run_dir.path), policy="now")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Their own step counter must rise with every call, but a step's validation follows its training.
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink:
    """TensorBoard events under `tensorboard/` of the run directory.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, run_dir: RunDirectory) -> None:
        require("tensorboard", EXTRA)
        module = require("torch.utils.tensorboard", EXTRA)
        self._writer = module.SummaryWriter(str(run_dir.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """Several sinks as one. What one of them raises is told of, and keeps the records from no other; each has
    a record of its own to do with as it likes.

    Args:
        sinks: by name, for the messages.
    """

    def __init__(self, sinks: Mapping[str, MetricSink], tell: Tell) -> None:
        self._tell = tell
        self._sinks = {name: (sink, BestEffort(f"logging to {name}", tell)) for name, sink in sinks.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink, logging in self._sinks.values():
            logging.attempt(partial(sink.log, step, dict(metrics)))

    def close(self) -> None:
        for name, (sink, logging) in self._sinks.items():
            logging.close()
            BestEffort(f"closing {name}", self._tell).attempt(sink.close)


@contextlib.contextmanager
def open_sinks(
    config: LoggingConfig, run_dir: RunDirectory, tell: Tell, others: Mapping[str, MetricSink] | None = None
) -> Iterator[Sinks]:
    """The sinks that the settings ask for, and others, closed at the end.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    sinks: dict[str, MetricSink] = {"metrics.jsonl": JSONLSink(run_dir)}
    if config.wandb:
        require("wandb", EXTRA)
        open_wandb = partial(WandbSink, run_dir, config.wandb_project)
        sinks["Weights & Biases"] = BackgroundSink(open_wandb, "Weights & Biases", tell)
    if config.tensorboard:
        require("tensorboard", EXTRA)
        sinks["TensorBoard"] = BackgroundSink(partial(TensorBoardSink, run_dir), "TensorBoard", tell)
    opened = Sinks({**sinks, **(others or {})}, tell)
    try:
        yield opened
    finally:
        opened.close()
