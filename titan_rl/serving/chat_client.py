"""Any server of OpenAI's chat completions as a `ChatFn`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import httpx

from titan_rl.core.errors import GenerationError, PromptTooLongError, RequestError
from titan_rl.rollout.environment.chat import ChatReply
from titan_rl.rollout.types import Message
from titan_rl.serving.asking import NOT_UNDERSTOOD, Asking
from titan_rl.types import FinishReason, SamplingParams

_BUSY = frozenset({429, 502, 503, 504, 529})

_TOO_LONG = ("context_length_exceeded", "context length", "context window", "prompt is too long")
"""How servers say that a prompt does not fit."""


class HttpChatFn:
    """A `ChatFn` over `POST /v1/chat/completions`: of OpenAI, vLLM, titan_rl, and whoever else has it.

    A server that is full or down for a moment is asked again, ever more slowly.

    Example:

        async with HttpChatFn("https://api.openai.com/v1", model="gpt-5-mini", api_key=key) as chat:
            reply = await chat(messages, request_id="a", sampling=SamplingParams(max_tokens=64))

    Args:
        url: of the server, with or without its "/v1".
        model: by which the server knows it.
        api_key: sent as a bearer token.
        body: more fields of each request, such as {"reasoning_effort": "low"}; one that is None leaves out what would
            be sent, such as {"temperature": None} for a model that takes none.
        timeout_s: of one reply, all retries and waits included.
        connection_attempts: how often a connection, or a server that is busy, is tried.
        transport: of httpx, in the place of the network.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = 3600.0,
        connection_attempts: int = 5,
        max_connections: int = 1024,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._asking = Asking(
            f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions",
            api_key=api_key,
            timeout_s=timeout_s,
            connection_attempts=connection_attempts,
            max_connections=max_connections,
            busy=_BUSY,
            transport=transport,
        )
        self._model = model
        self._body = dict(body or {})
        self._max_tokens = "max_tokens"  # by its name in this server's requests

    async def __aenter__(self) -> HttpChatFn:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calls under way fail."""
        await self._asking.close()

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> ChatReply:
        """
        Raises:
            PromptTooLongError: the server says so.
            RequestError: the server refuses the request, or withholds the reply.
            GenerationError: the server cannot be reached, fails, is busy for too long, or says what cannot be
                understood.
        """
        headers = {} if session_id is None else {"x-session-id": session_id}
        response = await self._post(messages, tools, sampling, headers)
        try:
            return _reply(response.json())
        except NOT_UNDERSTOOD as error:
            if isinstance(error, RequestError):
                raise
            raise GenerationError(f"{self._asking.endpoint} answered with what is no reply: {error!r}") from error

    async def _post(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        sampling: SamplingParams,
        headers: Mapping[str, str],
    ) -> httpx.Response:
        try:
            return await self._asking.post(self._request(messages, tools, sampling), headers)
        except RequestError as error:
            said = str(error)
            if self._max_tokens == "max_tokens" and "max_completion_tokens" in said:
                self._max_tokens = "max_completion_tokens"
                return await self._post(messages, tools, sampling, headers)
            if any(sign in said.lower() for sign in _TOO_LONG):
                raise PromptTooLongError(said) from error
            raise

    def _request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None, sampling: SamplingParams
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": _wire_messages(messages),
            self._max_tokens: sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }
        if tools:
            body["tools"] = list(tools)
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        return {name: value for name, value in (body | self._body).items() if value is not None}


def _wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Arguments of calls are text there, reasoning stays with who reasoned, and a tool's answer names its call: the
    first that has none yet."""
    wired: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for message in messages:
        sent = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
        if calls := message.get("tool_calls"):
            sent["tool_calls"] = [_wire_call(call, f"call_{len(wired)}_{place}") for place, call in enumerate(calls)]
            unanswered = [call["id"] for call in sent["tool_calls"]]
        if message.get("role") == "tool" and unanswered:
            answered = sent.setdefault("tool_call_id", unanswered[0])
            unanswered = [call_id for call_id in unanswered if call_id != answered]
        wired.append(sent)
    return wired


def _wire_call(call: Mapping[str, Any], otherwise: str) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {
        "id": call.get("id") or otherwise,
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": text},
    }


def _reply(answer: Any) -> ChatReply:
    (choice,) = answer["choices"]
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        raise RequestError("the server withholds its reply: content_filter")
    told = choice["message"]
    message: dict[str, Any] = {"role": "assistant", "content": _text(told.get("content"))}
    if reasoning := told.get("reasoning_content") or told.get("reasoning"):
        message["reasoning_content"] = str(reasoning)
    if calls := told.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    used = (answer.get("usage") or {}).get("completion_tokens")
    finish_reason = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
    return ChatReply(message, finish_reason, used if isinstance(used, int) else None)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(cast("str", part["text"]) for part in content if part.get("type") == "text")


def _call(call: Any) -> dict[str, Any]:
    function = call["function"]
    arguments: Any = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = cast("Any", parsed) if isinstance(parsed, dict) else arguments
    return {
        "type": "function",
        "id": call.get("id"),
        "function": {"name": str(function["name"]), "arguments": arguments},
    }
