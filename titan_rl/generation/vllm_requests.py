"""What vLLM is asked for, made of what an engine is asked for, or why that can never run. Importing it imports vLLM."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

from vllm import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.v1.engine import EngineCoreRequest

from titan_rl.core.errors import RequestError
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.vllm_constraints import CONTINUED, check_constraint
from titan_rl.types import SamplingParams


class VLLMRequests:
    """Makes vLLM's requests.

    Args:
        max_context: most tokens of prompt and completion together.
        vocab_size: tokens that the model has.
        guesses: the engine guesses tokens.
    """

    def __init__(self, max_context: int, vocab_size: int, *, guesses: bool = False) -> None:
        self._max_context = max_context
        self._guesses = guesses
        self._vocab_size = vocab_size
        self._ids = map(str, itertools.count())  # the core's own request ids, never used twice
        self._cache_epoch = 0

    def leave_cache(self) -> None:
        """Later requests read nothing of the prefix cache that earlier ones have written."""
        self._cache_epoch += 1

    def generating(self, request: EngineRequest) -> EngineCoreRequest:
        """
        Raises:
            RequestError: it can never run.
        """
        if self._guesses:
            _check_beside_guesses(request.request_id, request.sampling)
        prompt = self._token_ids(f"request {request.request_id!r}", request.prompt_token_ids)
        room = self._max_context - len(prompt)
        if not prompt or room < 1:
            raise RequestError(
                f"request {request.request_id!r} has {len(prompt)} prompt tokens; between 1 and "
                f"{self._max_context - 1} leave room for a completion. Shorten the prompt or raise max_context, "
                f"which is {self._max_context}"
            )
        return self._core_request(prompt, self._params(request.request_id, request.sampling.within(room)))

    def scoring(self, sequences: Sequence[Sequence[int]]) -> list[EngineCoreRequest | None]:
        """One for each sequence; None for one that has no token to score.

        Raises:
            RequestError: a sequence is too long, or has tokens that there are not.
        """
        prompts = [self._token_ids("a sequence to score", sequence) for sequence in sequences]
        for prompt in prompts:
            if len(prompt) > self._max_context:
                raise RequestError(f"a sequence to score has {len(prompt)} tokens; max_context is {self._max_context}")
        # Asking for prompt logprobs keeps a request from reading the prefix cache.
        params = VLLMSamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        return [self._core_request(prompt, params) if len(prompt) > 1 else None for prompt in prompts]

    def _core_request(self, prompt: list[int], params: VLLMSamplingParams) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=next(self._ids),
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=str(self._cache_epoch),
            data_parallel_rank=None,
        )

    def _params(self, request_id: str, sampling: SamplingParams) -> VLLMSamplingParams:
        if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**63:
            raise RequestError(f"request {request_id!r} has seed {sampling.seed}; it must fit into 64 bits")
        if beyond := [token for token, _ in sampling.logit_bias if token >= self._vocab_size]:
            raise RequestError(
                f"request {request_id!r} has logit_bias for token {beyond[0]}; the vocabulary has {self._vocab_size}"
            )
        if sampling.num_continued and (sampling.presence_penalty or sampling.frequency_penalty):
            raise RequestError(
                f"request {request_id!r} was interrupted after {sampling.num_continued} tokens, and its presence or "
                "frequency penalty counts the tokens of one attempt alone; send it again"
            )
        try:
            return VLLMSamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                min_tokens=sampling.min_tokens,
                seed=sampling.seed,
                # A stop token that the model does not have is never sampled, and vLLM would look for its logit.
                stop_token_ids=[token for token in sampling.stop_token_ids if 0 <= token < self._vocab_size],
                ignore_eos=True,  # the request names its stop tokens itself
                logprobs=sampling.top_logprobs,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                logit_bias=dict(sampling.logit_bias) or None,
                structured_outputs=_structured(sampling),
                extra_args={CONTINUED: sampling.num_continued} if sampling.num_continued else None,
                detokenize=False,
                skip_clone=True,
            )
        except ValueError as error:
            raise RequestError(f"request {request_id!r}: {error}") from error

    def _token_ids(self, whose: str, tokens: Sequence[int]) -> list[int]:
        try:
            ids = array("q", tokens).tolist()
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"{whose} has something else than token ids: {error}") from error
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise RequestError(f"{whose} has token {wrong}; the vocabulary has {self._vocab_size} tokens")
        return ids


def _structured(sampling: SamplingParams) -> StructuredOutputsParams | None:
    """
    Raises:
        ValueError: the constraint is none that vLLM's grammars keep to.
    """
    if sampling.constraint is None:
        return None
    check_constraint(sampling.constraint)
    check_json_nesting(sampling.constraint, structural_tag=True)
    params = StructuredOutputsParams(structural_tag=sampling.constraint)
    params._backend = "xgrammar"  # which vLLM finds out where it has a tokenizer
    return params


def _check_beside_guesses(request_id: str, sampling: SamplingParams) -> None:
    """
    Raises:
        RequestError: with guessed tokens vLLM would sample from another distribution: it leaves min_p out, and bans
            stop tokens for longer than min_tokens says. Nor is what a constraint leaves out measured there.
    """
    for name, value in sampling.shaping.items():
        if name not in ("top_p", "top_k"):
            raise RequestError(
                f"request {request_id!r} has {name} = {value}, which vLLM does not keep to where it guesses tokens; "
                "leave it out, or set generation.speculative.method to 'none'"
            )
