"""Number of trainer threads without a GPU."""

from __future__ import annotations

import pytest

from titan_rl.cluster.hosts.cores import describe_trainer_threads, trainer_threads


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(1, None, 1), (2, None, 2), (2, "1", 2), (2, "2", 1), (64, "1", 4)]
)
def test_trainer_threads_use_the_cores_that_torch_leaves(
    cores: int, given: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert trainer_threads(cores) == threads


@pytest.mark.parametrize(
    ("cores", "given", "expected"),
    [
        (2, None, "2 micro-batches at the same time: it has no GPU, and 2 cores for micro-batches of 1 thread "),
        (2, "2", "one micro-batch at a time: it has no GPU, and 2 cores for micro-batches of 2 threads "),
        (1, None, "one micro-batch at a time: it has no GPU, and 1 core for micro-batches of 1 thread "),
        (64, "4", "4 micro-batches at the same time: it has no GPU, and 64 cores for micro-batches of 4 threads "),
    ],
)
def test_trainer_threads_description_gives_the_reason(
    cores: int, given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    most = ", at most 4" if cores == 64 else ""
    assert describe_trainer_threads(1, cores) == (
        f"the trainer computes {expected}(OMP_NUM_THREADS = {given or 1}){most}"
    )
    assert "several processes" in describe_trainer_threads(2, cores)
