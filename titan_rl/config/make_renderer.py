"""The renderer that a config describes."""

from __future__ import annotations

from typing import Any

from titan_rl.calls.imports import find_function
from titan_rl.calls.user_code import describe
from titan_rl.errors import ConfigError
from titan_rl.rollout.renderer import ChatTemplateRenderer, Renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.training.settings import ModelConfig


def make_renderer(model: ModelConfig) -> Renderer:
    """The one that `model.renderer` names, over the tokenizer of the model's folder.

    Raises:
        ModelError: the folder has no tokenizer, or no chat template that the library's own can extend.
        ConfigError: there is no such renderer, or it refuses the tokenizer.
    """
    make: Any = find_function("model.renderer", model.renderer, {"chat_template": None})
    if make is None:
        return ChatTemplateRenderer.from_pretrained(model.path)
    tokenizer = load_tokenizer(model.path)
    try:
        return make(tokenizer)
    except Exception as error:
        raise ConfigError(
            f"model.renderer = {model.renderer!r} gives no renderer for the tokenizer of {model.path}: "
            f"{describe(error)}; it is called with a tokenizer of transformers"
        ) from error
