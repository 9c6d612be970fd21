"""Constrained sampling in vLLM: grammars that a request goes on with behind an interruption, and the probability that
the policy gives to what they allow. Importing it imports vLLM and torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from vllm.v1.worker import gpu_model_runner

from titan_rl.core.errors import RequestError

MOST_CHARACTERS = 1 << 17
"""Of a constraint. What a grammar costs to compile grows with its text, and requests stand still meanwhile."""

CONTINUED = "num_continued"
"""In vLLM's `extra_args`: see `SamplingParams.num_continued`."""


class ConstrainedIds(list[str]):
    """The constrained requests of one step, on their way from the scheduler to the model runner and back.

    Attributes:
        temperatures: of each request.
        allowed_logprobs: of each request, filled in by the model runner: the log of the probability that the policy
            gives to the tokens that the grammar allows.
    """

    def __init__(self, ids: Sequence[str], temperatures: dict[str, float]) -> None:
        super().__init__(ids)
        self.temperatures = temperatures
        self.allowed_logprobs: dict[str, float] = {}


class Constraints(StructuredOutputManager):
    """Compiles the grammars of an engine that has no tokenizer of its own: it is loaded with the first of them.

    Grammars are compiled at once and kept by vLLM's backend, so that all ranks of a replica have them in the same step.
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
        """
        Raises:
            RequestError: there is no tokenizer, the constraint is no grammar, or the tokens so far do not fit it.
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
        """Without an entry in the log: the error is the request's own."""
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
            raise RequestError("the tokens that a constrained completion has so far are not what its constraint allows")
        return grammar


def check_constraint(constraint: str) -> None:
    """
    Raises:
        ValueError: it is no JSON object, too long, or has what a grammar would let through unchecked.
    """
    if len(constraint) > MOST_CHARACTERS:
        raise ValueError(f"its constraint has {len(constraint)} characters; at most {MOST_CHARACTERS} are allowed")
    try:
        given = json.loads(constraint)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ValueError('its constraint is no JSON object, such as {"type": "structural_tag", "format": {...}}')
    if has_xgrammar_unsupported_json_features(given):
        raise ValueError(
            "its JSON schema has what no grammar can hold a text to: multipleOf, uniqueItems, contains, an unknown "
            "format, a pattern beside lengths, patternProperties or propertyNames beside properties, or several allOf"
        )


def log_allowed(before: torch.Tensor, after: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The log of the probability that is left.

    Args:
        before: logits of some requests.  # [num_requests, vocab_size]
        after: the same, minus infinity where a token is not allowed.
        temperatures: 0 is taken as 1, as vLLM does for logprobs.  # [num_requests]

    Returns:
        [num_requests], none above 0

    Example: of two tokens with probabilities 0.25 and 0.75 the first is allowed: log(0.25).
    """
    scale = temperatures.where(temperatures > 1e-5, 1.0).to(before.device, torch.float32)[:, None]
    left = (after.float() / scale).logsumexp(-1) - (before.float() / scale).logsumexp(-1)
    return left.clamp(max=0.0)


def install_measuring() -> None:
    """Have vLLM's model runners of this process measure what each grammar leaves. Calling it again changes nothing.

    A runner applies the grammars to the logits in place, before it samples and before any logprob is taken, so that
    the policy's own distribution cannot be had behind it.
    """
    apply = gpu_model_runner.apply_grammar_bitmask
    if not hasattr(apply, "measures"):

        def measuring(scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: torch.Tensor) -> None:
            ids = grammar_output.structured_output_request_ids
            rows = {request_id: input_batch.req_id_to_index[request_id] for request_id in ids}
            _measured(lambda: apply(scheduler_output, grammar_output, input_batch, logits), ids, rows, logits)

        measuring.measures = True  # pyright: ignore[reportFunctionMemberAccess]
        gpu_model_runner.apply_grammar_bitmask = measuring
    _install_in_second_runner()


def _install_in_second_runner() -> None:
    """The model runner that vLLM uses on GPUs. Without Triton it cannot be imported, and is not used."""
    try:
        from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker
    except ImportError:
        return
    apply: Any = StructuredOutputsWorker.apply_grammar_bitmask
    if hasattr(apply, "measures"):
        return

    def measuring(
        self: Any, logits: torch.Tensor, input_batch: Any, grammar_req_ids: list[str], grammar_bitmask: Any
    ) -> None:
        first = input_batch.cu_num_logits_np
        rows = {request_id: int(first[place]) for place, request_id in enumerate(input_batch.req_ids)}
        given = logits, input_batch, grammar_req_ids, grammar_bitmask
        _measured(lambda: apply(self, *given), grammar_req_ids, rows, logits)

    measuring.measures = True  # pyright: ignore[reportFunctionMemberAccess]
    StructuredOutputsWorker.apply_grammar_bitmask = measuring


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
    """Without the place in xgrammar's source and the condition that failed there."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[\d:]+\] \S+: (Check failed: .*? is (false|true): )?", "", line)[:300]
