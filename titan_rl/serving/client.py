"""HTTP clients: servers of `/inference/v1/generate` as a `GenerateFn`, servers of chat completions as a `ChatFn`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypedDict, Unpack, cast

import httpx

from titan_rl.core.arrays import LARGEST_TOKEN_ID, logprob_array, token_array
from titan_rl.core.calls.parsing import openai_base, server_root
from titan_rl.core.errors import GenerationError, PromptTooLongError, RequestError
from titan_rl.rollout.chat_env import ChatReply
from titan_rl.rollout.policy_text import continuing, joined, with_prefix_marked
from titan_rl.rollout.types import Message
from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.connections import Connections
from titan_rl.types import Completion, FinishReason, PromptScores, SamplingParams, VersionSpan

REFUSED = frozenset({400, 404, 413, 415, 422})
"""Status codes of errors in the request itself. A missing key and a full or failing server are not such errors."""

NOT_UNDERSTOOD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions raised when an answer of unexpected form is read. JSON that nests too deeply is a `RecursionError`."""


class HttpOptions(TypedDict, total=False):
    """Options of `HttpEndpoint`, which its clients pass on."""

    api_key: str | None
    timeout_s: float
    connection_attempts: int
    max_connections: int
    transport: httpx.AsyncBaseTransport | None


class HttpEndpoint:
    """Endpoint of a server, with its connections. Connection errors are retried with backoff. If a server answers 429
    with `Retry-After`, the request is repeated after that time, unless that would exceed `timeout_s`.

    Args:
        api_key: Sent as a bearer token.
        timeout_s: Time limit of one answer including all retries and waits, in seconds.
        connection_attempts: Number of attempts to connect, with growing pauses.
        busy: Further status codes that are retried, as often as a connection. By default the answer of a failing server
            is an error at once.
        transport: httpx transport that replaces the network.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        connection_attempts: int = 5,
        max_connections: int = 1024,
        busy: frozenset[int] = frozenset(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if connection_attempts < 1:
            raise ValueError(f"connection_attempts is {connection_attempts}; it must be at least 1")
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._attempts = connection_attempts
        self._busy = busy
        self._is_closed = False
        self._client = httpx.AsyncClient(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=None,
            transport=transport or Connections(max_connections),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calls in flight fail."""
        self._is_closed = True
        await self._client.aclose()

    async def post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        """Send a request, and return an answer with status 200.

        Raises:
            RequestError: The server refuses the request.
            GenerationError: The server cannot be reached, fails or is full for too long, or the client is closed.
        """
        ends_at = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(ends_at) as scope:
                response = await self._until_not_busy(body, headers, ends_at)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise GenerationError(f"{self.endpoint} did not answer within {self._timeout_s:g} s") from error
        if response.status_code != 200:
            message = f"{self.endpoint} answered {response.status_code}: {_message(response)}"
            raise RequestError(message) if response.status_code in REFUSED else GenerationError(message)
        return response

    async def _until_not_busy(
        self, body: Mapping[str, Any], headers: Mapping[str, str], ends_at: float
    ) -> httpx.Response:
        clock = asyncio.get_running_loop().time
        num_attempts = 1
        while True:
            response = await self._send(body, headers)
            pause_s = _retry_after_s(response)
            if pause_s is not None and clock() + pause_s >= ends_at:
                return response  # its message explains more than a time limit after a pause that is too long
            if pause_s is None:
                if response.status_code not in self._busy or num_attempts == self._attempts:
                    return response
                pause_s = _growing_pause(num_attempts)
                num_attempts += 1
            await asyncio.sleep(pause_s)

    async def _send(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        for attempt in range(1, self._attempts + 1):
            if self._is_closed:  # httpx would raise a RuntimeError
                raise GenerationError(f"the client of {self.endpoint} is closed")
            try:
                return await self._client.post(self.endpoint, json=body, headers=headers)
            except httpx.TransportError as error:
                if attempt == self._attempts:
                    raise GenerationError(f"{self.endpoint} cannot be reached: {error!r}") from error
            except httpx.HTTPError as error:
                raise GenerationError(f"{self.endpoint} could not be queried: {error!r}") from error
            await asyncio.sleep(_growing_pause(attempt))
        raise AssertionError("the last attempt returns or raises")


def is_int(value: Any) -> bool:
    """Return whether a value is an integer but not a boolean, which Python counts among the integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def _growing_pause(attempt: int) -> float:
    return min(2.0, 0.05 * 2**attempt)


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds after which a full server wants the request again; None if the response is final."""
    after = response.headers.get("retry-after", "")
    return max(0.01, float(after)) if response.status_code == 429 and after.isdecimal() else None


def _message(response: httpx.Response) -> str:
    """Return the error message of a response, with its code if there is one."""
    try:
        error = response.json()["error"]
        code = error.get("code")
        return f"{error['message']}{f' ({code})' if isinstance(code, str) else ''}"
    except NOT_UNDERSTOOD:
        return response.text[:200]


_ROUNDING = 1e-3
"""Tolerance by which rounding may put a logprob above 0."""


class HttpGenerateFn(HttpEndpoint):
    """A `GenerateFn` over HTTP, for a server of titan_rl, of vLLM, or another that implements the protocol.

    Only connection errors are retried, so that a failing server is noticed. If a server answers 429 with `Retry-After`,
    the request is repeated after that time.

    Example:

        async with HttpGenerateFn("http://127.0.0.1:8000") as generate:
            completion = await generate([1, 2, 3], request_id="a", sampling=SamplingParams(max_tokens=8))

    Args:
        url: URL of the server, with or without the "/v1" at its end. The path of the endpoint is added.
        model: Name of the model; None for the one that is served.
        version: Policy version of tokens for which the server reports no version, or one that is not a number.
        options: Key, limits and transport of the connections; see `HttpEndpoint`.

    vLLM returns logprobs of the distribution that tokens are sampled from only if it is started with `--logprobs-mode
    processed_logprobs`.
    """

    def __init__(self, url: str, *, model: str | None = None, version: int = 0, **options: Unpack[HttpOptions]) -> None:
        super().__init__(f"{server_root(url)}/inference/v1/generate", **options)
        self._model = model
        self._version = version

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        """Generate a completion.

        Raises:
            RequestError: The server refuses the request, or the request has a constraint or asks for routed experts or
                top logprobs, which are not transferred over HTTP.
            GenerationError: The server cannot be reached, fails, is full for too long, or sends an answer that cannot
                be understood.
        """
        if sampling.constraint is not None:
            raise RequestError(
                f"request {request_id!r} has a constraint, whose allowed logprobs are not transferred over HTTP"
            )
        if sampling.return_routed_experts or sampling.top_logprobs:
            output = "routed experts" if sampling.return_routed_experts else "top logprobs"
            raise RequestError(f"request {request_id!r} asks for {output}, which are not transferred over HTTP")
        body = {
            "request_id": request_id,
            "model": self._model,
            "token_ids": list(prompt_token_ids),
            "sampling_params": _wire_sampling(sampling),
        }
        headers = {} if session_id is None else {"x-session-id": session_id}
        response = await self.post(body, headers)
        try:
            answer = response.json()
            completion = self._completion(request_id, answer, sampling.max_tokens)
            if sampling.prompt_logprobs is None:
                return completion
            scores = prompt_scores_of(answer.get("prompt_logprobs"), prompt_token_ids, sampling.prompt_logprobs)
            return replace(completion, prompt_scores=scores)
        except NOT_UNDERSTOOD as error:
            raise GenerationError(f"{self.endpoint} sent an invalid completion: {error!r}") from error

    def _completion(self, request_id: str, answer: Any, max_tokens: int) -> Completion:
        (choice,) = answer["choices"]
        token_ids = [_token_id(token_id) for token_id in choice["token_ids"]]
        if len(token_ids) > max_tokens:
            raise ValueError(f"it has {len(token_ids)} tokens; max_tokens is {max_tokens}")
        logprobs = [_logprob(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        spans = self._spans(choice.get("weight_versions") or ())
        if not spans and token_ids:
            spans = (VersionSpan(self._version, len(token_ids)),)
        cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        metrics = {} if cached is None else {"cached_prompt_tokens": float(cached)}
        return Completion(
            request_id, token_ids, logprobs, FinishReason(choice["finish_reason"]), spans, metrics=metrics
        )

    def _spans(self, version_spans: Sequence[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        at = 0
        for span in version_spans:
            start, end = span["start"], span["end"]
            if not (is_int(start) and is_int(end) and at == start <= end):
                raise ValueError(f"weight_versions continues at token {at} with {start!r} to {end!r}")
            spans.append(VersionSpan(self._version_of(span["version"]), end - start))
            at = end
        return tuple(spans)

    def _version_of(self, version: Any) -> int:
        """Parse the version in a server's answer. vLLM names weights that were never updated "default"."""
        return int(version) if str(version).isdecimal() else self._version


def _token_id(value: Any) -> int:
    if not (is_int(value) and 0 <= value <= LARGEST_TOKEN_ID):
        raise ValueError(f"token_ids has {value!r}; it must be an integer between 0 and {LARGEST_TOKEN_ID}")
    return value


def _logprob(value: Any) -> float:
    if not ((is_int(value) or isinstance(value, float)) and LEAST_LOGPROB < value <= _ROUNDING):
        # `LEAST_LOGPROB` represents minus infinity, and comparisons with NaN are false.
        raise ValueError(f"a logprob is {value!r}; it must be a number above {LEAST_LOGPROB:g} and not above 0")
    return float(value)


def _prompt_logprob(value: Any) -> float:
    """Parse the logprob of a token that was not sampled, which may be minus infinity."""
    return LEAST_LOGPROB if value == LEAST_LOGPROB else _logprob(value)


def _wire_sampling(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_tokens,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token): value for token, value in sampling.logit_bias} or None,
        "ignore_eos": True,  # the request names its stop tokens itself
        "logprobs": 0,
        "skip_special_tokens": False,
        **({} if sampling.prompt_logprobs is None else {"prompt_logprobs": sampling.prompt_logprobs}),
    }


def prompt_scores_of(prompt_logprobs: Any, prompt: Sequence[int], top_k: int) -> PromptScores:
    """Parse the scores of a prompt in vLLM's form: for each token the logprobs by token id; None for the first token.

    Raises:
        ValueError: The scores are of other tokens, or fewer than `top_k` at a position.
    """
    if not isinstance(prompt_logprobs, list) or len(cast("list[Any]", prompt_logprobs)) != len(prompt):
        raise ValueError(
            f"prompt_logprobs are {str(prompt_logprobs)[:60]}; each of {len(prompt)} tokens needs an entry"
        )
    if prompt_logprobs[0]:
        raise ValueError(
            f"prompt_logprobs have {str(prompt_logprobs[0])[:60]} for the first token, which follows no other; they "
            "may be of the tokens after their positions"
        )
    logprobs: list[float] = []
    top: list[tuple[int, float]] = []
    for token, entry in zip(prompt[1:], cast("list[Any]", prompt_logprobs)[1:], strict=True):
        if not isinstance(entry, dict):
            raise ValueError(f"prompt_logprobs have {entry!r} at one position; it must be logprobs by token id")
        by_token = {int(each): _prompt_logprob(shown["logprob"]) for each, shown in entry.items()}
        if token not in by_token:
            raise ValueError(f"prompt_logprobs have no token {token} at its position")
        if len(by_token) < top_k:
            raise ValueError(f"prompt_logprobs have {len(by_token)} tokens at one position; {top_k} were requested")
        logprobs.append(by_token[token])
        top += sorted(by_token.items(), key=lambda pair: pair[1], reverse=True)[:top_k]
    return PromptScores(
        logprob_array(logprobs),
        top_k,
        token_array([token for token, _ in top]),
        logprob_array([logprob for _, logprob in top]),
    )


_BUSY = frozenset({429, 502, 503, 504, 529})

_TOO_LONG = ("context_length_exceeded", "context length", "context window", "prompt is too long")
"""Phrases by which servers report that a prompt is too long."""


class HttpChatFn(HttpEndpoint):
    """A `ChatFn` over `POST /v1/chat/completions`, as served by OpenAI, vLLM, titan_rl and others.

    Requests to a server that is temporarily busy or down are retried with backoff.

    Example:

        async with HttpChatFn("https://api.openai.com/v1", model="gpt-5-mini", api_key=key) as chat:
            reply = await chat(messages, request_id="a", sampling=SamplingParams(max_tokens=64))

    Args:
        url: URL of the server, with or without the "/v1" at its end.
        model: Name of the model on the server.
        body: More fields of each request, such as {"reasoning_effort": "low"}. A field with the value None is left out
            of the request, such as {"temperature": None} for a model that accepts no temperature.
        options: Key, limits and transport of the connections; see `HttpEndpoint`.
    """

    def __init__(
        self, url: str, *, model: str, body: Mapping[str, Any] | None = None, **options: Unpack[HttpOptions]
    ) -> None:
        super().__init__(f"{openai_base(url)}/chat/completions", busy=_BUSY, **options)
        self._model = model
        self._body = dict(body or {})
        self._max_tokens = "max_tokens"  # name of this field in requests to this server

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> ChatReply:
        """Generate a reply.

        Raises:
            PromptTooLongError: The server reports that the prompt is too long.
            RequestError: The server refuses the request, or withholds the reply.
            GenerationError: The server cannot be reached, fails, is busy for too long, or sends an answer that cannot
                be understood.
        """
        headers = {} if session_id is None else {"x-session-id": session_id}
        response = await self._post(messages, tools, sampling, headers)
        try:
            return _reply(response.json())
        except NOT_UNDERSTOOD as error:
            if isinstance(error, RequestError):
                raise
            raise GenerationError(f"{self.endpoint} sent an invalid reply: {error!r}") from error

    async def _post(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        sampling: SamplingParams,
        headers: Mapping[str, str],
    ) -> httpx.Response:
        try:
            return await self.post(self._request(messages, tools, sampling), headers)
        except RequestError as error:
            message = str(error)
            if self._max_tokens == "max_tokens" and "max_completion_tokens" in message:
                self._max_tokens = "max_completion_tokens"
                return await self._post(messages, tools, sampling, headers)
            if any(sign in message.lower() for sign in _TOO_LONG):
                raise PromptTooLongError(message) from error
            raise

    def _request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None, sampling: SamplingParams
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": _wire_messages(joined(with_prefix_marked(messages))),
            self._max_tokens: sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }
        body |= continuing(messages)
        if tools:
            body["tools"] = list(tools)
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        return {name: value for name, value in (body | self._body).items() if value is not None}


def _wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the protocol. Arguments of calls become text, reasoning is left out, and a tool's answer
    names its call: by default the first that has no answer yet."""
    wired: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for message in messages:
        sent = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
        if calls := message.get("tool_calls"):
            sent["tool_calls"] = [_wire_call(call, f"call_{len(wired)}_{index}") for index, call in enumerate(calls)]
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
    reply = choice["message"]
    message: dict[str, Any] = {"role": "assistant", "content": _text(reply.get("content"))}
    if reasoning := reply.get("reasoning_content") or reply.get("reasoning"):
        message["reasoning_content"] = str(reasoning)
    if calls := reply.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    usage = answer.get("usage") or {}
    used, read = usage.get("completion_tokens"), usage.get("prompt_tokens")
    finish_reason = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
    return ChatReply(message, finish_reason, used if isinstance(used, int) else None, read if is_int(read) else None)


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
