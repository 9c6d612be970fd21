"""Shared parts of the protocols: their backend, sampling fields, tool choices, content parts, usage, logprobs."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal, cast

from cachetools import LRUCache
from pydantic import Field, WithJsonSchema
from starlette.requests import Request

from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.conversations.caller import NO_RENDERER, Caller, CallerPrompt
from titan_rl.serving.conversations.constraint import Constraint
from titan_rl.serving.conversations.reply import Delta
from titan_rl.serving.conversations.turn import Turns
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.http.exchange import Exchanges
from titan_rl.serving.http.request import Body, Many
from titan_rl.serving.policy import ServedPolicy
from titan_rl.serving.text import Text, Tokenizing
from titan_rl.types import MOST_TOP_LOGPROBS, Completion, TokenChunk


@dataclass(frozen=True, slots=True)
class Backend:
    """Objects behind the endpoints that generate or tokenize.

    Args:
        text: None without a tokenizer.
        turns: None without a tokenizer or a renderer.
        stop_token_ids: Stop tokens of the model, which end a completion unless a client asks for `ignore_eos`.
    """

    policy: ServedPolicy
    exchanges: Exchanges
    tokenizing: Tokenizing
    text: Text | None
    turns: Turns | None
    stop_token_ids: tuple[int, ...]

    def require_turns(self) -> Turns:
        """Return the turns of a server that has a renderer.

        Raises:
            ApiError: With status 400 if the server has no renderer.
        """
        if self.turns is None:
            raise ApiError(400, f"{NO_RENDERER}; or use /v1/completions or /inference/v1/generate")
        return self.turns

    def check_choices(self, count: int, param: str) -> None:
        """Check the number of completions of a request.

        Raises:
            ApiError: With status 400 if the request asks for more completions than allowed.
        """
        most = self.exchanges.limits.num_choices
        if count > most:
            raise ApiError(400, f"{param} asks for {count} completions; one request may have {most}", param=param)

    def show(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, for transcripts."""
        return f"{len(token_ids)} tokens" if self.text is None else self.text.decode(token_ids)

    def record(self, prompt: CallerPrompt, completions: Sequence[Completion]) -> None:
        """Record completions of a prompt that was given as tokens or text. Called once the answer is encoded, because
        completions that cannot be sent must not be kept."""
        for index, completion in enumerate(completions):
            prompt.record(index, completion, {"role": "assistant", "content": self.show(completion.token_ids)})


class CallerCache:
    """Encoded values by caller and id, with LRU eviction. Callers do not find what belongs to others. Thread-safe,
    because long requests are read in a thread.

    Args:
        most_bytes: Memory for all values. Larger values are not stored.
    """

    def __init__(self, most_bytes: int) -> None:
        self._values: LRUCache[tuple[bytes, str], tuple[bytes, ...]] = LRUCache(
            most_bytes, getsizeof=lambda value: sum(map(len, value))
        )
        self._lock = threading.Lock()

    def add(self, caller: Caller, value_id: str, *value: bytes) -> None:
        with suppress(ValueError), self._lock:  # it may be larger than the limit of all together
            self._values[caller.name, value_id] = value

    def find(self, caller: Caller, value_id: str) -> tuple[bytes, ...] | None:
        with self._lock:
            return self._values.get((caller.name, value_id))

    def remove(self, caller: Caller, value_id: str) -> tuple[bytes, ...] | None:
        with self._lock:
            return self._values.pop((caller.name, value_id), None)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TopCount = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TemplateKwargs = Annotated[dict[str, Any], Field(max_length=64)]
Bias = Annotated[float, Field(ge=-100, le=100)]


SCHEMAS: Mapping[str, Mapping[str, Any]] = json.loads(
    files("titan_rl.serving.protocols").joinpath("schemas.json").read_text("utf-8")
)
"""JSON schemas of objects that are checked by functions, for `/openapi.json`."""


def described(name: str) -> WithJsonSchema:
    """Annotation of a field whose schema is in `SCHEMAS`."""
    return WithJsonSchema(dict(SCHEMAS[name]))


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect


class SamplingBody(Body):
    """Sampling fields of a request. Those from `top_k` on are vLLM's, in every protocol. Without `ignore_eos`, the
    model's own stop tokens end a completion, too."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop_token_ids: Many[TokenId] | None = None
    ignore_eos: bool = False

    @property
    def num_top_logprobs(self) -> int:
        """Number of likeliest tokens to report with each sampled token."""
        return 0

    def sampling(self, model_stops: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `SamplingParams` except the budget."""
        own = () if self.ignore_eos else model_stops
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or -1,
            "min_p": self.min_p or 0.0,
            "min_tokens": self.min_tokens or 0,
            "seed": self.seed,
            "top_logprobs": self.num_top_logprobs,
            "stop_token_ids": tuple(dict.fromkeys((*(self.stop_token_ids or ()), *own))),
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "logit_bias": self.logit_bias or (),
        }


Forced = str | Literal[True] | None
"""Name of the tool that must be called. True stands for any offered tool, None for no forced call."""


def forced_in(choice: str | Mapping[str, Any] | None, name_in: Sequence[str]) -> Forced:
    """Return the tool that a `tool_choice` forces.

    Args:
        name_in: Keys that lead to the name of a tool, such as ("function", "name").

    Raises:
        ApiError: With status 400 if the choice is not valid.
    """
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return True
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        problem = "is not supported; it may be 'auto', 'none', 'required', or a function by its name"
        raise ApiError(400, f"tool_choice {problem}", param="tool_choice", code=UNSUPPORTED_VALUE)
    found: Any = choice
    for key in name_in:
        found = cast("Mapping[str, Any]", found).get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, str):
        raise wrong("tool_choice." + ".".join(name_in), "must be a string")
    return found


def constraint_of(
    tools: Sequence[Mapping[str, Any]] | None,
    forced: Forced,
    schema: Mapping[str, Any] | bool | None,
    *,
    one_call: bool,
    params: tuple[str, str],
) -> Constraint | None:
    """Make the constraint on a reply; None if the reply is free.

    Args:
        tools: Offered tools in the form of OpenAI's chat.
        schema: Schema of the reply's text; True is any JSON object.
        params: Names of the fields that force a tool and that ask for a schema.

    Raises:
        ApiError: With status 400 if the forced tool is not offered.
    """
    if forced is None:
        return None if schema is None else Constraint(params[1], schema=schema, one_call=one_call)
    if not tools:
        raise ApiError(400, f"{params[0]} forces a tool call, but no tools are offered", param=params[0])
    if forced is True:
        return Constraint(params[0], tools, one_call=one_call)
    named = [tool for tool in tools if tool["function"]["name"] == forced]
    if not named:
        raise ApiError(
            400, f"{params[0]} names {forced[:100]!r}, which is not among the offered tools", param=params[0]
        )
    return Constraint(params[0], named[:1], one_call=True)


def schema_in(kind: str, given: Mapping[str, Any] | None, param: str) -> Mapping[str, Any] | bool | None:
    """Return the schema of a reply's text, by the type of the requested format.

    Raises:
        ApiError: With status 400 if a schema is required and missing.
    """
    if kind == "json_schema" and given is None:
        raise ApiError(400, f"{param} is missing; it is the schema of the answer", param=param)
    return {"text": None, "json_object": True, "json_schema": given}[kind]


def wrong(param: str, message: str) -> ApiError:
    """Make an error with status 400 that names a field of the request."""
    return ApiError(400, f"{param} {message}", param=param)


def string_in(given: Mapping[str, Any], name: str, where: str, *, default: str | None = None) -> str:
    """Return a string field.

    Raises:
        ApiError: With status 400 if the field is not a string, or is missing without a default.
    """
    value = given.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "must be a string")
    return value


def objects_in(given: Any, where: str) -> list[Mapping[str, Any]]:
    """Return a list of objects.

    Raises:
        ApiError: With status 400 if the value is not a list of objects.
    """
    if not isinstance(given, list):
        raise wrong(where, "must be a list")
    entries = cast("list[Any]", given)
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise wrong(f"{where}[{index}]", "must be an object")
    return cast("list[Mapping[str, Any]]", entries)


def text_in(content: Any, where: str, types: Sequence[str]) -> str:
    """Return the text of content: of a string, or of parts of these types.

    Raises:
        ApiError: With status 400. The message names the part of another type.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of parts")
    parts = objects_in(content, where)
    return "".join(part_text(part, f"{where}[{index}]", types) for index, part in enumerate(parts))


def part_text(part: Mapping[str, Any], where: str, types: Sequence[str]) -> str:
    """Return the text of a part of content.

    Raises:
        ApiError: With status 400 if the part is of another type, or has no text.
    """
    if part.get("type") not in types:
        raise wrong(f"{where}.type", f"is not supported; only {' and '.join(map(repr, types))} is")
    return string_in(part, "text", where)


def weight_versions(completion: Completion) -> list[dict[str, Any]]:
    """Policy versions and the tokens that each produced, in vLLM's form.

    Example: five tokens, the last two from version 7, give `[{"version": "6", "start": 0, "end": 3}, {"version": "7",
    "start": 3, "end": 5}]`.
    """
    spans: list[dict[str, Any]] = []
    position = 0
    for span in completion.version_spans:
        spans.append({"version": str(span.version), "start": position, "end": position + span.num_tokens})
        position += span.num_tokens
    return spans


def usage(num_prompt_tokens: int, completions: list[Completion]) -> dict[str, Any]:
    num_completion_tokens = sum(len(completion.token_ids) for completion in completions)
    fields: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
    cached = [one.metrics["cached_prompt_tokens"] for one in completions if "cached_prompt_tokens" in one.metrics]
    if cached:
        fields["prompt_tokens_details"] = {"cached_tokens": int(min(num_prompt_tokens, max(cached)))}
    return fields


def session_id_of(request: Request) -> str | None:
    """Return the session that a client names; None if it names none.

    Raises:
        ApiError: With status 400 if the name is too long.
    """
    given = request.headers.get("x-session-id")
    if given is not None and len(given) > 256:
        raise ApiError(400, "the header X-Session-ID is longer than 256 characters")
    return given or None


Tokens = Completion | TokenChunk | Delta


def token_logprobs(text: Text, tokens: Tokens) -> list[dict[str, Any]]:
    """Convert logprobs to the form of chat: each token with the likeliest tokens at its position, if they were
    requested.

    Example of a token that was the second likeliest, with `top_logprobs` of 2:

        [{"token": "b", "logprob": -1.1, "bytes": [98], "top_logprobs": [
            {"token": "a", "logprob": -0.7, "bytes": [97]}, {"token": "b", "logprob": -1.1, "bytes": [98]}]}]
    """
    entries = [_logprob_entry(text, *pair) for pair in zip(tokens.token_ids, tokens.logprobs, strict=True)]
    if tokens.top_logprobs is None:
        return [{**one, "top_logprobs": ()} for one in entries]
    return [
        {**one, "top_logprobs": [_logprob_entry(text, *pair) for pair in top]}
        for one, top in zip(entries, tokens.top_logprobs, strict=True)
    ]


def top_by_text(text: Text, tokens: Tokens) -> list[dict[str, float]] | None:
    """Convert logprobs to the form of text completions: for each position the likeliest tokens by their text, and the
    sampled token if it is not among them. Of several tokens with the same text, the likeliest counts."""
    if tokens.top_logprobs is None:
        return None
    by_text: list[dict[str, float]] = []
    for token_id, logprob, top in zip(tokens.token_ids, tokens.logprobs, tokens.top_logprobs, strict=True):
        by_text.append({})
        for other, value in (*top, (token_id, logprob)):
            by_text[-1].setdefault(text.piece(other), max(value, LEAST_LOGPROB))
    return by_text


def _logprob_entry(text: Text, token_id: int, logprob: float) -> dict[str, Any]:
    piece = text.piece(token_id)
    in_bytes = None if "\ufffd" in piece else list(piece.encode())  # None if its bytes are part of a character
    return {"token": piece, "logprob": max(logprob, LEAST_LOGPROB), "bytes": in_bytes}
