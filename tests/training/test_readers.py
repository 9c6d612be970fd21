"""The wait for those who read the weights."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from titan_rl.core.errors import TrainingError
from titan_rl.training import trainer
from titan_rl.training.trainer import Readers


def test_nobody_reads_and_nothing_is_waited_for() -> None:
    assert Readers().wait() == 0.0


def test_every_read_ends_before_the_wait_does_and_its_error_stays_its_own() -> None:
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


def test_a_read_that_does_not_end_is_told_and_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, read = Readers(), Future[None]()
    weights.add(read)
    monkeypatch.setattr(trainer, "READ_LIMIT_S", 0.01)
    with pytest.raises(TrainingError, match=r"1 copies of the weights have not ended after 0\.01 s"):
        weights.wait()
    read.set_result(None)
    assert weights.wait() > 0
