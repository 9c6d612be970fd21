"""Reinforcement learning of language models on a mesh of actors.

`train` runs a config, and `evaluate` evaluates a policy. The other names are the parts of a custom loop. Everything
exported here is light: importing `titan_rl` needs neither torch, vLLM, torchtitan nor Monarch. The classes that need
them are in their own modules: `titan_rl.training.trainer.TrainerCore` and
`titan_rl.generation.vllm_engine.VLLMEngine`.
"""

from __future__ import annotations

from importlib import import_module

# Without pathlib, whose import takes longer than the rest of this module.
with open(f"{__file__}i", encoding="utf-8") as _stub:
    _imports = [line.split() for line in _stub if line.startswith("from ")]
_MODULES = {name: module for _, module, _, name, *_ in _imports}
"""Modules that define the public names, from the stub file that type checkers read. Each name is imported on first
access: every process and command imports this package, and few need all of it."""

__all__ = tuple(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found
