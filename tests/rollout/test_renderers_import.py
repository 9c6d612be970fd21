"""Import of the package `renderers`: its modules load without its HTTP client, and its own names on first access."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("renderers")

LAZILY = """
import sys
from titan_rl.rollout.renderer.renderers_package import renderers_module

base = renderers_module("base")
assert base is renderers_module("base")
assert "openai" not in sys.modules
import renderers
assert renderers.base is base
assert not hasattr(renderers, "__wrapped__")
assert "openai" not in sys.modules

from renderers import Qwen3Renderer, create_renderer
from renderers.qwen3 import Qwen3Renderer as same
assert Qwen3Renderer is same
assert create_renderer is base.create_renderer
assert "openai" in sys.modules
try:
    renderers.nothing_of_this_name
except AttributeError as error:
    assert "nothing_of_this_name" in str(error)
"""

AFTER_ANOTHER = """
import renderers
from titan_rl.rollout.renderer.renderers_package import renderers_module

assert renderers_module("base") is renderers.base
assert renderers.Qwen3Renderer
"""


@pytest.mark.parametrize("program", [LAZILY, AFTER_ANOTHER])
def test_renderers_modules_import_without_the_openai_client(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
