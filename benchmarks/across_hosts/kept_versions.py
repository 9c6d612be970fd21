"""A real run of an example that keeps the bytes of every version that it publishes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titan_rl.weights.transports.registry import TransportSpec
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import Manifest

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "alphabet_sort" / "cpu.toml"
FOLDER = "KEPT_VERSIONS"  # in the environment


class KeepingTransport(SharedMemoryTransport):
    """Transport that also writes everything it publishes to a folder."""

    def __init__(self, spec: TransportSpec) -> None:
        super().__init__(spec.run_id)

    def publish(self, version: int, *arguments: object, **options: object) -> Manifest:
        manifest = super().publish(version, *arguments, **options)  # type: ignore[arg-type]
        self.bytes_of(version).tofile(Path(os.environ[FOLDER]) / str(version))
        return manifest


def versions_of_a_run(folder: Path, *, steps: int, lr: float) -> list[NDArray[np.uint8]]:
    """Weights in bfloat16 before and after each step of the example."""
    command = [sys.executable, "-m", "titan_rl.cli.main", "train", str(EXAMPLE), "--run_dir", str(folder / "run")]
    options = {
        "model.dtype": "bfloat16",
        "training.lr": lr,
        "training.steps": steps,
        "validation.num_prompts": 0,
        "statedict.transport": f"{__name__}:KeepingTransport",
    }
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    kept = folder / "versions"
    kept.mkdir()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", FOLDER: str(kept)}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=sys.stderr)
    return [np.fromfile(kept / str(version), np.uint8) for version in sorted(int(path.name) for path in kept.iterdir())]
