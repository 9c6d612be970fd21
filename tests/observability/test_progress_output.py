"""An output that nobody reads, or that has no room."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO

from titan_rl.observability.progress import Progress, StepReport


def show_a_run(file: TextIO) -> None:
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
    show_a_run(open(write, "w"))


def test_output_to_a_full_disk_ends_nothing():
    show_a_run(open("/dev/full", "w"))
