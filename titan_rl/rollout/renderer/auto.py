"""The renderer that suits a model, if nobody says which."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message

logger = logging.getLogger(__name__)

_HUB_FOLDER = re.compile(r"models--.+--(.+)")
"""Of a model in the cache of the Hugging Face hub: `models--Qwen--Qwen3-0.6B/snapshots/c1899de2`."""


def suitable_renderer(tokenizer: Any) -> Renderer:
    """One of the `renderers` package, which reads calls of tools; `ChatTemplateRenderer` where none is known to suit.

    One suits where the model's folder has the name of a model that it is for, or where it renders a conversation with
    a call of a tool as the model's own chat template does.

    Raises:
        ModelError: none suits, and `ChatTemplateRenderer` refuses the tokenizer.
    """
    try:
        base: Any = import_module("renderers.base")
    except ImportError:
        return ChatTemplateRenderer(tokenizer)
    models: dict[str, str] = base.MODEL_RENDERER_MAP
    folders = Path(str(getattr(tokenizer, "name_or_path", ""))).parts
    names = {match[1] if (match := _HUB_FOLDER.fullmatch(part)) else part for part in folders[-3:]}
    for model, name in models.items():
        if model.rpartition("/")[2] in names and (renderer := _made(name, tokenizer)) is not None:
            return renderer
    of_text = {name for model, name in models.items() if model not in base.MULTIMODAL_MODELS}
    return next(_alike(sorted(of_text), tokenizer), None) or ChatTemplateRenderer(tokenizer)


def keeping_reasoning(make: Callable[[Any], Renderer]) -> Callable[[Any], Renderer]:
    """A class of the `renderers` package so that earlier reasoning stays, as `auto` makes it: with its own default it
    renders a conversation again at a user's message, which leaves out tokens that were sampled. Anything else as it is.
    """
    name = str(getattr(make, "__name__", ""))
    if not isinstance(make, type) or make.__module__.partition(".")[0] != "renderers":
        return make
    config_type: Any = getattr(import_module("renderers.configs"), f"{name}Config", None)
    if config_type is None or "thinking_retention" not in config_type.model_fields:
        return make
    config, make_with = config_type(thinking_retention="all"), cast("Callable[[Any, Any], Renderer]", make)
    return lambda tokenizer: make_with(tokenizer, config)


def _alike(names: Iterable[str], tokenizer: Any) -> Iterator[Renderer]:
    """Those that render the text of the tokenizer's own template. Its tokens may be others: a renderer tokenizes what
    stands around a message by itself."""
    try:
        wanted = [
            tokenizer.apply_chat_template(list(messages), tools=_TOOLS, add_generation_prompt=True, tokenize=False)
            for messages in (_ASKED, _CALLED)
        ]
    except Exception:  # there is none, or it knows no tools
        return
    for name in names:
        renderer = _made(name, tokenizer)
        try:
            if renderer is not None and wanted == [
                tokenizer.decode(renderer.render_ids(list(messages), tools=list(_TOOLS), add_generation_prompt=True))
                for messages in (_ASKED, _CALLED)
            ]:
                logger.info("model.renderer: %s renders as the chat template does", type(renderer).__name__)
                yield renderer
        except Exception as error:
            logger.debug("renderer %s does not suit: %s", name, error)


def _made(name: str, tokenizer: Any) -> Renderer | None:
    """None where it does not know the tokens of the tokenizer."""
    package: Any = import_module("renderers")
    try:
        config = package.config_from_name(name)
        # Earlier reasoning stays, for no prompt may lose tokens that were sampled.
        return package.create_renderer(tokenizer, config.model_copy(update={"thinking_retention": "all"}))
    except Exception as error:
        logger.debug("renderer %s does not suit: %s", name, error)
        return None


_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
)
_ASKED: tuple[Message, ...] = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Define it."})
_CALLED: tuple[Message, ...] = (
    *_ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "call_1", "function": {"name": "look_up", "arguments": {"word": "it"}}}
        ],
    },
    {"role": "tool", "name": "look_up", "tool_call_id": "call_1", "content": "a pronoun"},
)
