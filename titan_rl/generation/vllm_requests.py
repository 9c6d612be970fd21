"""Requests and constraints in vLLM's form. Importing this module imports vLLM and torch."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch
from vllm import SamplingParams as VLLMSamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from vllm.v1.worker import gpu_model_runner

from titan_rl.core.errors import RequestError
from titan_rl.generation.request import EngineRequest
from titan_rl.types import SamplingParams

MOST_CHARACTERS = 1 << 17
"""Largest number of characters of a constraint. The time to compile a grammar grows with its text, and all requests
wait meanwhile."""

CONTINUED = "num_continued"
"""Key of `SamplingParams.num_continued` in vLLM's `extra_args`."""


class ConstrainedIds(list[str]):
    """Ids of the constrained requests of one step, passed from the scheduler to the model runner and back.

    Attributes:
        temperatures: Temperature of each request.
        allowed_logprobs: Log of the total probability of the tokens that each request's grammar allows, under the
            policy. The model runner fills it in.
    """

    def __init__(self, ids: Sequence[str], temperatures: dict[str, float]) -> None:
        super().__init__(ids)
        self.temperatures = temperatures
        self.allowed_logprobs: dict[str, float] = {}


class Constraints(StructuredOutputManager):
    """Compiles the grammars of an engine without a tokenizer; the tokenizer is loaded for the first grammar.

    Grammars are compiled synchronously, so that all ranks of a replica have them in the same step. vLLM's backend
    caches them.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._use_async_grammar_compilation = False
        install_measuring()

    @cached_property
    def tokenizer(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.vllm_config.model_config.model, local_files_only=True)

    def grammar_init(self, request: Request) -> None:
        """Compile the grammar of a request.

        Raises:
            RequestError: there is no tokenizer, the constraint is not a grammar, or the tokens so far violate it.
        """
        constrained = request.structured_output_request
        if constrained is None:
            return
        try:
            super().grammar_init(request)
            constrained.grammar = self._behind_tokens_so_far(constrained.grammar, request)
        except RequestError:
            raise
        except Exception as error:  # vLLM, transformers and xgrammar raise many types here
            raise RequestError(f"the constraint cannot be applied: {_first_line(error)}") from error
        request.status = RequestStatus.WAITING  # there is no grammar to wait for

    def _create_grammar(self, request: Request) -> Any:
        """Compile a grammar without logging an error, which concerns only the request."""
        constrained, params = request.structured_output_request, request.sampling_params
        assert constrained is not None
        assert params is not None
        assert self.backend is not None
        kind, text = constrained.structured_output_key
        return self.backend.compile_grammar(kind, text, stop_token_ids=params.all_stop_token_ids)

    def _behind_tokens_so_far(self, grammar: Any, request: Request) -> Any:
        if isinstance(grammar, Exception):
            raise grammar
        assert request.sampling_params is not None
        count: int = (request.sampling_params.extra_args or {}).get(CONTINUED, 0)
        prompt = request.prompt_token_ids or []
        if count and not grammar.accept_tokens(request.request_id, prompt[-count:]):
            raise RequestError("the tokens of a constrained completion so far violate its constraint")
        return grammar


def check_constraint(constraint: str) -> None:
    """Check that grammars can enforce a constraint.

    Raises:
        ValueError: the constraint is not a JSON object, is too long, or contains something that a grammar ignores.
    """
    if len(constraint) > MOST_CHARACTERS:
        raise ValueError(f"its constraint has {len(constraint)} characters; at most {MOST_CHARACTERS} are allowed")
    try:
        given = json.loads(constraint)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ValueError('its constraint is not a JSON object, such as {"type": "structural_tag", "format": {...}}')
    if has_xgrammar_unsupported_json_features(given):
        raise ValueError(
            "its JSON schema uses keywords that grammars cannot enforce: multipleOf, uniqueItems, contains, an unknown "
            "format, pattern with lengths, patternProperties or propertyNames with properties, or several allOf"
        )


def log_allowed(before: torch.Tensor, after: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log of the total probability of the allowed tokens.

    Args:
        before: Logits of some requests.  # [num_requests, vocab_size]
        after: The same logits, with minus infinity for tokens that are not allowed.  # [num_requests, vocab_size]
        temperatures: Temperatures. 0 counts as 1, as in vLLM's logprobs.  # [num_requests]

    Returns:
        [num_requests], none above 0

    Example: if only the first of two tokens with probabilities 0.25 and 0.75 is allowed, the result is log(0.25).
    """
    scale = temperatures.where(temperatures > 1e-5, 1.0).to(before.device, torch.float32)[:, None]
    left = (after.float() / scale).logsumexp(-1) - (before.float() / scale).logsumexp(-1)
    return left.clamp(max=0.0)


@cache
def install_measuring() -> None:
    """Make vLLM's model runners in this process measure the probability of the tokens that each grammar allows. Further
    calls change nothing.

    A runner applies the grammars to the logits in place, before it samples and before it computes logprobs, so the
    policy's own distribution is not available afterwards.
    """
    apply: Any = gpu_model_runner.apply_grammar_bitmask

    def measuring(scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: torch.Tensor) -> None:
        ids = grammar_output.structured_output_request_ids
        rows = {request_id: input_batch.req_id_to_index[request_id] for request_id in ids}
        _measured(lambda: apply(scheduler_output, grammar_output, input_batch, logits), ids, rows, logits)

    gpu_model_runner.apply_grammar_bitmask = measuring
    try:  # the model runner for GPUs cannot be imported without Triton, and is not used then
        from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker
    except ImportError:
        return
    apply_on_gpu: Any = StructuredOutputsWorker.apply_grammar_bitmask

    def measuring_on_gpu(
        self: Any, logits: torch.Tensor, input_batch: Any, grammar_req_ids: list[str], grammar_bitmask: Any
    ) -> None:
        first = input_batch.cu_num_logits_np
        rows = {request_id: int(first[index]) for index, request_id in enumerate(input_batch.req_ids)}
        given = logits, input_batch, grammar_req_ids, grammar_bitmask
        _measured(lambda: apply_on_gpu(self, *given), grammar_req_ids, rows, logits)

    StructuredOutputsWorker.apply_grammar_bitmask = measuring_on_gpu


def _measured(apply: Any, ids: Any, rows: dict[str, int], logits: torch.Tensor) -> None:
    if not isinstance(ids, ConstrainedIds) or not ids:
        apply()
        return
    at = torch.tensor([rows[request_id] for request_id in ids], device=logits.device)
    before = logits[at]
    apply()
    temperatures = torch.tensor([ids.temperatures[request_id] for request_id in ids])
    left = log_allowed(before, logits[at], temperatures)
    ids.allowed_logprobs.update(zip(ids, left.tolist(), strict=True))


def _first_line(error: Exception) -> str:
    """The first line of an error, without the position in xgrammar's source and the condition that failed there."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[\d:]+\] \S+: (Check failed: .*? is (false|true): )?", "", line)[:300]


class VLLMRequests:
    """Makes vLLM's requests.

    Args:
        max_context: Largest number of tokens of prompt and completion together.
        vocab_size: Number of tokens in the model's vocabulary.
        speculative: Whether the engine uses speculative decoding.
    """

    def __init__(self, max_context: int, vocab_size: int, *, speculative: bool = False) -> None:
        self._max_context = max_context
        self._speculative = speculative
        self._vocab_size = vocab_size
        self._ids = map(str, itertools.count())  # the core's own request ids, never used twice
        self._cache_epochs = Counter[str]()  # number of `leave_cache` calls by adapter
        self.adapters: dict[str, LoRARequest] = {}  # by name; "" is the adapter of requests that name none

    def leave_cache(self, adapter: str = "") -> None:
        """Prevent later requests of an adapter from reading the prefix cache of earlier ones."""
        self._cache_epochs[adapter] += 1

    def generating(self, request: EngineRequest, pinned: LoRARequest | None = None) -> EngineCoreRequest:
        """Make vLLM's request that generates.

        Args:
            pinned: Version of the request's adapter; by default the newest.

        Raises:
            RequestError: the request can never run.
        """
        if self._speculative:
            _check_speculation(request.request_id, request.sampling)
        prompt = self._token_ids(f"request {request.request_id!r}", request.prompt_token_ids)
        room = self._max_context - len(prompt)
        if not prompt or room < 1:
            raise RequestError(
                f"request {request.request_id!r} has {len(prompt)} prompt tokens; between 1 and "
                f"{self._max_context - 1} leave room for a completion. Shorten the prompt or raise max_context, "
                f"which is {self._max_context}"
            )
        if request.adapter and request.adapter not in self.adapters:
            raise RequestError(
                f"request {request.request_id!r} names adapter {request.adapter!r}; the engine has "
                f"{', '.join(filter(None, self.adapters)) or 'none'}"
            )
        params = self._params(request.request_id, request.sampling.within(room))
        return self._core_request(prompt, params, request.adapter, pinned)

    def scoring(self, sequences: Sequence[Sequence[int]], adapter: str = "") -> list[EngineCoreRequest | None]:
        """Make vLLM's requests that score sequences, one for each sequence; None for a sequence without a token to
        score.

        Raises:
            RequestError: a sequence is too long, or has tokens that are not in the vocabulary.
        """
        prompts = [self._token_ids("a sequence to score", sequence) for sequence in sequences]
        for prompt in prompts:
            if len(prompt) > self._max_context:
                raise RequestError(f"a sequence to score has {len(prompt)} tokens; max_context is {self._max_context}")
        # Asking for prompt logprobs keeps a request from reading the prefix cache.
        params = VLLMSamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        return [self._core_request(prompt, params, adapter) if len(prompt) > 1 else None for prompt in prompts]

    def _core_request(
        self, prompt: list[int], params: VLLMSamplingParams, adapter: str, pinned: LoRARequest | None = None
    ) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=next(self._ids),
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=pinned or self.adapters.get(adapter),
            cache_salt=str(self._cache_epochs[adapter]),
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
                "frequency penalty counts only the tokens of one attempt; send it again"
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
                # A stop token that the model lacks is never sampled, but vLLM would access its logit.
                stop_token_ids=[token for token in sampling.stop_token_ids if 0 <= token < self._vocab_size],
                ignore_eos=True,  # the request itself names its stop tokens
                logprobs=sampling.top_logprobs,
                prompt_logprobs=sampling.prompt_logprobs,
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
        ids = list(tokens)
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise RequestError(f"{whose} has token {wrong}; the vocabulary has {self._vocab_size} tokens")
        return ids


def _structured(sampling: SamplingParams) -> StructuredOutputsParams | None:
    """Convert a constraint to vLLM's form.

    Raises:
        ValueError: vLLM's grammars cannot enforce the constraint.
    """
    if sampling.constraint is None:
        return None
    check_constraint(sampling.constraint)
    check_json_nesting(sampling.constraint, structural_tag=True)
    params = StructuredOutputsParams(structural_tag=sampling.constraint)
    params._backend = "xgrammar"  # vLLM chooses it itself only if it has a tokenizer
    return params


def _check_speculation(request_id: str, sampling: SamplingParams) -> None:
    """Check that speculative decoding supports a request's sampling parameters.

    Raises:
        RequestError: vLLM would sample from another distribution, or a constraint could not be measured. With
            speculative decoding it ignores min_p, and bans stop tokens for longer than min_tokens.
    """
    for name, value in sampling.shaping.items():
        if name not in ("top_p", "top_k"):
            raise RequestError(
                f"request {request_id!r} has {name} = {value}, which vLLM ignores with speculative decoding; "
                "leave it out, or set generation.speculative.method to 'none'"
            )
