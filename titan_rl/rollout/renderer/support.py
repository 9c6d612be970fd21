"""Chat support of a model: its renderer and the reason for it, whether turns extend, tool calls, and stop tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer
from titan_rl.rollout.renderer.package import template_keywords
from titan_rl.rollout.renderer.registry import OPENING, TALK, TOOLS, ChosenRenderer, drops_reasoning, extended_prompt
from titan_rl.rollout.renderer.types import Renderer, require_tool_support
from titan_rl.rollout.types import Message

MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ChatSupport:
    """Chat support of a model.

    Attributes:
        renderer: Class of the renderer.
        reason: Reason for this renderer.
        extends: Whether each prompt begins with the tokens of the previous prompt and completion.
        extension: Evidence for this, or the reason why not.
        tool_calls: Format of tool calls; None if they are not parsed.
        tool_problem: Reason why tool calls are not parsed.
        stop_tokens: Texts of the tokens that end an answer.
    """

    renderer: str
    reason: str
    extends: bool
    extension: str
    tool_calls: str | None
    tool_problem: str | None
    stop_tokens: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Lines of the dry run."""
        yield f"model.renderer is {self.renderer}: {self.reason}"
        yield f"turns extend token by token: {'yes' if self.extends else 'no'}, {self.extension}"
        yield f"tool calls: {self.tool_calls or f'not parsed, {self.tool_problem}'}"
        more = len(self.stop_tokens) - MOST_SHOWN
        shown = " ".join(self.stop_tokens[:MOST_SHOWN])
        yield f"stop tokens: {shown}{f' and {more} more' if more > 0 else ''}"


def chat_support(tokenizer: Any, chosen: ChosenRenderer) -> ChatSupport:
    """Describe the renderer of a tokenizer."""
    renderer = chosen.renderer
    extends, extension = _extension(renderer, tokenizer)
    tool_calls, tool_problem = _tool_calls(renderer)
    return ChatSupport(
        class_name(renderer),
        chosen.reason,
        extends,
        extension,
        tool_calls,
        tool_problem,
        tuple(map(str, tokenizer.convert_ids_to_tokens(renderer.get_stop_token_ids()))),
    )


def class_name(renderer: Any) -> str:
    """Name of the class of a renderer, without its further stop tokens."""
    return type(getattr(renderer, "renderer", renderer)).__name__


def _extension(renderer: Renderer, tokenizer: Any) -> tuple[bool, str]:
    """Extend a conversation of three questions, and compare its prompt with that of the model's own chat template."""
    if isinstance(renderer, ChatTemplateRenderer) and renderer.problem is not None:
        return False, renderer.problem
    plain = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in TALK]
    prompt, talk = None, plain
    for talk in (plain, plain[1:]):  # some templates have no system message
        try:
            prompt = extended_prompt(renderer, talk, None)
        except Exception:  # a renderer may raise any error
            continue
        break
    if prompt is None:
        return True, "not compared with the chat template, whose answers do not begin where its prompts end"
    if drops_reasoning(tokenizer, renderer):
        return True, "earlier reasoning stays, which the chat template drops"
    own = _of_template(tokenizer, talk, template_keywords(renderer))
    if own is None:
        return True, "not compared with a chat template, which the model lacks"
    if own == prompt:
        return True, "tested on three turns, with the tokens of the chat template"
    if tokenizer.decode(own) == tokenizer.decode(prompt):
        return True, "tested on three turns, with the text of the chat template"
    return True, "earlier answers stay as sampled, which the chat template writes in another way"


def _of_template(tokenizer: Any, talk: Sequence[Message], keywords: Mapping[str, Any]) -> list[int] | None:
    try:
        return list(
            tokenizer.apply_chat_template(list(talk), add_generation_prompt=True, return_dict=False, **keywords)
        )
    except Exception:  # there is no template, or it raises an error of any kind
        return None


def _tool_calls(renderer: Renderer) -> tuple[str | None, str | None]:
    if isinstance(renderer, ChatTemplateRenderer):
        found = renderer.call_format
        return None if found is None else found.name, renderer.call_problem
    for opening in (OPENING, OPENING[1:]):
        try:
            require_tool_support(renderer, opening, TOOLS)
        except Exception as error:  # a renderer may raise any error
            problem = str(error)
        else:
            return f"of {class_name(renderer)}", None
    return None, problem
