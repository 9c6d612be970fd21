"""What a server tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class ServerMetrics:
    """The metrics of one application; another in the same process has its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.responses = Counter(
            "titan_rl_responses",
            "Responses, by path and status.",
            ("path", "status"),
            registry=self._registry,
        )
        self.places = Gauge("titan_rl_completions_running", "Completions under way.", registry=self._registry)
        self.prompt_tokens = Counter("titan_rl_prompt_tokens", "Prompt tokens.", registry=self._registry)
        self.completion_tokens = Counter("titan_rl_completion_tokens", "Sampled tokens.", registry=self._registry)
        self.gone = Counter(
            "titan_rl_clients_gone", "Requests whose client went away before the answer.", registry=self._registry
        )
        self.first_token_s = Histogram(
            "titan_rl_time_to_first_token_seconds",
            "From the request to the first token of a completion.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.completion_s = Histogram(
            "titan_rl_completion_seconds",
            "From the request to the last token of a completion.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
