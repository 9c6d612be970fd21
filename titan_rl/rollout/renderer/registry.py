"""The renderers by name: the library's own, or the user's as "module:function"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan_rl.core.calls.imports import find_function
from titan_rl.rollout.renderer.auto import keeping_reasoning, suitable_renderer
from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer
from titan_rl.rollout.renderer.types import Renderer

RendererFn = Callable[[Any], Renderer]
"""Makes a renderer of a Hugging Face tokenizer. A class is one, too."""

BY_NAME: dict[str, RendererFn] = {"auto": suitable_renderer, "chat_template": ChatTemplateRenderer}
"""The library's own that `model.renderer` names."""


def find_renderer(name: str) -> RendererFn:
    """What makes the renderer that `model.renderer` names.

    Raises:
        ConfigError: there is none of that name.
    """
    return keeping_reasoning(find_function("model.renderer", name, BY_NAME))
