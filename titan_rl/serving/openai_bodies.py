"""The requests of OpenAI's protocol, as far as they are supported. What is not has no field, or one that allows only
what changes nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from titan_rl.serving.wire import (
    Body,
    Count,
    One,
    Probability,
    Seed,
    StreamOptions,
    Temperature,
    TokenId,
    TopP,
    Zero,
)

StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class SamplingBody(Body):
    """What chat and text completions have in common. From `top_k` on it is vLLM's."""

    model: str | None = None
    n: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_tokens: Count | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    repetition_penalty: One = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, model_stops: tuple[int, ...]) -> dict[str, Any]:
        """Fields of `SamplingParams`, without the budget."""
        own = () if self.ignore_eos else model_stops
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or -1,
            "min_p": self.min_p or 0.0,
            "min_tokens": self.min_tokens or 0,
            "seed": self.seed,
            "stop_token_ids": tuple(dict.fromkeys((*(self.stop_token_ids or ()), *own))),
        }


class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Literal[0] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class ChatBody(SamplingBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    store: Literal[False] | None = None
    # These say nothing of the completion.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None


class TextFormat(Body):
    type: Literal["text"]
