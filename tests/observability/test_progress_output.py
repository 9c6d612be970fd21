"""An output that nobody reads, or that has no room."""

from __future__ import annotations

import contextlib
import os

from titan_rl.observability.progress import Progress, StepReport


def show_a_run(descriptor: int) -> None:
    file = os.fdopen(descriptor, "w")
    try:
        with Progress(10, file) as progress:
            for step in (1, 2):
                progress.message("hello")
                progress.step(StepReport(step, 0.5, 0.5, 100.0, 0.0, 1.0))
    finally:
        with contextlib.suppress(OSError):  # of what its buffer holds still
            file.close()


def test_output_that_nobody_reads_ends_nothing():
    read, write = os.pipe()
    os.close(read)
    show_a_run(write)


def test_output_to_a_full_disk_ends_nothing():
    show_a_run(os.open("/dev/full", os.O_WRONLY))
