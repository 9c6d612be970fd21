"""Endpoints for tokens in vLLM's form: `POST /inference/v1/generate`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import repeat
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request

from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.conversations.caller import CallerPrompt, caller_of
from titan_rl.serving.conversations.turn import TurnRequest
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.http.exchange import Answer, Emit, encoded
from titan_rl.serving.http.request import Body, Many, read
from titan_rl.serving.policy import CompletionRequest, ServedPolicy
from titan_rl.serving.protocols import wire
from titan_rl.serving.protocols.openai.bodies import Chat, Tool, messages_from, take_prefill, tools_from
from titan_rl.serving.text import Text
from titan_rl.types import Completion, PromptScores, TokenChunk


class TokenSampling(wire.SamplingBody):
    """Supported sampling parameters of vLLM."""

    n: wire.Count | None = None
    max_tokens: wire.Count | None = None
    logprobs: wire.TopCount | None = None
    """0 and 1 report the logprobs of the sampled tokens alone; a larger number also those of so many of the
    likeliest."""
    prompt_logprobs: wire.TopCount | None = None
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
    token_ids: Annotated[Many[wire.TokenId], Field(min_length=1)]
    sampling_params: TokenSampling = TokenSampling()
    model: str | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    output_mode: Literal["tokens"] = "tokens"
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: wire.StreamOptions | None = None
    priority: Literal[0] = 0


def answer_generate(backend: wire.Backend, request: Request) -> Answer:
    """Answer `POST /inference/v1/generate`."""
    body = read(request, GenerateBody)
    params = body.sampling_params
    caller = caller_of(request)
    policy = backend.policy.named(body.model)
    num_choices = params.n or 1
    if params.prompt_logprobs is not None and (num_choices > 1 or body.stream):
        message = "prompt_logprobs require a single answer without streaming; leave n and stream out"
        raise ApiError(400, message, param="prompt_logprobs", code=UNSUPPORTED_VALUE)
    backend.check_choices(num_choices, "sampling_params.n")
    given = params.sampling(backend.stop_token_ids)
    sampling = policy.sampling(len(body.token_ids), params.max_tokens, "token_ids", **given)
    request_id, session_id = body.request_id or uuid.uuid4().hex, wire.session_id_of(request)

    async def work(emit: Emit | None) -> Any:
        prompt = caller.prompt_of_tokens(body.token_ids, backend.show, session_id)
        completion_request = prompt.request(sampling, num_choices, request_id)
        if emit is not None:
            return await _stream(backend, policy, body, prompt, completion_request, emit)
        completions = await policy.complete(completion_request)
        response = encoded(_response(policy, body, request_id, completions))
        backend.record(prompt, completions)
        return response

    return Answer(backend.exchanges, work, num_completions=num_choices, stream=bool(body.stream))


def _response(
    policy: ServedPolicy, body: GenerateBody, request_id: str, completions: list[Completion]
) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "output_mode": "tokens",
        "model": policy.model,
        "created": policy.created,
        "choices": [
            {
                **_choice(body, index, completion),
                "finish_reason": str(completion.finish_reason),
                "weight_versions": wire.weight_versions(completion),
            }
            for index, completion in enumerate(completions)
        ],
        "usage": wire.usage(len(body.token_ids), completions),
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "prompt_logprobs": _prompt_logprobs(body.token_ids, completions[0].prompt_scores),
    }


async def _stream(
    backend: wire.Backend,
    policy: ServedPolicy,
    body: GenerateBody,
    prompt: CallerPrompt,
    completion_request: CompletionRequest,
    emit: Emit,
) -> None:
    prompt_token_ids = body.token_ids if body.return_token_ids else None

    def envelope(**fields: Any) -> dict[str, Any]:
        return {"request_id": completion_request.request_id, "output_mode": "tokens", "usage": None, **fields}

    def on_tokens(index: int, chunk: TokenChunk) -> None:
        nonlocal prompt_token_ids
        choice = {**_choice(body, index, chunk), "finish_reason": None}
        emit(envelope(choices=[choice], prompt_token_ids=prompt_token_ids))
        prompt_token_ids = None

    completions = await policy.complete(completion_request, on_tokens)
    backend.record(prompt, completions)
    for index, completion in enumerate(completions):
        end = {"index": index, "token_ids": [], "logprobs": None, "finish_reason": str(completion.finish_reason)}
        emit(envelope(choices=[{**end, "weight_versions": wire.weight_versions(completion)}]))
    if body.stream_options is not None and body.stream_options.include_usage:
        emit(envelope(choices=[], usage=wire.usage(len(body.token_ids), completions)))


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


def _choice(body: GenerateBody, index: int, tokens: Completion | TokenChunk) -> dict[str, Any]:
    logprobs = None
    if body.sampling_params.logprobs is not None:
        top = tokens.top_logprobs or repeat((), len(tokens.token_ids))
        rows = zip(tokens.token_ids, tokens.logprobs, top, strict=True)
        logprobs = {
            "content": [
                {**_logprob(token_id, logprob), "top_logprobs": [_logprob(*pair) for pair in likeliest]}
                for token_id, logprob, likeliest in rows
            ]
        }
    return {"index": index, "token_ids": list(tokens.token_ids), "logprobs": logprobs, "stop_reason": None}


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
    chat_template_kwargs: wire.TemplateKwargs | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    tokens: Many[wire.TokenId]
    model: str | None = None


def answer_tokenize(backend: wire.Backend, request: Request) -> Answer:
    """Answer `POST /tokenize`."""
    text = _require_text(backend)
    body = read(request, TokenizeBody)
    policy = backend.policy.named(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    turn_request = None if body.messages is None else _turn_request(policy, body, request)
    turns = None if turn_request is None else backend.require_turns()

    async def work(_: Emit | None) -> dict[str, Any]:
        if turns is not None and turn_request is not None:
            tokens = list((await turns.prompt(turn_request)).prompt_token_ids)
        else:
            prompt, special = body.prompt or "", body.add_special_tokens is not False
            tokens = await backend.tokenizing(lambda: text.encode(prompt, add_special_tokens=special), len(prompt))
        return {
            "count": len(tokens),
            "max_model_len": policy.max_context,
            "tokens": tokens,
            "token_strs": [text.piece(token) for token in tokens] if body.return_token_strs else None,
        }

    return Answer(backend.exchanges, work)


def answer_detokenize(backend: wire.Backend, request: Request) -> Answer:
    """Answer `POST /detokenize`."""
    text = _require_text(backend)
    body = read(request, DetokenizeBody)
    backend.policy.named(body.model)

    async def work(_: Emit | None) -> dict[str, Any]:
        return {"prompt": text.shown(body.tokens)}

    return Answer(backend.exchanges, work)


def _turn_request(policy: ServedPolicy, body: TokenizeBody, request: Request) -> TurnRequest:
    messages = messages_from(body.messages or ())
    prefill = take_prefill(messages, body.continue_final_message, body.add_generation_prompt)
    return TurnRequest(
        caller_of(request),
        policy,
        messages,
        tools_from(body.tools),
        session_id=wire.session_id_of(request),
        template_kwargs=body.chat_template_kwargs,
        prefill=prefill,
    )


def _require_text(backend: wire.Backend) -> Text:
    if backend.text is None:
        raise ApiError(400, "this server has no tokenizer")
    return backend.text
