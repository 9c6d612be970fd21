"""Where metrics go: always into the run directory, on request to Weights & Biases and TensorBoard too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from titan_rl.config.sections import LoggingConfig
from titan_rl.extras import require
from titan_rl.observability.run_dir import RunDirectory

EXTRA = "cpu"  # brings wandb and tensorboard, as dependencies of torchtitan


class MetricSink(Protocol):
    """Takes the metrics of steps, in order."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


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
        self._run = wandb.init(project=project, name=run_dir.path.name, dir=str(run_dir.path))
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
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = sinks

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # one that fails does not keep the others open
            for sink in self._sinks:
                closing.callback(sink.close)


@contextlib.contextmanager
def open_sinks(config: LoggingConfig, run_dir: RunDirectory) -> Iterator[Sinks]:
    """The sinks that the settings ask for, closed at the end.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    with contextlib.ExitStack() as opened:
        sinks: list[MetricSink] = [opened.enter_context(contextlib.closing(JSONLSink(run_dir)))]
        if config.wandb:
            sinks.append(opened.enter_context(contextlib.closing(WandbSink(run_dir, config.wandb_project))))
        if config.tensorboard:
            sinks.append(opened.enter_context(contextlib.closing(TensorBoardSink(run_dir))))
        yield Sinks(sinks)
