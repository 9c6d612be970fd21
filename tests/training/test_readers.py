"""Waiting for concurrent readers of the weights."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from titan_rl.core.errors import TrainingError
from titan_rl.training import trainer
from titan_rl.training.trainer import Readers


def test_wait_returns_at_once_without_reads() -> None:
    assert Readers().wait() == 0.0


def test_wait_blocks_until_reads_end_and_ignores_their_errors() -> None:
    weights = Readers()
    reading, release = threading.Event(), threading.Event()

    def read() -> None:
        reading.set()
        assert release.wait(10)
        raise OSError("no room")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(read)
        weights.add(first)
        waiting = threads.submit(weights.wait)
        assert reading.wait(10)
        assert not waiting.done()
        release.set()
        assert waiting.result(10) > 0
    assert isinstance(first.exception(), OSError)
    assert weights.wait() == 0.0


def test_wait_times_out_on_a_stuck_read_and_can_be_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, read = Readers(), Future[None]()
    weights.add(read)
    monkeypatch.setattr(trainer, "READ_LIMIT_S", 0.01)
    with pytest.raises(TrainingError, match=r"1 copies of the weights have not finished after 0\.01 s"):
        weights.wait()
    read.set_result(None)
    assert weights.wait() > 0
