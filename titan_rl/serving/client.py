"""Any server of `/inference/v1/generate` as a `GenerateFn`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.rollout.copies import LARGEST_TOKEN_ID
from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.asking import NOT_UNDERSTOOD, Asking, is_int
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

_ROUNDING = 1e-3
"""By which a logprob may come out above 0."""


class HttpGenerateFn:
    """A `GenerateFn` over HTTP: a server of titan_rl, vLLM's own, or another of that protocol.

    Only faults of the connection are tried again, so that a server that fails is heard of. One that is full, and says
    with a 429 when to come again, is waited for.

    Example:

        async with HttpGenerateFn("http://127.0.0.1:8000") as generate:
            completion = await generate([1, 2, 3], request_id="a", sampling=SamplingParams(max_tokens=8))

    Args:
        url: where the server is; the path of the endpoint is added.
        model: None is whichever it serves.
        api_key: sent as a bearer token.
        version: the policy version of tokens whose server does not tell, or tells by other names than numbers.
        timeout_s: of one completion, all retries and waits included.
        connection_attempts: how often a connection is tried, ever more slowly.
        transport: of httpx, in the place of the network.

    vLLM gives logprobs of the distribution sampled from only when it is started with
    `--logprobs-mode processed_logprobs`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        version: int = 0,
        timeout_s: float = 3600.0,
        connection_attempts: int = 5,
        max_connections: int = 1024,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._asking = Asking(
            f"{url.rstrip('/').removesuffix('/v1')}/inference/v1/generate",
            api_key=api_key,
            timeout_s=timeout_s,
            connection_attempts=connection_attempts,
            max_connections=max_connections,
            transport=transport,
        )
        self._model = model
        self._version = version

    async def __aenter__(self) -> HttpGenerateFn:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calls under way fail."""
        await self._asking.close()

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        """
        Raises:
            RequestError: the server refuses the request, or it asks for routed experts or top logprobs, which
                do not come this way.
            GenerationError: the server cannot be reached, fails, is full for too long, or says what cannot be
                understood.
        """
        if sampling.constraint is not None:
            raise RequestError(
                f"request {request_id!r} has a constraint, and what it leaves out does not come over HTTP"
            )
        if sampling.return_routed_experts or sampling.top_logprobs:
            asked = "routed experts" if sampling.return_routed_experts else "top logprobs"
            raise RequestError(f"request {request_id!r} asks for {asked}, which do not come over HTTP")
        body = {
            "request_id": request_id,
            "model": self._model,
            "token_ids": list(prompt_token_ids),
            "sampling_params": _wire_sampling(sampling),
        }
        headers = {} if session_id is None else {"x-session-id": session_id}
        response = await self._asking.post(body, headers)
        try:
            return self._completion(request_id, response.json(), sampling.max_tokens)
        except NOT_UNDERSTOOD as error:
            raise GenerationError(f"{self._asking.endpoint} answered with what is no completion: {error!r}") from error

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

    def _spans(self, told: Sequence[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        at = 0
        for span in told:
            start, end = span["start"], span["end"]
            if not (is_int(start) and is_int(end) and at == start <= end):
                raise ValueError(f"weight_versions goes on at token {at} with {start!r} to {end!r}")
            spans.append(VersionSpan(self._version_of(span["version"]), end - start))
            at = end
        return tuple(spans)

    def _version_of(self, told: Any) -> int:
        """vLLM names weights that were never updated "default"."""
        return int(told) if str(told).isdecimal() else self._version


def _token_id(value: Any) -> int:
    if not (is_int(value) and 0 <= value <= LARGEST_TOKEN_ID):
        raise ValueError(f"token_ids has {value!r}; it must be an integer between 0 and {LARGEST_TOKEN_ID}")
    return value


def _logprob(value: Any) -> float:
    if not ((is_int(value) or isinstance(value, float)) and LEAST_LOGPROB < value <= _ROUNDING):
        # The least stands for minus infinity, and not-a-number is in no order with anything.
        raise ValueError(f"a logprob is {value!r}; it must be a number above {LEAST_LOGPROB:g} and not above 0")
    return float(value)


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
    }
