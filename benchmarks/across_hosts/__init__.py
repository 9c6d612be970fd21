"""Benchmarks of runs on several hosts, which are network namespaces of this machine, as in `tests/hosts`."""

import sys
from pathlib import Path

# Modules of the tests import each other as pytest does, relative to this folder.
sys.path.append(str(Path(__file__).parents[2] / "tests"))
