"""Optional dependencies, imported where they are first needed and named clearly where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from titan_rl.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, which the optional dependencies `extra` bring.

    Example: `torch = require("torch", "cpu")`.

    Raises:
        MissingExtraError: it is not installed; the message names the extra. A module that is installed and fails
            while it is imported raises its own error.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # `import torchtitan.models.qwen3` fails with the name of the first package that is absent. Anything else
        # that is absent was wanted by the module itself, and hiding that name would mislead.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingExtraError(error.name, extra) from error
