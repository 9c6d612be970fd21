"""Renderers of the package `renderers`, which keep earlier reasoning and end at the stop tokens of the model's folder.

The package is imported without its client of HTTP servers: `openai` takes half a second to import in every process that
renders, and is not used.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from titan_rl.rollout.renderer.tokenizer import folder_stop_token_ids
from titan_rl.rollout.renderer.types import ParsedResponse, Renderer

logger = logging.getLogger(__name__)

PACKAGE = "renderers"


class _LazyPackage(ModuleType):
    """A package whose modules can be imported before its `__init__` has run. `__init__` runs when one of its own names
    is first accessed, as by `from renderers import Qwen3Renderer`."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__package__ = spec, spec.loader, spec.name
        self.__path__, self.__file__ = list(spec.submodule_search_locations or ()), spec.origin
        self._runs = self._has_run = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            with _running:  # another thread may run it at the same time
                if not (self._runs or self._has_run):
                    self._run()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def _run(self) -> None:
        loader = self.__loader__
        assert isinstance(loader, InspectLoader)
        self._runs = True  # `__init__` accesses its own names
        try:
            loader.exec_module(self)
            self._has_run = True
        finally:
            self._runs = False


_running = threading.RLock()


def renderers_module(name: str) -> Any:
    """Import a module of the package: `renderers_module("base")`.

    Raises:
        ImportError: the package is not installed.
    """
    if PACKAGE not in sys.modules and (spec := find_spec(PACKAGE)) is not None:
        sys.modules.setdefault(PACKAGE, _LazyPackage(spec))
    _ask_each_tokenizer_once()
    return import_module(f"{PACKAGE}.{name}")


@cache
def _ask_each_tokenizer_once() -> None:
    """Make the package cache which tokenizers return offsets. It finds out by tokenizing a letter for every message,
    which takes a fourteenth of the controller's processor time."""
    base: Any = import_module(f"{PACKAGE}.base")
    if (returns_offsets := getattr(base, "_get_offset_tokenizer", None)) is not None:
        base._get_offset_tokenizer = lru_cache(maxsize=8)(returns_offsets)


def renderer_of_name(name: str, tokenizer: Any) -> Renderer | None:
    """Make a renderer by name; None if it does not know the tokenizer's tokens."""
    base, configs = renderers_module("base"), renderers_module("configs")
    try:
        config = configs.config_from_name(name)
        # Earlier reasoning stays, because no prompt may lose sampled tokens.
        renderer = base.create_renderer(tokenizer, config.model_copy(update={"thinking_retention": "all"}))
    except Exception as error:
        logger.debug("renderer %s does not suit: %s", name, error)
        return None
    return with_folder_stops(renderer, tokenizer)


def renderer_of_class(kind: Any, tokenizer: Any) -> Renderer:
    """Make a renderer of a class of the package. By default these classes render a conversation again at a user's
    message, which drops sampled tokens."""
    config_type: Any = getattr(renderers_module("configs"), f"{kind.__name__}Config", None)
    if config_type is None or "thinking_retention" not in config_type.model_fields:
        return with_folder_stops(kind(tokenizer), tokenizer)
    return with_folder_stops(kind(tokenizer, config=config_type(thinking_retention="all")), tokenizer)


def template_keywords(renderer: Any) -> dict[str, Any]:
    """Keywords of the chat template that a renderer of the package has as settings, such as the date for Llama."""
    config: Any = getattr(getattr(renderer, "renderer", renderer), "config", None)
    found = {name: getattr(config, name) for name in getattr(config, "_template_fields", ())}
    return {name: value for name, value in found.items() if value is not None}


def package_tokenizer(renderer: Any) -> Any | None:
    """Tokenizer of a renderer of the package, or of a subclass of one; None for any other renderer."""
    inner = getattr(renderer, "renderer", renderer)
    is_of_package = any(base.__module__.partition(".")[0] == PACKAGE for base in type(inner).__mro__)
    return getattr(inner, "_tokenizer", None) if is_of_package else None


def with_folder_stops(renderer: Renderer, tokenizer: Any) -> Renderer:
    """Add the stop tokens of the tokenizer's folder to a renderer, if it lacks any.

    Raises:
        ModelError: see `folder_stop_token_ids`.
    """
    known = renderer.get_stop_token_ids()
    more = [each for each in folder_stop_token_ids(tokenizer) if each not in known]
    return WithStopTokens(renderer, more) if more else renderer


class WithStopTokens:
    """Renderer with further stop tokens.

    Args:
        renderer: The renderer.
        more: Stop tokens in addition to those of the renderer.
    """

    def __init__(self, renderer: Renderer, more: Sequence[int]) -> None:
        self.renderer = renderer
        self.more = tuple(more)
        self.reads_tool_calls: bool = getattr(renderer, "reads_tool_calls", True)
        self.render_ids = renderer.render_ids
        self.bridge_to_next_turn = renderer.bridge_to_next_turn

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        content = token_ids[:-1] if token_ids and token_ids[-1] in self.more else token_ids
        return self.renderer.parse_response(content, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self) -> list[int]:
        return [*self.renderer.get_stop_token_ids(), *self.more]
