"""Reading of one completion as a message, at once or while it streams."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from titan_rl.generation.request import tokens_between
from titan_rl.rollout.renderer.chat_template import ParsedText
from titan_rl.rollout.renderer.types import ParsedResponse, ParsedToolCall, Renderer
from titan_rl.serving.text import THINK, THINK_END, Text, TextReader, find_stop, overlap
from titan_rl.types import Completion, FinishReason, TokenChunk, TopLogprobs


def _has_call(parsed: ParsedResponse) -> bool:
    return any(_function_of(call) is not None for call in parsed.tool_calls)


def _function_of(call: ParsedToolCall) -> dict[str, str] | None:
    """Return the called function in the form of OpenAI's chat. Returns None for a malformed call: one that the renderer
    marks as such, that has no name, or whose arguments are not an object that every client can read as JSON."""
    if str(call.status) != "ok" or not isinstance(call.name, str) or not call.name:
        return None
    arguments: Any = {} if call.arguments is None else call.arguments
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        shown = json.dumps([call.name, arguments], ensure_ascii=False, allow_nan=False)
        shown.encode()  # raises for a lone surrogate
    except (ValueError, RecursionError):
        return None
    return {"name": call.name, "arguments": json.dumps(arguments)}


def reply_from(parsed: ParsedResponse, *, end: int | None = None) -> dict[str, Any]:
    """Make the message that a client receives. A malformed tool call becomes part of its text, as it was written.

    Args:
        end: Position in the content at which a stop string begins; None if there is none.
    """
    message: dict[str, Any] = {"refusal": None, "role": "assistant"}
    if reasoning := (parsed.reasoning_content or "").strip():
        message["reasoning_content"] = reasoning
    content = parsed.content[:end]
    calls: list[dict[str, Any]] = []
    for call in parsed.tool_calls:
        if (function := _function_of(call)) is None:
            content += str(getattr(call, "raw", ""))
            continue
        calls.append({"id": call.id or f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    message["content"] = content if content or not calls else None
    return message


_MAY_BEGIN_A_CALL = re.compile(r"[<\[{]")
_MAY_END_A_CALL = frozenset(">]}")


@dataclass(frozen=True, slots=True)
class Delta:
    """Next part of a reply. All deltas together make up `Reply.message`."""

    reasoning: str = ""
    content: str = ""
    tool_calls: Sequence[dict[str, Any]] = ()  # complete calls, in the form of OpenAI's chat
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()  # [num_tokens]
    top_logprobs: TopLogprobs | None = None  # [num_tokens, ...] if they were requested

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls or self.token_ids)


@dataclass(frozen=True, slots=True)
class Reply:
    """Completion that has been read as a message.

    Attributes:
        message: Message in the form of OpenAI's chat, as a client receives it and will send it back.
        stop: Stop string that ended it; None if there was none.
    """

    message: dict[str, Any]
    completion: Completion
    stop: str | None = None

    @property
    def content(self) -> str:
        return self.message["content"] or ""

    @property
    def reasoning(self) -> str:
        return self.message.get("reasoning_content") or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []

    @property
    def delta(self) -> Delta:
        """Whole reply as one delta."""
        completion = self.completion
        tokens = completion.token_ids, completion.logprobs, completion.top_logprobs
        return Delta(self.reasoning, self.content, self.tool_calls, *tokens)

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.completion.finish_reason if self.stop is None else FinishReason.STOP
        return FinishReason.TOOL_CALLS if self.tool_calls and reason is FinishReason.STOP else reason


@dataclass(frozen=True)
class ReplyForm:
    """Rules for reading the replies to a prompt.

    Args:
        tools: Tools that were offered. Without tools, text that looks like a call is text.
        one_call: Whether a completion ends with the first tool call.
        stops: Strings that end a completion. They are not part of its content.
    """

    renderer: Renderer
    text: Text
    prompt_token_ids: Sequence[int] = field(repr=False)
    tools: list[dict[str, Any]] | None = None
    one_call: bool = False
    stops: tuple[str, ...] = ()

    @property
    def may_cut(self) -> bool:
        """Whether a completion can be ended before the model ends it."""
        return bool(self.stops) or (self.one_call and bool(self.tools))

    def parsed(self, token_ids: Sequence[int]) -> ParsedResponse:
        try:
            parsed = self.renderer.parse_response(
                list(token_ids), tools=self.tools, prompt_ids=list(self.prompt_token_ids)
            )
        except Exception:  # a renderer raises if it finds no message; there is still text
            return self._unparsed(self.text.decode(token_ids).strip())
        if self.tools or not parsed.tool_calls:
            return parsed
        content = self.text.decode(token_ids).rpartition(THINK_END)[2].strip()
        return ParsedText(content, reasoning_content=parsed.reasoning_content)

    @cached_property
    def begins_thinking(self) -> bool:
        """Whether the prompt has begun the reasoning of the reply."""
        return self.text.decode(list(self.prompt_token_ids[-8:])).rstrip().endswith(THINK)

    def _unparsed(self, text: str) -> ParsedText:
        if not (text.startswith(THINK) or self.begins_thinking):
            return ParsedText(text)
        reasoning, closed, content = text.removeprefix(THINK).partition(THINK_END)
        return ParsedText(content.strip(), reasoning_content=reasoning.strip(), reasoning_complete=bool(closed))


class _Phase(Enum):
    """Kind of the text that comes next in a stream.

    UNDECIDED becomes REASONING, CONTENT or HELD at the next visible text, by how the renderer reads it. REASONING
    becomes UNDECIDED again at `</think>`. CONTENT remains. If tools are offered, a special token makes any phase HELD.
    """

    UNDECIDED = "nothing is known of the next text"
    REASONING = "reasoning is passed on as it comes"
    CONTENT = "content is passed on as it comes"
    HELD = "the rest is passed on when the reply is complete"


class ReplyReader:
    """Reads a completion while it streams. Only a renderer knows which parts of a completion are content, reasoning or
    tool calls, and it reads only whole completions. So text is passed on at once only while its kind is certain:
    reasoning until it closes, and content until a character or special token that may begin a tool call. The rest is
    passed on at the end."""

    def __init__(self, form: ReplyForm) -> None:
        self._form = form
        self._reader = TextReader(form.text.decode, form.stops)
        self._token_ids: list[int] = []
        self._phase = _Phase.UNDECIDED
        self._pending = ""  # text that has not been passed on yet
        self._reasoning = ""  # passed on so far
        self._content = ""  # passed on so far
        self._is_reasoning_closed = False

    def take(self, chunk: TokenChunk) -> tuple[Delta, int | None]:
        """Read the next tokens.

        Returns:
            delta: Next part of the reply that is certain.
            end: Number of tokens of the chunk after which the completion ends; None if it continues.
        """
        piece, count = self._reader.add(chunk.token_ids)
        before = len(self._token_ids)
        kept = tokens_between(chunk, 0, count)
        self._token_ids.extend(kept.token_ids)  # `+=` would make it an array
        end = count if self._reader.stop is not None else self._end_of_call(before)
        if end is not None:
            del self._token_ids[before + end :]
            kept = tokens_between(chunk, 0, end)
        if self._form.tools and any(map(self._form.text.is_special, kept.token_ids)):
            self._phase = _Phase.HELD
        self._pending += piece
        reasoning = content = ""
        if self._phase is _Phase.UNDECIDED:
            self._phase = self._next_phase()
        if self._phase is _Phase.REASONING:
            reasoning = self._take_reasoning()
        if self._phase is _Phase.CONTENT:
            content = self._take_content()
        return Delta(reasoning, content, (), kept.token_ids, kept.logprobs, kept.top_logprobs), end

    def end(self, completion: Completion) -> tuple[Delta, Reply]:
        """Return the rest of the reply, and the whole reply.

        Text that was passed on cannot change and is part of the message that comes back, even if the renderer reads the
        whole completion differently. Reasoning precedes content, so it is complete once content was passed on.
        """
        complete = self.read(completion)
        message = dict(complete.message)
        rest = self._pending + self._reader.end()
        if self._content or not complete.reasoning.startswith(self._reasoning):
            message["reasoning_content"] = self._reasoning + (rest if self._phase is _Phase.REASONING else "")
            if not message["reasoning_content"]:
                del message["reasoning_content"]
        if not complete.content.startswith(self._content):
            message["content"] = self._content + ("" if complete.tool_calls else rest)
        reply = replace(complete, message=message)
        new_reasoning, new_content = reply.reasoning[len(self._reasoning) :], reply.content[len(self._content) :]
        return Delta(new_reasoning, new_content, reply.tool_calls), reply

    def read(self, completion: Completion) -> Reply:
        """Read a whole completion of which nothing was passed on before."""
        parsed = self._form.parsed(completion.token_ids)
        content, stops = parsed.content, self._form.stops
        end, stop = find_stop(content, stops), self._reader.stop
        if end is not None and stop is None:  # text that appears only when no further token comes
            stop = next(each for each in stops if content.startswith(each, end))
        return Reply(reply_from(parsed, end=end), completion, stop)

    def _end_of_call(self, before: int) -> int | None:
        """Number of tokens of the last chunk up to the end of the first tool call; None if there is no complete
        call."""
        form = self._form
        if not (form.one_call and form.tools) or not any(map(self._may_end_a_call, self._token_ids[before:])):
            return None
        if not _has_call(form.parsed(self._token_ids)):
            return None
        ends = range(before + 1, len(self._token_ids) + 1)
        return next(end for end in ends if _has_call(form.parsed(self._token_ids[:end]))) - before

    def _may_end_a_call(self, token_id: int) -> bool:
        text = self._form.text
        return text.is_special(token_id) or not _MAY_END_A_CALL.isdisjoint(text.piece(token_id))

    def _next_phase(self) -> _Phase:
        """Decide what the pending text is. Strips the white space before it, and its `<think>`."""
        shown = self._pending.strip()
        is_begun_by_prompt = self._form.begins_thinking and not self._is_reasoning_closed
        if not shown or (not is_begun_by_prompt and THINK.startswith(shown)):
            return _Phase.UNDECIDED
        parsed = self._form.parsed(self._token_ids)
        if parsed.tool_calls:
            return _Phase.HELD
        if is_begun_by_prompt or shown.startswith(THINK):
            if parsed.reasoning_content and not parsed.content and not self._reasoning:
                self._pending = self._pending.lstrip().removeprefix(THINK)
                return _Phase.REASONING
            return _Phase.HELD if parsed.content or THINK_END in self._pending else _Phase.UNDECIDED
        if not parsed.content.strip().startswith(shown):
            return _Phase.HELD
        if not parsed.content[:1].isspace():
            self._pending = self._pending.lstrip()
        return _Phase.CONTENT

    def _take_reasoning(self) -> str:
        """Take the certain part of the reasoning. If it closes, decide what follows."""
        if not self._reasoning:
            self._pending = self._pending.lstrip()
        text, closed, rest = self._pending.partition(THINK_END)
        if not closed:  # the end may be a part of `</think>`, and with tools, a call may begin
            text = text.partition("<")[0] if self._form.tools else text[: len(text) - overlap(text, THINK_END)]
        text = text.rstrip()
        self._reasoning += text
        self._pending = rest if closed else self._pending[len(text) :]
        if closed:
            self._is_reasoning_closed = True
            self._phase = self._next_phase()
        return text

    def _take_content(self) -> str:
        text = _MAY_BEGIN_A_CALL.split(self._pending, 1)[0] if self._form.tools else self._pending
        text = text.rstrip()  # a renderer may strip trailing white space
        self._content += text
        self._pending = self._pending[len(text) :]
        return text
