"""A person who acts as the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.plain import printable
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.console import Console
from titan_rl.evaluation.play.screen import Screen
from titan_rl.rollout.chat_env import ChatReply
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.types import Message
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

HELP = '''what may be typed:
    a line is a reply; a line of """ begins one of several lines, and another ends it
    /call NAME {"argument": 1}   call a tool
    /tokens                      the tokens of the prompt, and of the last reply
    /help                        this
    /quit                        end; so does the end of the input'''

QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call that a person has typed."""

    name: str
    arguments: Any

    @property
    def message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": "call_0", "function": function}


class Person:
    """Person who types what a policy would generate.

    `generate` is a `GenerateFn`: the typed text is treated like a model's completion, that is, converted to tokens and
    parsed. Its logprobs are 0. `chat` is a `ChatFn`, for a task whose model does not exist yet.

    Args:
        encode: Function that returns the tokens of a text.
        console: Console for messages about the input.
        is_terminal: Whether to show prompts for the input.

    Attributes:
        tools: Function that returns the tools of the environment that is being played.
        has_quit: Whether the person has quit. The rollout being played then ends as aborted.
    """

    def __init__(
        self,
        screen: Screen,
        lines: TextIO,
        renderer: Renderer,
        encode: Callable[[str], Sequence[int]],
        console: Console,
        *,
        is_terminal: bool,
    ) -> None:
        self.tools: Callable[[], Sequence[Mapping[str, object]] | None] = lambda: None
        self.has_quit = False
        self._screen = screen
        self._lines = lines
        self._renderer = renderer
        self._encode = encode
        self._console = console
        self._is_terminal = is_terminal
        self._last: Completion | None = None

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        by_text = self._screen.has_shown
        if not self._screen.has_shown:
            self._screen.prompt(prompt_token_ids)
        self._screen.has_shown = False
        tokens: list[int] | None = None
        while tokens is None:
            typed = await self._type("reply> " if by_text else "tokens> ", prompt_token_ids)
            if typed is None:
                return Completion(request_id, (), (), FinishReason.ABORT, ())
            if isinstance(typed, ToolCall):
                tokens = self._call(typed)
            else:
                tokens = [*self._encode(typed), *self._stop()] if by_text else self._typed_tokens(typed)
        cut = tokens[: sampling.max_tokens]
        if len(tokens) > len(cut):
            self._console.message(
                f"the reply has {len(tokens)} tokens, and sampling.max_tokens is {sampling.max_tokens}"
            )
        ended = FinishReason.STOP if len(cut) == len(tokens) else FinishReason.LENGTH
        self._last = Completion(request_id, cut, [0.0] * len(cut), ended, (VersionSpan(0, len(cut)),))
        return self._last

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> ChatReply:
        typed = await self._type("reply> ", None)
        if typed is None:
            return ChatReply({"role": "assistant", "content": ""}, FinishReason.ABORT)
        if isinstance(typed, ToolCall):
            return ChatReply({"role": "assistant", "content": "", "tool_calls": [typed.message]})
        return ChatReply({"role": "assistant", "content": typed})

    async def _type(self, question: str, prompt_token_ids: Sequence[int] | None) -> str | ToolCall | None:
        """Read input until it is a reply or a tool call, and carry out commands before it; None at the end."""
        while True:
            text = await self._read(question)
            command, _, rest = (text or "").partition(" ")
            if text is None or command == "/quit":
                self.has_quit = True
                return None
            if command == "/call":
                if (call := self._parsed_call(rest)) is not None:
                    return call
            elif command == "/help":
                self._console.message(HELP)
            elif command == "/tokens" and prompt_token_ids is not None:
                self._screen.tokens(prompt_token_ids, self._last)
            elif command == "/tokens":
                self._console.message("there are none without the model's tokenizer")
            elif command.startswith("/"):
                self._console.message(f"there is no command {command}; see /help")
            else:
                return text

    def _parsed_call(self, text: str) -> ToolCall | None:
        name, _, given = text.strip().partition(" ")
        try:
            arguments: Any = parse_json(given or "{}")
        except ValueError as error:
            self._console.message(f"{given!r} is not valid JSON: {error}")
            return None
        return ToolCall(name, arguments)

    def _typed_tokens(self, text: str) -> list[int] | None:
        try:
            return [int(piece) for piece in text.replace(",", " ").split()]
        except ValueError:
            self._console.message("type token ids, such as: 5 9 2")
            return None

    def _call(self, call: ToolCall) -> list[int] | None:
        """Tokens of a tool call as the renderer writes them for a model; None if it cannot."""
        tools, question = self.tools(), {"role": "user", "content": "1"}
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call.message]}
        offered = None if tools is None else list(tools)
        before = list(self._renderer.render_ids([question], tools=offered, add_generation_prompt=True))
        token_ids = list(self._renderer.render_ids([question, answer], tools=offered))
        stops = set(self._renderer.get_stop_token_ids())
        written = token_ids[len(before) :]
        end = next((index for index, token in enumerate(written) if token in stops), None)
        if token_ids[: len(before)] != before or end is None:
            self._console.message("this renderer does not render calls; type the call as the model would write it")
            return None
        return written[: end + 1]

    def _stop(self) -> list[int]:
        return self._renderer.get_stop_token_ids()[:1]

    async def _read(self, prompt: str) -> str | None:
        """Read a reply or a command; None at the end of the input."""
        line = await self._line(prompt)
        if line is None or line.strip() != QUOTES:
            return line
        lines: list[str] = []
        while (line := await self._line("... ")) is not None and line.strip() != QUOTES:
            lines.append(line)
        if line is None:
            self._console.message(f"the input ends within {QUOTES}, so there is no reply")
            return None
        return "\n".join(lines)

    async def _line(self, prompt: str) -> str | None:
        if self._is_terminal:
            self._screen.write_line(prompt)
        line = await in_thread(self._lines.readline)
        return printable(line).rstrip("\r\n") if line else None
