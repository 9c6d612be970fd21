"""Processor cores of this machine, and the threads that a trainer without a GPU runs on them."""

from __future__ import annotations

import os

MOST_THREADS = 4
"""Maximum number of micro-batches computed at the same time. Each holds its activations and a gradient of the model."""


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def trainer_threads(cores: int) -> int:
    """Number of micro-batches that a single trainer process computes at the same time on CPU cores.

    Trainer and engines wait for each other during a step, so the trainer may use every core, and the engines take cores
    from it while they have requests. OMP_NUM_THREADS sets the number of threads that torch uses for one operation, and
    so for each micro-batch.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    each = int(given) if given.isdigit() and int(given) else 1  # a run sets it to 1 for its processes
    return max(1, min(cores // each, MOST_THREADS))


def describe_trainer_threads(num_ranks: int, cores: int) -> str:
    """Describe the choice of `trainer_threads` and its reason for the user.

    Example: "the trainer computes 2 micro-batches at the same time: it has 2 cores and no GPU"
    """
    if num_ranks > 1:
        return "each trainer process computes one micro-batch at a time: there are several processes"
    count = trainer_threads(cores)
    many = "one micro-batch at a time" if count == 1 else f"{count} micro-batches at the same time"
    return f"the trainer computes {many}: it has {cores} core{'' if cores == 1 else 's'} and no GPU"
