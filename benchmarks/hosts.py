"""What several hosts cost and save. The hosts are namespaces of this machine, which only root may make.

    python -m benchmarks.hosts [--only fanout delta manifest trainer_recovery] [--rounds 3]

Each figure is a module of `benchmarks/across_hosts/`. Prints one JSON object a line: {"name": ..., "value": ...,
"unit": ..., "target": ...}.
"""

from __future__ import annotations

import argparse

from benchmarks.across_hosts import delta, fanout, host_loss, join, manifest, trainer_recovery

FIGURES = {
    "host_loss": host_loss.measure,
    "join": join.measure,
    "fanout": fanout.measure,
    "delta": delta.measure,
    "manifest": manifest.measure,
    "trainer_recovery": trainer_recovery.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.only:
        FIGURES[name](arguments.rounds)


if __name__ == "__main__":
    main()
