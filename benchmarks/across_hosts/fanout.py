"""Time to send a version to four hosts compared with one, over links of 100 Mbit/s in both directions."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.across_hosts.ends import capped_ends, seconds_of
from benchmarks.paired import Spread, report

MEGABYTES = 32
MBIT = 100
TARGET = 1.3


def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, capped_ends(5, MBIT) as (writer, *readers):
        path = Path(folder) / "weights"
        np.random.default_rng(0).integers(0, 256, MEGABYTES << 20, np.uint8).tofile(path)
        version = 0

        def seconds(count: int) -> float:
            nonlocal version
            version += 1
            took, _ = seconds_of(writer.publish(version, path), readers[:count])
            return took

        for end in (writer, *readers):
            end.open(anchor_interval=1)
        seconds(4)
        measured = [(seconds(1), seconds(4), seconds(4), seconds(1)) for _ in range(rounds)]
    report("version_to_1_host_100mbit", Spread([(a + d) / 2 for a, _, _, d in measured]), "s")
    report("version_to_4_hosts_100mbit", Spread([(b + c) / 2 for _, b, c, _ in measured]), "s")
    report("fanout_4_hosts_vs_1", Spread([(b + c) / (a + d) for a, b, c, d in measured]), "ratio", TARGET)
