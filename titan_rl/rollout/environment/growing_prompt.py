"""A conversation in messages that is one in tokens: what was sampled is never tokenized again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from titan_rl.core.calls.plain import safe_text
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import DataError, PromptTooLongError
from titan_rl.rollout.renderer.messages import message_of, renderable
from titan_rl.rollout.renderer.tool_support import require_tool_support
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message
from titan_rl.types import Completion


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A completion as a message.

    Args:
        is_whole: it does not break off inside its reasoning, and holds no malformed tool call.
    """

    message: Message
    is_whole: bool


_WELL_FORMED = ("ok", "unknown_tool")
"""Statuses of calls that environments answer. Only some renderers look at the names of the tools."""


MAX_CONTEXT: ContextVar[int | None] = ContextVar("MAX_CONTEXT", default=None)
"""Most tokens of the prompts of the present rollout, where that is known."""

LONGEST_TOKEN = 256
"""Characters; those of the vocabularies in use have at most 128."""

LONG_TEXT = 20_000
"""Characters whose tokenizing would hold up the event loop for longer than a thread takes to start."""


class GrowingPrompt:
    """Messages of others and completions in turn. Each prompt begins with exactly the prompt and completion before.

    Example:

        completion = await generate(prompt.after([{"role": "user", "content": "Hello"}]), ...)
        answer = prompt.read(completion)
        completion = await generate(prompt.after([{"role": "user", "content": "Go on"}]), ...)
    """

    def __init__(self, renderer: Renderer, tools: Sequence[Mapping[str, object]] | None = None) -> None:
        self._renderer = renderer
        self._tools = None if tools is None else list(tools)
        self._prompt: list[int] = []
        self._completion: list[int] | None = None  # the answer to it

    async def next(self, messages: Sequence[Message], whose: str) -> list[int]:
        """As `after`, of messages of any length: a long text is tokenized off the event loop, and one that cannot fit
        into the rollout's context not at all.

        Args:
            whose: who gave the messages, for the error.

        Raises:
            PromptTooLongError: they have more characters than `MAX_CONTEXT` tokens can stand for.
        """
        size = sum(map(len, _texts(messages)))
        most = MAX_CONTEXT.get()
        if most is not None and size > most * LONGEST_TOKEN:
            raise PromptTooLongError(
                f"{whose} gave messages of {size:,} characters, which cannot fit into max_context = {most} tokens"
            )
        return self.after(messages) if size < LONG_TEXT else await in_thread(self.after, messages)

    def after(self, messages: Sequence[Message]) -> list[int]:
        """The next prompt.  # [num_prompt_tokens]

        Raises:
            DataError: the renderer has none that begins with all tokens so far.
            ModelError: it does not show the tools, or reads no calls of them.
        """
        if self._completion is None:
            if self._tools:
                require_tool_support(self._renderer, messages, self._tools)
            self._prompt = list(
                self._renderer.render_ids(renderable(messages), tools=self._tools, add_generation_prompt=True)
            )
        else:
            self._prompt = self._bridge(self._completion, messages)
            self._completion = None
        return list(self._prompt)

    def read(self, completion: Completion) -> ParsedAnswer | None:
        """What a completion of the last prompt says; None if it cannot be parsed.

        Raises:
            TypeError: the renderer parses it to something else than its protocol says.
        """
        self._completion = list(completion.token_ids)
        try:
            parsed = self._renderer.parse_response(
                list(completion.token_ids), tools=self._tools, prompt_ids=list(self._prompt)
            )
        except Exception:  # the model's doing: a parser may raise anything on malformed output
            return None
        if wrong := [call for call in parsed.tool_calls if not hasattr(call, "status")]:
            raise TypeError(
                f"parse_response of the renderer gave {safe_text(wrong[0], repr)} among its tool_calls; each must be "
                "an object with name, arguments, status and id, see titan_rl.rollout.renderer.ParsedToolCall"
            )
        is_whole = parsed.reasoning_complete is not False and all(
            call.status in _WELL_FORMED for call in parsed.tool_calls
        )
        return ParsedAnswer(message_of(parsed), is_whole)

    def _bridge(self, completion: list[int], messages: Sequence[Message]) -> list[int]:
        so_far = [*self._prompt, *completion]
        bridged = self._renderer.bridge_to_next_turn(
            list(self._prompt), list(completion), renderable(messages), tools=self._tools
        )
        if bridged is None or list(bridged.token_ids[: len(so_far)]) != so_far:
            raise DataError(
                f"{type(self._renderer).__name__} cannot extend this conversation without rendering it again; "
                "set the renderer to keep earlier reasoning (thinking_retention='all') or to leave it out"
            )
        return list(bridged.token_ids)


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    """The text of each message, or of each of its parts."""
    for message in messages:
        content: Any = message.get("content")
        parts: list[Any] = cast("list[Any]", content) if isinstance(content, list) else [content]
        for part in parts:
            text: Any = cast("Mapping[str, Any]", part).get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text
