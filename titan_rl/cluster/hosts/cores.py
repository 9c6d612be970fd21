"""Processor cores and memory of this machine, and the threads that processes without a GPU run on the cores."""

from __future__ import annotations

import os
from pathlib import Path

from titan_rl.cluster.hosts.folders import ENVIRONMENT

MOST_THREADS = 4
"""Maximum number of micro-batches computed at the same time. Each holds its activations and a gradient of the model."""


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory() -> int:
    """Memory that this process may use, in bytes: the machine's, or the limit of the process's control group if that is
    less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


def threads_each() -> int:
    """Number of threads that torch uses for one operation in the processes of a run: OMP_NUM_THREADS, which a run sets
    unless the user has."""
    given = os.environ.get("OMP_NUM_THREADS", ENVIRONMENT["OMP_NUM_THREADS"])
    return int(given) if given.isdigit() and int(given) else 1


def trainer_threads(cores: int) -> int:
    """Number of micro-batches that a single trainer process computes at the same time on CPU cores.

    Trainer and engines wait for each other during a step, so the trainer may use every core, and the engines take cores
    from it while they have requests. OMP_NUM_THREADS sets the number of threads that torch uses for one operation, and
    so for each micro-batch.
    """
    return max(1, min(cores // threads_each(), MOST_THREADS))


def describe_trainer_threads(num_ranks: int, cores: int, prevented: str = "") -> str:
    """Describe the choice of `trainer_threads` and its reason for the user.

    Args:
        prevented: Reason for which micro-batches are not computed at the same time; empty if there is none.

    Example: "the trainer computes 2 micro-batches at the same time: it has no GPU, and 2 cores for micro-batches of 1
    thread (OMP_NUM_THREADS = 1)"
    """
    if num_ranks > 1:
        return "each trainer process computes one micro-batch at a time: there are several processes"
    if prevented:
        return f"the trainer computes one micro-batch at a time, because of {prevented}"
    count, each = trainer_threads(cores), threads_each()
    many = "one micro-batch at a time" if count == 1 else f"{count} micro-batches at the same time"
    most = f", at most {MOST_THREADS}" if cores // each > MOST_THREADS else ""
    return (
        f"the trainer computes {many}: it has no GPU, and {plural(cores, 'core')} for micro-batches of "
        f"{plural(each, 'thread')} (OMP_NUM_THREADS = {each}){most}"
    )


def plural(count: int, noun: str) -> str:
    """Number with a noun: `plural(2, "core")` is "2 cores"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
