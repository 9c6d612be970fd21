"""Metric sinks by name: Weights & Biases, TensorBoard, trackio, Prometheus, or yours as "module:function".

Importing this module imports none of these packages: each sink imports its own package when it is created.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.core.calls.imports import find_function, require
from titan_rl.core.errors import ConfigError
from titan_rl.metrics.sinks.types import MetricSink, SinkSpec
from titan_rl.metrics.table import match_metric

CLOSE_TIMEOUT_S = 5.0
FLUSH_S = 10  # seconds between writes of TensorBoard events


class WandbSink:
    """Weights & Biases run whose files are in the run's folder. A resumed run continues the same W&B run.

    Raises:
        MissingExtraError: Wandb is not installed.
    """

    def __init__(self, spec: SinkSpec) -> None:
        wandb = require("wandb", "cpu")
        self._run = wandb.init(
            **{"project": "titan_rl", **spec.settings.wandb},
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
        # W&B's own step counter must rise with every call, but a step's validation follows its training.
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink:
    """TensorBoard events under `tensorboard/` of the run's folder. Steps that are run again replace the earlier events.

    Raises:
        MissingExtraError: Tensorboard is not installed.
    """

    def __init__(self, spec: SinkSpec) -> None:
        require("tensorboard", "cpu")
        module = require("torch.utils.tensorboard", "cpu")
        folder = spec.folder / "tensorboard"
        self._writer = module.SummaryWriter(
            str(folder),
            purge_step=spec.step + 1 if spec.step else None,
            flush_secs=FLUSH_S,
        )
        if spec.config.exists():
            self._writer.add_text("config", f"```toml\n{spec.config.read_text(encoding='utf-8')}\n```")
        spec.tell(f"TensorBoard: tensorboard --logdir {folder}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    """trackio run, on this machine or in a Hugging Face Space. A resumed run continues the same trackio run.

    Raises:
        MissingExtraError: Trackio is not installed.
    """

    def __init__(self, spec: SinkSpec) -> None:
        trackio = require("trackio", "trackio")
        project, space = spec.settings.trackio.get("project", "titan_rl"), spec.settings.trackio.get("space")
        self._run = trackio.init(
            project=project,
            name=spec.run,
            space_id=space,
            resume="allow" if spec.step else "never",
            embed=False,
        )
        spec.tell(f"trackio: {space or f'trackio show --project {project}'}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True, slots=True)
class Sample:
    """Value of a Prometheus gauge. `task/sums/share` becomes `titan_rl_task_share{task="sums"}`."""

    family: str
    help: str
    labels: Mapping[str, str]
    value: float


class PrometheusSink:
    """Endpoint `/metrics` for Prometheus, with the newest value of each metric.

    Metrics are gauges. Their labels are `run` and the variable parts of the metric's name: task, suite, seat, reward,
    reason. titan_rl_step and titan_rl_record_timestamp_seconds are added; the latter can trigger an alarm when records
    stop.

    Raises:
        MissingExtraError: Prometheus-client is not installed.
        OSError: The port is taken, or the address is not one of this machine.
    """

    def __init__(self, spec: SinkSpec) -> None:
        self._client: Any = require("prometheus_client", "serve")
        self._core: Any = require("prometheus_client.core", "serve")
        host, _, port = spec.settings.prometheus.rpartition(":")
        self._run = spec.run
        self._latest: dict[str, Sample] = {}
        self._newest = 0
        registry = self._client.CollectorRegistry()
        registry.register(self)
        self._server, self._thread = self._client.start_http_server(int(port), host, registry)
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        spec.tell(f"Prometheus: {self.url}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._newest = max(step, self._newest)  # a validation alongside training may follow later steps
        own = {
            "step": Sample("titan_rl_step", "Newest step that has a record.", {}, self._newest),
            "time": Sample("titan_rl_record_timestamp_seconds", "Time of the newest record.", {}, time.time()),
        }
        # A scrape runs in its own thread, so the dictionary that it reads is replaced, not changed.
        self._latest = {**self._latest, **{name: sample(name, value) for name, value in metrics.items()}, **own}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_TIMEOUT_S)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of a scrape. The registry of Prometheus calls this."""
        families: defaultdict[str, list[Sample]] = defaultdict(list)
        for one in self._latest.values():
            families[one.family].append(one)
        for name, samples in families.items():
            labels = sorted({label for one in samples for label in one.labels})
            family = self._core.GaugeMetricFamily(name, samples[0].help, labels=["run", *labels])
            for one in samples:
                family.add_metric([self._run, *(one.labels.get(label, "") for label in labels)], one.value)
            yield family


def sample(name: str, value: float) -> Sample:
    """Convert a metric to a name and labels that Prometheus allows.

    Example: `sample("scheduling/dropped/too_old", 2.0)` is
    `Sample("titan_rl_scheduling_dropped", ..., {"reason": "too_old"}, 2.0)`.
    """
    match = match_metric(name)
    pattern = name if match is None else match.metric.name
    family = re.sub(r"[^a-zA-Z0-9]+", "_", f"titan_rl_{re.sub(r'<[a-z]+>', '', pattern)}").strip("_")
    if match is None:
        return Sample(family, "", {}, value)
    return Sample(family, match.metric.help, match.labels, value)


@dataclass(frozen=True, slots=True)
class SinkKind:
    """Constructor and requirements of a sink.

    `find_sink` wraps a plain function from `SinkSpec` to `MetricSink` in a kind without requirements.
    """

    make: Callable[[SinkSpec], MetricSink]  # called in a thread, because it may take long
    title: str  # name for messages
    modules: tuple[str, ...] = ()  # required modules
    extra: str = ""  # extra of titan_rl that installs them

    def check(self) -> None:
        """Import the required modules.

        Raises:
            MissingExtraError: A module is not installed.
        """
        for module in self.modules:
            require(module, self.extra)


BY_NAME = {
    # The extra "cpu" installs both, as dependencies of torchtitan.
    "wandb": SinkKind(WandbSink, "Weights & Biases", ("wandb",), "cpu"),
    "tensorboard": SinkKind(TensorBoardSink, "TensorBoard", ("tensorboard",), "cpu"),
    "trackio": SinkKind(TrackioSink, "trackio", ("trackio",), "trackio"),
    "prometheus": SinkKind(PrometheusSink, "Prometheus", ("prometheus_client",), "serve"),
}
"""Sinks of the library, by their names in `logging.sinks`."""


def find_sink(name: str) -> SinkKind:
    """Look up the kind of sink that `logging.sinks` names.

    Raises:
        ConfigError: No sink has that name.
    """
    found: Any = find_function("logging.sinks", name, BY_NAME)
    return found if isinstance(found, SinkKind) else SinkKind(_checked(name, found), name)


def _checked(name: str, function: Callable[[SinkSpec], Any]) -> Callable[[SinkSpec], MetricSink]:
    def make(spec: SinkSpec) -> MetricSink:
        sink = function(spec)
        if not isinstance(sink, MetricSink):
            raise ConfigError(
                f"logging.sinks = {name!r} returned {sink!r}, which is not a MetricSink: it needs log and close"
            )
        return sink

    return make
