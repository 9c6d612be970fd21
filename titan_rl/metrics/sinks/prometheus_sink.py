"""Prometheus."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.core.calls.imports import require
from titan_rl.metrics.sinks.types import SinkSpec
from titan_rl.metrics.table import match_metric

CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric as Prometheus has it: `task/sums/share` is `titan_rl_task_share{task="sums"}`."""

    family: str
    help: str
    labels: Mapping[str, str]
    value: float


class PrometheusSink:
    """An endpoint `/metrics` with what each metric was last, as gauges with the label `run` and those of the parts of
    its name that are names: task, suite, seat, reward, reason.

    Beside them there are titan_rl_step, and titan_rl_record_timestamp_seconds for an alarm where nothing comes any
    more.

    Raises:
        MissingExtraError: prometheus-client is not installed.
        OSError: the port is taken, or the address is none of this machine.
    """

    def __init__(self, spec: SinkSpec) -> None:
        self._client: Any = require("prometheus_client", "serve")
        self._core: Any = require("prometheus_client.core", "serve")
        options = spec.settings.prometheus
        self._run = spec.run
        self._latest: dict[str, Sample] = {}
        registry = self._client.CollectorRegistry()
        registry.register(self)
        self._server, self._thread = self._client.start_http_server(options.port, options.host, registry)
        self.url = f"http://{options.host}:{self._server.server_port}/metrics"
        spec.tell(f"Prometheus: {self.url}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        own = {
            "step": Sample("titan_rl_step", "Newest step that has a record.", {}, step),
            "time": Sample("titan_rl_record_timestamp_seconds", "When its newest record came.", {}, time.time()),
        }
        # What a scrape reads is replaced whole: it runs in a thread of its own.
        self._latest = {**self._latest, **{name: sample(name, value) for name, value in metrics.items()}, **own}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_TIMEOUT_S)

    def collect(self) -> Iterator[Any]:
        """Asked by the registry at each scrape."""
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
    """A metric by the name and labels that Prometheus allows.

    Example: `sample("scheduling/dropped/too_old", 2.0)` is
    `Sample("titan_rl_scheduling_dropped", ..., {"reason": "too_old"}, 2.0)`.
    """
    match = match_metric(name)
    pattern = name if match is None else match.metric.name
    family = re.sub(r"[^a-zA-Z0-9]+", "_", f"titan_rl_{re.sub(r'<[a-z]+>', '', pattern)}").strip("_")
    if match is None:
        return Sample(family, "", {}, value)
    return Sample(family, match.metric.help, match.places, value)
