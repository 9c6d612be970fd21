"""Separate virtual environments, for packages that conflict with this stack, installed from the package index."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

INSTALL_S = 900

asked_for = pytest.mark.skipif(
    not os.environ.get("TITAN_RL_TEST_CLIENTS"), reason="takes minutes and needs the package index: make test-clients"
)


def python_with(cache: pytest.Cache, name: str, *requirements: str) -> str:
    """Interpreter of an environment with these packages, created on first use."""
    folder = Path(str(cache.mkdir("clients"))) / name
    python = folder / "bin" / "python"
    done = folder / "done"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "--quiet", *requirements]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{name} cannot be installed here: {error.stderr.decode()[-300:]}")
        except subprocess.TimeoutExpired:
            pytest.skip(f"{name} could not be installed within {INSTALL_S} s")
        done.touch()
    return str(python)
