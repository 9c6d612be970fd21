"""A renderer with other keywords of its chat template: `{"enable_thinking": False}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from titan_rl.core.errors import RequestError
from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer
from titan_rl.rollout.renderer.types import Renderer


def with_template_kwargs(renderer: Renderer, kwargs: Mapping[str, Any], tokenizer: Any) -> Renderer:
    """The same renderer, but for these keywords. Those of the `renderers` package have them in their config.

    Raises:
        RequestError: the renderer takes no such keyword or no such value, or cannot extend conversations with it.
    """
    if isinstance(renderer, ChatTemplateRenderer):
        return renderer.with_template_kwargs(kwargs)
    config: Any = getattr(renderer, "config", None)
    known: frozenset[str] = getattr(config, "_template_fields", frozenset())
    name = type(renderer).__name__
    if unknown := sorted(kwargs.keys() - known):
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise RequestError(f"chat_template_kwargs has {unknown[0][:100]!r}, which {name} does not take; {takes}")
    try:
        given = {**config.model_dump(exclude_unset=True), **kwargs}
        kind, config_kind = cast("tuple[Any, Any]", (type(renderer), config.__class__))
        return kind(tokenizer, config_kind.model_validate(given))
    except Exception as error:  # pydantic's, or whatever a renderer raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RequestError(f"chat_template_kwargs = {dict(kwargs)!r} is not what {name} takes: {first}") from error
