"""Reinforcement learning of language models on a mesh of actors.

`train` runs a config, and `evaluate` evaluates a policy. The other names are the parts of a custom loop. Everything
exported here is light: importing `titan_rl` needs neither torch, vLLM, torchtitan nor Monarch. The classes that need
them are in their own modules: `titan_rl.training.trainer.TrainerCore` and
`titan_rl.generation.vllm_engine.VLLMEngine`.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}
"""Modules that define the public names, from the stub file that type checkers read. Each name is imported on first
access: every process and command imports this package, and few need all of it."""

__all__ = tuple(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found
