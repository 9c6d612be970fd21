"""Tiers of the GPU tests, and the reasons that skipped tiers print."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("run_tiers", ROOT / "scripts/test_gpu.py")
assert SPEC is not None
assert SPEC.loader is not None
tiers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tiers)


def test_skip_reason_names_missing_packages_or_time() -> None:
    assert (
        tiers.why_not(["json", "no_such_package", "nor_this"], 60, ["a GPU"])
        == "no_such_package, nor_this not installed"
    )
    assert tiers.why_not(["json"], 0.5, ["a GPU"]) == "no time is left of --limit"
    assert tiers.why_not(["json"], 60, ["a GPU"]) is None


def test_tiers_without_a_gpu_print_the_skip_reason() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts/test_gpu.py")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = ran.stdout.splitlines()[1:]
    assert ran.returncode == 1
    assert lines == [f"{name}: skipped, torch finds no GPU here: {', '.join(files)}" for name, _, files in tiers.TIERS]
    assert ran.stderr.startswith("no tier was run.")


def test_every_gpu_test_file_is_in_a_tier() -> None:
    listed = {file for _, _, files in tiers.TIERS for file in files}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")} - {
        "tests/gpu/test_tiers.py"
    }
    assert there <= listed
    assert all((ROOT / file).is_file() for file in listed)


def test_tier_timeout_is_a_failure() -> None:
    fine, line = tiers.run(["tests/gpu/test_torch_alone.py"], 0.01)
    assert (fine, line) == (False, "not done within 0 s")


def test_first_tier_imports_only_torch() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("torchtitan", "vllm", "monarch", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import gpu.test_torch_alone, gpu.test_cuda_ipc_processes
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
