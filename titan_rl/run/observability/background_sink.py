"""How a sink that may take long is kept from holding up a run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial

from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.run.observability.best_effort import BestEffort, Tell

CLOSE_TIMEOUT_S = 30.0
MAX_WAITING = 10_000  # records; a sink that is further behind loses the newest


class BackgroundSink:
    """Another sink in a thread of its own: a run does not wait for a service on the network.

    Records are handed on in order. Those that the sink does not take are lost, and the first is told of with the
    reason. One that cannot be opened loses all.

    Args:
        open_sink: makes the sink, in the thread.
        what: the sink is, for the messages: "Weights & Biases".
        close_timeout_s: how long `close` waits for what is still to be handed on.
    """

    def __init__(
        self,
        open_sink: Callable[[], MetricSink],
        what: str,
        tell: Tell,
        *,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._open_sink = open_sink
        self._what = what
        self._tell = tell
        self._close_timeout_s = close_timeout_s
        self._logging = BestEffort(f"logging to {what}", tell)
        self._max_waiting = max_waiting
        self._waiting: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._is_open = True
        # A daemon: one that never comes back must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=f"sink {what}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """
        Raises:
            TimeoutError: the sink is too far behind to take this record, too.
        """
        if self._waiting.qsize() >= self._max_waiting:
            raise TimeoutError(f"{self._what} is {self._max_waiting} records behind")
        if self._is_open:
            self._waiting.put((step, metrics))

    def close(self) -> None:
        """
        Raises:
            TimeoutError: the sink has not taken everything within the time limit.
        """
        self._waiting.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._what} did not take everything within {self._close_timeout_s:g} s of the end")
        self._logging.close()

    def _run(self) -> None:
        opening = BestEffort(f"opening {self._what}", self._tell)
        opened: list[MetricSink] = []
        if not opening.attempt(lambda: opened.append(self._open_sink())):
            self._is_open = False
            return
        (sink,) = opened
        while (record := self._waiting.get()) is not None:
            self._logging.attempt(partial(sink.log, *record))
        BestEffort(f"closing {self._what}", self._tell).attempt(sink.close)
