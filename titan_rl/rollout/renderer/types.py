"""What an environment needs of a renderer. The protocol is that of the `renderers` package (0.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Tools = Sequence[Mapping[str, object]]


class RenderedTokens(Protocol):
    """A rendered prompt."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class ParsedToolCall(Protocol):
    """One attempt to call a tool, as an object with these attributes: the dictionaries of OpenAI's clients are none.

    Attributes:
        name: of the tool; None where it cannot be read.
        arguments: by their names, or the text that they were written in.
        status: "ok", or what is malformed: then the policy's answer is an `error_parse`.
        id: what the tool's answer refers to; None where the model writes none.

    Example: `SimpleNamespace(name="add", arguments={"a": 1}, status="ok", id=None)`
    """

    name: str | None
    arguments: dict[str, Any] | str | None
    status: Any
    id: str | None


class ParsedResponse(Protocol):
    """A completion taken apart. `reasoning_complete` is False where it ended inside its reasoning."""

    @property
    def content(self) -> str: ...

    @property
    def reasoning_content(self) -> str | None: ...

    @property
    def tool_calls(self) -> Sequence[ParsedToolCall]: ...

    @property
    def reasoning_complete(self) -> bool | None: ...


class Renderer(Protocol):
    """What `MessageTokenEnv` needs of a renderer.

    One with an attribute `reads_tool_calls = False` never has `tool_calls` in what it parses.
    """

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """The tokens of a conversation.  # [num_tokens]"""
        ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """The message in a completion. Raises any exception where there is none."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """The tokens that end a completion: `SamplingParams.stop_token_ids`."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """The next prompt, which begins with exactly the previous prompt and completion; None if there is none."""
        ...
