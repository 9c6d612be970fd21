"""Shared parts of the protocols: sampling fields, tool choices, content parts, usage, logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import Field
from starlette.requests import Request

from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.conversations.caller import NO_RENDERER
from titan_rl.serving.conversations.constraint import Constraint
from titan_rl.serving.conversations.reply import Delta
from titan_rl.serving.conversations.turn import Turns
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.http.request import Body, Many
from titan_rl.serving.text import Text
from titan_rl.types import MOST_TOP_LOGPROBS, Completion, TokenChunk

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
TopP = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TopCount = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TemplateKwargs = Annotated[dict[str, Any], Field(max_length=64)]
Biases = Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]


def object_schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def union_schema(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


STRING = {"type": "string"}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # there is none


class SamplingBody(Body):
    """Sampling fields of a request; from `top_k` on they are vLLM's, in every protocol. Without `ignore_eos`,
    the model's own stop tokens end a completion, too."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop_token_ids: Many[TokenId] | None = None
    ignore_eos: bool = False

    @property
    def num_top_logprobs(self) -> int:
        """Number of likeliest tokens to report with each sampled one."""
        return 0

    def sampling(self, model_stops: Sequence[int]) -> dict[str, Any]:
        """Fields of `SamplingParams`, without the budget."""
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


Forced = str | bool | None
"""The tool that has to be called; True is any of those offered, and None says that none has to."""


def forced_in(choice: str | Mapping[str, Any] | None, name_in: Sequence[str]) -> Forced:
    """The tool that a `tool_choice` forces.

    Args:
        name_in: Keys that lead to the name of a tool: ("function", "name").

    Raises:
        ApiError: 400, it is no choice.
    """
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return True
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        told = "is not supported; it may be 'auto', 'none', 'required', or a function by its name"
        raise ApiError(400, f"tool_choice {told}", param="tool_choice", code=UNSUPPORTED_VALUE)
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
    """The constraint on a reply; None where it is free.

    Args:
        tools: Offered, in the form of OpenAI's chat.
        schema: Of the reply's text; True is any JSON object.
        params: The fields that force a tool, and ask for a schema.

    Raises:
        ApiError: 400, there is no such tool.
    """
    if forced is None or forced is False:
        return None if schema is None else Constraint(params[1], schema=schema, one_call=one_call)
    if not tools:
        raise ApiError(400, f"{params[0]} forces a call of a tool, and no tools are offered", param=params[0])
    if forced is True:
        return Constraint(params[0], tools, one_call=one_call)
    named = [tool for tool in tools if tool["function"]["name"] == forced]
    if not named:
        raise ApiError(400, f"{params[0]} names {forced[:100]!r}, which is none of the tools offered", param=params[0])
    return Constraint(params[0], named[:1], one_call=True)


def schema_in(kind: str, given: Mapping[str, Any] | None, param: str) -> Mapping[str, Any] | bool | None:
    """The schema of a reply's text, by the type of the format that is asked for.

    Raises:
        ApiError: 400, a schema is asked for and not there.
    """
    if kind == "json_schema" and given is None:
        raise ApiError(400, f"{param} is missing; it is the schema of the answer", param=param)
    return {"text": None, "json_object": True, "json_schema": given}[kind]


def wrong(param: str, message: str) -> ApiError:
    """A 400 that names a field of a message."""
    return ApiError(400, f"{param} {message}", param=param)


def string_in(given: Mapping[str, Any], name: str, where: str, *, default: str | None = None) -> str:
    """
    Raises:
        ApiError: 400, it is no string, or missing and there is no default.
    """
    value = given.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "must be a string")
    return value


def objects_in(given: Any, where: str) -> list[Mapping[str, Any]]:
    """
    Raises:
        ApiError: 400, it is no list of objects.
    """
    if not isinstance(given, list):
        raise wrong(where, "must be a list")
    entries = cast("list[Any]", given)
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise wrong(f"{where}[{index}]", "must be an object")
    return cast("list[Mapping[str, Any]]", entries)


def text_in(content: Any, where: str, types: Sequence[str]) -> str:
    """The text of content: a string, or parts of these types.

    Raises:
        ApiError: 400, names the part that is something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of parts")
    text = ""
    for index, part in enumerate(objects_in(content, where)):
        if part.get("type") not in types:
            raise wrong(f"{where}[{index}].type", f"is not supported; only {' and '.join(map(repr, types))} is")
        text += string_in(part, "text", f"{where}[{index}]")
    return text


def turns_of(turns: Turns | None) -> Turns:
    """
    Raises:
        ApiError: 400, there is no renderer.
    """
    if turns is None:
        raise ApiError(400, f"{NO_RENDERER}; ask /v1/completions or /inference/v1/generate")
    return turns


def check_choices(count: int, most: int, param: str) -> None:
    """
    Raises:
        ApiError: 400, a request asks for more completions than it may.
    """
    if count > most:
        raise ApiError(400, f"{param} asks for {count} completions; one request may have {most}", param=param)


def weight_versions(completion: Completion) -> list[dict[str, Any]]:
    """Policy versions and the tokens that each produced, in vLLM's form.

    Example: five tokens, the last two of version 7: `[{"version": "6", "start": 0, "end": 3}, {"version": "7", "start":
    3, "end": 5}]`.
    """
    spans: list[dict[str, Any]] = []
    position = 0
    for span in completion.version_spans:
        spans.append({"version": str(span.version), "start": position, "end": position + span.num_tokens})
        position += span.num_tokens
    return spans


def usage(num_prompt_tokens: int, completions: list[Completion]) -> dict[str, Any]:
    num_completion_tokens = sum(len(completion.token_ids) for completion in completions)
    told: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
    cached = [one.metrics["cached_prompt_tokens"] for one in completions if "cached_prompt_tokens" in one.metrics]
    if cached:
        told["prompt_tokens_details"] = {"cached_tokens": int(min(num_prompt_tokens, max(cached)))}
    return told


def session_id_of(request: Request) -> str | None:
    """The session a client names itself.

    Raises:
        ApiError: 400, it is too long.
    """
    given = request.headers.get("x-session-id")
    if given is not None and len(given) > 256:
        raise ApiError(400, "the header X-Session-ID is longer than 256 characters")
    return given or None


Tokens = Completion | TokenChunk | Delta


def token_logprobs(text: Text, tokens: Tokens) -> list[dict[str, Any]]:
    """In the form of chat: each token with the likeliest ones in its place, where they were asked for.

    Example, of a token that was the second likeliest, with `top_logprobs` of 2:

        [{"token": "b", "logprob": -1.1, "bytes": [98], "top_logprobs": [
            {"token": "a", "logprob": -0.7, "bytes": [97]}, {"token": "b", "logprob": -1.1, "bytes": [98]}]}]
    """
    told = [_told(text, *pair) for pair in zip(tokens.token_ids, tokens.logprobs, strict=True)]
    if tokens.top_logprobs is None:
        return [{**one, "top_logprobs": ()} for one in told]
    return [
        {**one, "top_logprobs": [_told(text, *pair) for pair in top]}
        for one, top in zip(told, tokens.top_logprobs, strict=True)
    ]


def top_by_text(text: Text, tokens: Tokens) -> list[dict[str, float]] | None:
    """In the form of text completions: by their text the likeliest tokens in each place, and the sampled one if it is
    none of them. Of tokens with the same text, the likeliest."""
    if tokens.top_logprobs is None:
        return None
    told: list[dict[str, float]] = []
    for token_id, logprob, top in zip(tokens.token_ids, tokens.logprobs, tokens.top_logprobs, strict=True):
        told.append({})
        for other, value in (*top, (token_id, logprob)):
            told[-1].setdefault(text.piece(other), max(value, LEAST_LOGPROB))
    return told


def _told(text: Text, token_id: int, logprob: float) -> dict[str, Any]:
    piece = text.piece(token_id)
    in_bytes = None if "\ufffd" in piece else list(piece.encode())  # else its bytes are part of a character
    return {"token": piece, "logprob": max(logprob, LEAST_LOGPROB), "bytes": in_bytes}
