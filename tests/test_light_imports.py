"""Imports without the heavy stack: the public names and the planes without torch, and no more modules than needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

HEAVY = ("torch", "vllm", "torchtitan", "monarch", "transformers")

LIGHT = (
    "core.calls",
    "tasks",
    "metrics.sinks",
    "cli",
    "config",
    "evaluation",
    "rollout",
    "generation.registry",
    "generation.router",
    "weights.transports.registry",
    "scheduling",
    "serving",
    "testing",
    "viewer",
)

IMPORT_ALL = f"""
import importlib, pkgutil, sys

for name in {HEAVY!r}:
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError

import titan_rl
for name in titan_rl.__all__:
    getattr(titan_rl, name)

for light in {LIGHT!r}:
    module = importlib.import_module(f"titan_rl.{{light}}")
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{{module.__name__}}."):
        importlib.import_module(found.name)
        print(found.name)
"""


def test_light_modules_import_without_the_heavy_stack():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    assert "titan_rl.config.load" in done.stdout.split()


IMPORT_ONE_COMMAND = """
import sys

def ours():
    return {name for name in sys.modules if name.startswith("titan_rl.")}

import titan_rl
assert not ours(), ours()

from titan_rl.cli.main import main
try:
    main(["hosts", "--help"])
except SystemExit:
    pass
others = "init train launch sft serve play eval view export settings doctor worker completion".split()
assert not {f"titan_rl.cli.{other}" for other in others} & ours(), ours()
"""


def test_package_and_commands_import_only_what_they_use():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ONE_COMMAND], cwd=ROOT, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr


DRY_RUN = f"""
import sys
from titan_rl.cli.main import main

assert main(["train", "examples/alphabet_sort/cpu.toml", "--dry-run"]) == 0
assert not {{*{HEAVY!r}, "huggingface_hub", "openai"}} & sys.modules.keys(), sys.modules.keys()
"""


def test_dry_run_of_a_model_made_by_sft_imports_no_heavy_package():
    done = subprocess.run([sys.executable, "-c", DRY_RUN], cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    assert "alphabet_sort: 4 rollouts of a mock policy" in done.stderr
