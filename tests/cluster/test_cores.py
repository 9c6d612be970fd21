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


def test_trainer_threads_description_gives_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert describe_trainer_threads(1, 2) == (
        "the trainer computes 2 micro-batches at the same time: it has 2 cores and no GPU"
    )
    assert describe_trainer_threads(1, 1) == "the trainer computes one micro-batch at a time: it has 1 core and no GPU"
    assert "several processes" in describe_trainer_threads(2, 8)
