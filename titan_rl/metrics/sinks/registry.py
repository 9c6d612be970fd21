"""The sinks by name: the library's own, or the user's as "module:function".

Importing this imports no sink: what one needs is imported by the function that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_rl.core.calls.imports import find_function, require
from titan_rl.core.errors import ConfigError
from titan_rl.metrics.sinks.types import MetricSink, SinkSpec


@dataclass(frozen=True, slots=True)
class SinkKind:
    """How a sink is made, and what it needs. A plain function from `SinkSpec` to `MetricSink` is of a kind that needs
    nothing."""

    make: Callable[[SinkSpec], MetricSink]  # may take long: it is called in a thread
    title: str  # for messages
    modules: tuple[str, ...] = ()  # that it needs
    extra: str = ""  # of titan_rl, that brings them

    def check(self) -> None:
        """
        Raises:
            MissingExtraError: what it needs is not installed.
        """
        for module in self.modules:
            require(module, self.extra)


def _wandb(spec: SinkSpec) -> MetricSink:
    from titan_rl.metrics.sinks.wandb_sink import WandbSink

    return WandbSink(spec)


def _tensorboard(spec: SinkSpec) -> MetricSink:
    from titan_rl.metrics.sinks.tensorboard_sink import TensorBoardSink

    return TensorBoardSink(spec)


def _trackio(spec: SinkSpec) -> MetricSink:
    from titan_rl.metrics.sinks.trackio_sink import TrackioSink

    return TrackioSink(spec)


def _prometheus(spec: SinkSpec) -> MetricSink:
    from titan_rl.metrics.sinks.prometheus_sink import PrometheusSink

    return PrometheusSink(spec)


BY_NAME = {
    # The extra "cpu" brings both, as dependencies of torchtitan.
    "wandb": SinkKind(_wandb, "Weights & Biases", ("wandb",), "cpu"),
    "tensorboard": SinkKind(_tensorboard, "TensorBoard", ("tensorboard",), "cpu"),
    "trackio": SinkKind(_trackio, "trackio", ("trackio",), "trackio"),
    "prometheus": SinkKind(_prometheus, "Prometheus", ("prometheus_client",), "serve"),
}
"""The library's own that `logging.sinks` names."""


def find_sink(name: str) -> SinkKind:
    """The kind of sink that `logging.sinks` names.

    Raises:
        ConfigError: there is none of that name.
    """
    found: Any = find_function("logging.sinks", name, BY_NAME)
    return found if isinstance(found, SinkKind) else SinkKind(_checked(name, found), name)


def _checked(name: str, function: Callable[[SinkSpec], Any]) -> Callable[[SinkSpec], MetricSink]:
    def make(spec: SinkSpec) -> MetricSink:
        sink = function(spec)
        if not isinstance(sink, MetricSink):
            raise ConfigError(f"logging.sinks = {name!r} gave {sink!r}, which is no MetricSink: it has log and close")
        return sink

    return make
