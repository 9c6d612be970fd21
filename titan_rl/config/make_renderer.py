"""The renderer that a config describes."""

from __future__ import annotations

from titan_rl.calls.user_code import describe
from titan_rl.errors import ConfigError, ModelError
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.registry import find_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.training.settings import ModelConfig


def make_renderer(model: ModelConfig) -> Renderer:
    """The one that `model.renderer` names, over the tokenizer of the model's folder.

    Raises:
        ModelError: the folder has no tokenizer, or no chat template that the library's own can extend.
        ConfigError: there is no such renderer, or it refuses the tokenizer.
    """
    make = find_renderer(model.renderer)
    tokenizer = load_tokenizer(model.path)
    try:
        return make(tokenizer)
    except ModelError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model.renderer = {model.renderer!r} gives no renderer for the tokenizer of {model.path}: "
            f"{describe(error)}; it is called with a tokenizer of transformers"
        ) from error
