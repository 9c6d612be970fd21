"""Stop tokens of a model's folder, which its renderer may not know: `eos_token_id` of generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError
from titan_rl.rollout.renderer.types import ParsedResponse, RenderedTokens, Renderer


def folder_stop_token_ids(tokenizer: Any) -> list[int]:
    """All tokens that end an answer according to the folder of a tokenizer, in increasing order.

    They are read from generation_config.json, or if it names none from config.json. Tokens that are ordinary text are
    left out, because configs of transformers have defaults that do not fit every vocabulary.

    Example: `[128001, 128008, 128009]` for Llama 3.2, with `<|eom_id|>` and `<|eot_id|>`.

    Raises:
        ModelError: the file is not a JSON object, or its eos_token_id is neither a token id nor a list of token ids.
    """
    folder = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    for file in (folder / "generation_config.json", folder / "config.json"):
        if not file.is_file():
            continue
        try:
            settings: Any = parse_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{file} is no JSON: {error}") from error
        if not isinstance(settings, dict):
            raise ModelError(f"{file} is no JSON object")
        found: Any = cast("dict[str, Any]", settings).get("eos_token_id")
        if found is None:
            continue
        listed = cast("list[Any]", found) if isinstance(found, list) else [found]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
            raise ModelError(f"eos_token_id in {file} is {found!r}; it must be a token id, or a list of token ids")
        return sorted({each for each in listed if each in added})
    return []


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

    @property
    def reads_tool_calls(self) -> bool:
        return getattr(self.renderer, "reads_tool_calls", True)

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self.renderer.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        content = token_ids[:-1] if token_ids and token_ids[-1] in self.more else token_ids
        return self.renderer.parse_response(content, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self) -> list[int]:
        return [*self.renderer.get_stop_token_ids(), *self.more]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        return self.renderer.bridge_to_next_turn(
            previous_prompt_ids, previous_completion_ids, new_messages, tools=tools
        )
