"""Endpoints for tokens in vLLM's form: `POST /inference/v1/generate`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import repeat
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request

from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.conversations.caller import Show, Talk, caller_of
from titan_rl.serving.conversations.turn import TurnAsk, Turns
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.http.exchange import Answer, Emit, Exchanges, encoded
from titan_rl.serving.http.request import Body, Many, read
from titan_rl.serving.policy import Ask, ServedPolicy
from titan_rl.serving.protocols.openai.bodies import Chat, Tool, messages_from, take_prefill, tools_from
from titan_rl.serving.protocols.wire import (
    Count,
    SamplingBody,
    StreamOptions,
    TemplateKwargs,
    TokenId,
    TopCount,
    check_choices,
    session_id_of,
    turns_of,
    usage,
    weight_versions,
)
from titan_rl.serving.text import Text, Tokenizing
from titan_rl.types import Completion, PromptScores, TokenChunk


class TokenSampling(SamplingBody):
    """Supported sampling parameters of vLLM."""

    n: Count | None = None
    max_tokens: Count | None = None
    logprobs: TopCount | None = None
    """0 and 1 report the logprobs of the sampled tokens alone; a larger number also those of so many of the
    likeliest."""
    prompt_logprobs: TopCount | None = None
    """Number of likeliest tokens whose logprobs are reported at each token of the prompt, besides that token's own."""
    skip_special_tokens: bool = True  # without effect, because no text is made
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    stop: Annotated[Many[str], Field(max_length=0)] | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = None  # answers have no routed experts

    def sampling(self, model_stops: Sequence[int]) -> dict[str, Any]:
        return {**super().sampling(model_stops), "prompt_logprobs": self.prompt_logprobs}

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0


class GenerateBody(Body):
    token_ids: Annotated[Many[TokenId], Field(min_length=1)]
    sampling_params: TokenSampling = TokenSampling()
    model: str | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    output_mode: Literal["tokens"] = "tokens"
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Literal[0] = 0


class TokenEndpoint:
    """Endpoint of `POST /inference/v1/generate`.

    Args:
        show: Returns the text of tokens, for transcripts.
    """

    def __init__(self, policy: ServedPolicy, exchanges: Exchanges, show: Show, stop_token_ids: Sequence[int]) -> None:
        self._policy = policy
        self._show = show
        self._exchanges = exchanges
        self._stop_token_ids = tuple(stop_token_ids)

    def __call__(self, request: Request) -> Answer:
        body = read(request, GenerateBody)
        params = body.sampling_params
        caller = caller_of(request)
        policy = self._policy.named(body.model)
        num_choices = params.n or 1
        if params.prompt_logprobs is not None and (num_choices > 1 or body.stream):
            message = "prompt_logprobs come with one whole answer; leave n and stream out"
            raise ApiError(400, message, param="prompt_logprobs", code=UNSUPPORTED_VALUE)
        check_choices(num_choices, self._exchanges.limits.num_choices, "sampling_params.n")
        sampling = policy.sampling(
            len(body.token_ids),
            params.max_tokens,
            "token_ids",
            **params.sampling(self._stop_token_ids),
        )
        request_id, session_id = body.request_id or uuid.uuid4().hex, session_id_of(request)
        with_logprobs = params.logprobs is not None

        async def work(emit: Emit | None) -> Any:
            talk = caller.talk_in_tokens(body.token_ids, self._show, session_id)
            ask = talk.ask(sampling, num_choices, request_id)
            if emit is not None:
                return await self._stream(policy, body, talk, ask, emit, with_logprobs)
            completions = await policy.complete(ask)
            response = encoded(self._response(policy, body, request_id, completions, with_logprobs))
            self._keep(talk, completions)
            return response

        return Answer(self._exchanges, work, num_completions=num_choices, stream=bool(body.stream))

    def _keep(self, talk: Talk, completions: Sequence[Completion]) -> None:
        """Record completions. Called once the answer is encoded, because completions that cannot be sent must not be
        kept."""
        for index, completion in enumerate(completions):
            talk.record(index, completion, {"role": "assistant", "content": self._show(completion.token_ids)})

    def _response(
        self,
        policy: ServedPolicy,
        body: GenerateBody,
        request_id: str,
        completions: list[Completion],
        with_logprobs: bool,
    ) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "output_mode": "tokens",
            "model": policy.model,
            "created": policy.created,
            "choices": [
                {
                    **_choice(index, completion, with_logprobs),
                    "finish_reason": str(completion.finish_reason),
                    "weight_versions": weight_versions(completion),
                }
                for index, completion in enumerate(completions)
            ],
            "usage": usage(len(body.token_ids), completions),
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
            "prompt_logprobs": _prompt_logprobs(body.token_ids, completions[0].prompt_scores),
        }

    async def _stream(
        self, policy: ServedPolicy, body: GenerateBody, talk: Talk, ask: Ask, emit: Emit, with_logprobs: bool
    ) -> None:
        prompt = body.token_ids if body.return_token_ids else None

        def envelope(**fields: Any) -> dict[str, Any]:
            return {"request_id": ask.request_id, "output_mode": "tokens", "usage": None, **fields}

        def on_tokens(index: int, chunk: TokenChunk) -> None:
            nonlocal prompt
            choice = {**_choice(index, chunk, with_logprobs), "finish_reason": None}
            emit(envelope(choices=[choice], prompt_token_ids=prompt))
            prompt = None

        completions = await policy.complete(ask, on_tokens)
        self._keep(talk, completions)
        for index, completion in enumerate(completions):
            end = {"index": index, "token_ids": [], "logprobs": None, "finish_reason": str(completion.finish_reason)}
            emit(envelope(choices=[{**end, "weight_versions": weight_versions(completion)}]))
        if body.stream_options is not None and body.stream_options.include_usage:
            emit(envelope(choices=[], usage=usage(len(body.token_ids), completions)))


def _prompt_logprobs(
    prompt: Sequence[int], scores: PromptScores | None
) -> list[dict[str, dict[str, float]] | None] | None:
    """Convert the scores of a prompt to vLLM's form: for each token the logprobs by token id; None for the first
    token."""
    if scores is None:
        return None
    shown: list[dict[str, dict[str, float]] | None] = [None]
    for position, (token, logprob) in enumerate(zip(prompt[1:], scores.logprobs, strict=True)):
        at = slice(position * scores.top_k, (position + 1) * scores.top_k)
        pairs = [*zip(scores.top_ids[at], scores.top_logprobs[at], strict=True), (token, logprob)]
        shown.append({str(each): {"logprob": max(value, LEAST_LOGPROB)} for each, value in pairs})
    return shown


def _choice(index: int, tokens: Completion | TokenChunk, with_logprobs: bool) -> dict[str, Any]:
    logprobs = None
    if with_logprobs:
        top = tokens.top_logprobs or repeat((), len(tokens.token_ids))
        rows = zip(tokens.token_ids, tokens.logprobs, top, strict=True)
        logprobs = {
            "content": [
                {**_logprob(token_id, logprob), "top_logprobs": [_logprob(*pair) for pair in likeliest]}
                for token_id, logprob, likeliest in rows
            ]
        }
    return {
        "index": index,
        "token_ids": list(tokens.token_ids),
        "logprobs": logprobs,
        "stop_reason": None,
    }


def _logprob(token_id: int, logprob: float) -> dict[str, Any]:
    """Make the entry of one token. The client of the `renderers` package reads `token`, and vLLM's reads `token_id`."""
    value = max(logprob, LEAST_LOGPROB)
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": value}


class TokenizeBody(Body):
    """Body with either a `prompt` or `messages`, which give the prompt that the chat endpoint would generate from."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Chat], Field(min_length=1)] | None = None
    tools: Many[Tool] | None = None
    add_special_tokens: bool | None = None
    """Whether a text starts with the special tokens of the tokenizer; true by default."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    tokens: Many[TokenId]
    model: str | None = None


class TokenizeEndpoint:
    def __init__(
        self, policy: ServedPolicy, exchanges: Exchanges, text: Text | None, turns: Turns | None, tokenizing: Tokenizing
    ) -> None:
        self._policy = policy
        self._exchanges = exchanges
        self._text = text
        self._turns = turns
        self._tokenizing = tokenizing

    def __call__(self, request: Request) -> Answer:
        text = _text_of(self._text)
        body = read(request, TokenizeBody)
        self._policy.named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "there has to be a prompt or messages, and not both", param="prompt")
        turn_ask = None if body.messages is None else _turn_ask(body, request)
        turns = None if turn_ask is None else turns_of(self._turns)

        async def work(_: Emit | None) -> dict[str, Any]:
            if turns is not None and turn_ask is not None:
                tokens = list((await turns.talk(turn_ask)).prompt_token_ids)
            else:
                prompt, special = body.prompt or "", body.add_special_tokens is not False
                tokens = await self._tokenizing(lambda: text.encode(prompt, add_special_tokens=special), len(prompt))
            return {
                "count": len(tokens),
                "max_model_len": self._policy.max_context,
                "tokens": tokens,
                "token_strs": [text.piece(token) for token in tokens] if body.return_token_strs else None,
            }

        return Answer(self._exchanges, work, num_completions=1, stream=False)


class DetokenizeEndpoint:
    def __init__(self, policy: ServedPolicy, exchanges: Exchanges, text: Text | None) -> None:
        self._policy = policy
        self._exchanges = exchanges
        self._text = text

    def __call__(self, request: Request) -> Answer:
        text = _text_of(self._text)
        body = read(request, DetokenizeBody)
        self._policy.named(body.model)

        async def work(_: Emit | None) -> dict[str, Any]:
            return {"prompt": text.shown(body.tokens)}

        return Answer(self._exchanges, work, num_completions=1, stream=False)


def _turn_ask(body: TokenizeBody, request: Request) -> TurnAsk:
    messages = messages_from(body.messages or ())
    prefill = take_prefill(messages, body.continue_final_message, body.add_generation_prompt)
    return TurnAsk(
        caller_of(request),
        messages,
        tools_from(body.tools),
        session_id=session_id_of(request),
        template_kwargs=body.chat_template_kwargs,
        prefill=prefill,
    )


def _text_of(text: Text | None) -> Text:
    if text is None:
        raise ApiError(400, "this server has no tokenizer")
    return text
