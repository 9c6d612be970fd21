"""Costs and savings of several hosts. The hosts are network namespaces of this machine, which requires root.

    python -m benchmarks.hosts [--only host_loss join fanout delta manifest trainer_recovery] [--rounds 3]

Each figure is a module of `benchmarks/across_hosts/`, and has ten minutes. Prints one JSON object per
line: {"name": ..., "value": ..., "unit": ..., "target": ...}.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Generator
from types import FrameType

from benchmarks.across_hosts import delta, fanout, host_loss, join, manifest, trainer_recovery

FIGURES = {
    "host_loss": host_loss.measure,
    "join": join.measure,
    "fanout": fanout.measure,
    "delta": delta.measure,
    "manifest": manifest.measure,
    "trainer_recovery": trainer_recovery.measure,
}


LIMIT_S = 600
"""Time limit of one figure, in seconds."""


@contextlib.contextmanager
def limited(name: str) -> Generator[None]:
    """End the block, and everything that it started, at a time limit.

    Raises:
        TimeoutError: the block took longer.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{name} has not been measured within {LIMIT_S} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.only:
        with limited(name):
            FIGURES[name](arguments.rounds)


if __name__ == "__main__":
    main()
