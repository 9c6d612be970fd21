"""One completion as a chat message, whole or in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from titan_rl.rollout.renderer.chat_template import Answer
from titan_rl.rollout.renderer.types import ParsedResponse, Renderer
from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.policy.text import Text, TextReader, find_stop
from titan_rl.serving.protocols.openai.bodies import ChatBody
from titan_rl.serving.protocols.openai.messages import reply_from
from titan_rl.serving.protocols.wire import weight_versions
from titan_rl.types import Completion, FinishReason, TokenChunk

_THINK, _THINK_END = "<think>", "</think>"


class _Mode(Enum):
    UNKNOWN = "no text yet"
    LIVE = "text is told as it comes"
    HELD = "what the text is shows when it is whole"


class ChatChoice:
    """Only a renderer knows what in a completion is content, reasoning or a call of a tool, and it reads whole
    completions. So text is told as it comes where it can only be content: no tools are offered, and it does not begin
    with reasoning. Else content comes in one piece, at the end.

    Attributes:
        message: what the client was given, once it is whole.
    """

    def __init__(
        self,
        index: int,
        renderer: Renderer,
        text: Text,
        body: ChatBody,
        tools: list[dict[str, Any]] | None,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.message: dict[str, Any] | None = None
        self._index = index
        self._renderer = renderer
        self._text = text
        self._body = body
        self._tools = tools
        self._prompt_token_ids = prompt_token_ids
        self._reader = TextReader(text.decode, body.stops)
        self._token_ids: list[int] = []
        self._begun = False
        self._pending = ""  # text that is not told yet
        self._sent = ""
        is_thinking = text.decode(list(prompt_token_ids[-8:])).rstrip().endswith(_THINK)
        self._mode = _Mode.HELD if tools or is_thinking else _Mode.UNKNOWN

    def take(self, chunk: TokenChunk) -> tuple[list[dict[str, Any]], int | None]:
        """
        Returns:
            events: what there is to tell.
            end: tokens of the chunk after which a stop string ends the completion, if it does.
        """
        piece, count = self._reader.add(chunk.token_ids)
        token_ids = chunk.token_ids[:count]
        self._token_ids += token_ids
        text = self._told_now(piece)
        told = self._tokens(token_ids, chunk.logprobs[:count])
        events = self._begin()
        if text or told:
            events.append(self._event({"content": text} if text else {}, **told))
        return events, count if self._reader.stopped else None

    def end(self, completion: Completion) -> list[dict[str, Any]]:
        """The last events, of which the last says how it ended."""
        message = self._reply(completion)
        content, rest = message["content"] or "", self._pending + self._reader.end()
        if self._mode is _Mode.LIVE and not content.startswith(self._sent):
            # What was told stands, and is the message that comes back.
            message = {"role": "assistant", "content": self._sent + rest, "refusal": None}
        else:
            rest = content[len(self._sent) :]
        self.message = message
        delta: dict[str, Any] = {"content": rest} if rest else {}
        if "reasoning_content" in message:
            delta["reasoning_content"] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        events = self._begin()
        if delta:
            events.append(self._event(delta))
        events.append(self._event({}, **self._ending(message, completion)))
        return events

    def whole(self, completion: Completion) -> dict[str, Any]:
        self.message = message = self._reply(completion)
        told = self._tokens(completion.token_ids, completion.logprobs)
        return {
            "index": self._index,
            "message": message,
            "logprobs": None,
            **told,
            **self._ending(message, completion),
        }

    def _told_now(self, piece: str) -> str:
        if self._mode is _Mode.HELD:
            return ""
        self._pending += piece
        if self._mode is _Mode.UNKNOWN:
            shown = self._pending.strip()
            if not shown or (shown != _THINK and _THINK.startswith(shown)):
                return ""
            parsed = self._parsed(self._token_ids)
            if parsed.reasoning_content or not parsed.content.strip().startswith(shown):
                self._mode, self._pending = _Mode.HELD, ""
                return ""
            self._mode = _Mode.LIVE
            if not parsed.content[:1].isspace():
                self._pending = self._pending.lstrip()
        text = self._pending.rstrip()  # a renderer may strip what follows
        self._pending = self._pending[len(text) :]
        self._sent += text
        return text

    def _reply(self, completion: Completion) -> dict[str, Any]:
        parsed = self._parsed(completion.token_ids)
        return reply_from(parsed, end=find_stop(parsed.content, self._body.stops))

    def _parsed(self, token_ids: Sequence[int]) -> ParsedResponse:
        try:
            parsed = self._renderer.parse_response(
                list(token_ids), tools=self._tools, prompt_ids=list(self._prompt_token_ids)
            )
        except Exception:  # a renderer raises where there is no message in it; there is text
            return Answer(self._text.decode(token_ids))
        if self._tools or not parsed.tool_calls:
            return parsed
        # Nobody offered a tool, so what looks like a call of one is text.
        content = self._text.decode(token_ids).rpartition(_THINK_END)[2].strip()
        return Answer(content, reasoning_content=parsed.reasoning_content)

    def _ending(self, message: dict[str, Any], completion: Completion) -> dict[str, Any]:
        reason = completion.finish_reason
        if "tool_calls" in message and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        return {"finish_reason": str(reason), "weight_versions": weight_versions(completion)}

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        return [self._event({"role": "assistant", "content": ""})]

    def _event(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def _tokens(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._body.logprobs:
            told["logprobs"] = {
                "content": [
                    self._logprob(token_id, logprob) for token_id, logprob in zip(token_ids, logprobs, strict=True)
                ],
                "refusal": None,
            }
        if self._body.return_token_ids:
            told["token_ids"] = list(token_ids)
        return told

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._text.piece(token_id)
        in_bytes = None if "\ufffd" in piece else list(piece.encode())  # else its bytes are part of a character
        return {"token": piece, "logprob": max(logprob, LEAST_LOGPROB), "bytes": in_bytes, "top_logprobs": ()}
