"""The renderer that a config describes."""

from __future__ import annotations

from typing import Any

from typing_extensions import get_protocol_members

from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import ConfigError, MissingExtraError, ModelError
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.registry import find_renderer
from titan_rl.rollout.renderer.template_fit import fit_template
from titan_rl.rollout.renderer.token_texts import TokenTexts
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.training.settings import ModelConfig


def make_renderer(model: ModelConfig) -> Renderer:
    """The one that `model.renderer` names, over the tokenizer of the model's folder.

    Raises:
        ModelError: the folder has no tokenizer, or no chat template that the library's own can extend.
        ConfigError: there is no such renderer, it refuses the tokenizer, or what it gives is none.
    """
    make = find_renderer(model.renderer)
    tokenizer = load_tokenizer(model.path)
    try:
        renderer: Any = make(tokenizer)
        lacking = [
            name for name in sorted(get_protocol_members(Renderer)) if not callable(getattr(renderer, name, None))
        ]
        if lacking:
            raise TypeError(f"it gave {renderer!r}, which has no {', '.join(lacking)}")
        if not renderer.get_stop_token_ids():
            raise ValueError("its get_stop_token_ids() gave no token that ends a completion")
        return renderer
    except ModelError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model.renderer = {model.renderer!r} gives no renderer for the tokenizer of {model.path}: "
            f"{describe(error)}; it is called with a tokenizer of transformers"
        ) from error


def told_of_template(model: ModelConfig) -> str | None:
    """What a person is told of the chat template that an export of the model has; None where it is the model's own and
    renders what training does."""
    return fit_template(model.path, model.renderer).told(model.renderer)


def find_token_texts(model: ModelConfig) -> TokenTexts | None:
    """What reads the tokens of the model's folder; None where it has no tokenizer."""
    try:
        return TokenTexts.of_tokenizer(load_tokenizer(model.path))
    except (ModelError, MissingExtraError):
        return None
