"""Renderer protocol, compatible with the `renderers` package (0.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Tools = Sequence[Mapping[str, object]]


class RenderedTokens(Protocol):
    """A rendered prompt."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class ParsedToolCall(Protocol):
    """Attempt to call a tool: an object with these attributes, not a dictionary as in OpenAI's clients.

    Attributes:
        name: name of the tool; None if it cannot be read.
        arguments: arguments by name, or their text.
        status: "ok", or the kind of error: then the policy's answer is an `error_parse`.
        id: referred to by the tool's answer; None if the model writes none.

    Example: `SimpleNamespace(name="add", arguments={"a": 1}, status="ok", id=None)`
    """

    name: str | None
    arguments: dict[str, Any] | str | None
    status: Any
    id: str | None


class ParsedResponse(Protocol):
    """Parts of a completion. `reasoning_complete` is False if it ended inside its reasoning."""

    @property
    def content(self) -> str: ...

    @property
    def reasoning_content(self) -> str | None: ...

    @property
    def tool_calls(self) -> Sequence[ParsedToolCall]: ...

    @property
    def reasoning_complete(self) -> bool | None: ...


class Renderer(Protocol):
    """Converts between chat messages and tokens, and extends conversations without tokenizing again.

    An attribute `reads_tool_calls = False` says that parsed responses never have `tool_calls`.
    """

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Tokens of a conversation.  # [num_tokens]"""
        ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Message in a completion. Raises any exception if there is none."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a completion: `SamplingParams.stop_token_ids`."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Next prompt, which begins with exactly the previous prompt and completion; None if there is none."""
        ...
