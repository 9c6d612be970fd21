"""vLLM as an `Engine` in this process: only its engine core, without its tokenizer or output processing."""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.core.arrays import logprob_array, token_array
from titan_rl.core.calls.imports import require
from titan_rl.core.errors import ModelError, RequestError
from titan_rl.generation.engine import EngineSpec, HeldTensor, TokenDelta
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.vllm_arguments import ENVIRONMENT, engine_arguments
from titan_rl.types import EXTRA_SAMPLING, FinishReason, PromptScores, TopLogprobs

if TYPE_CHECKING:
    from titan_rl.generation.vllm_adapters import AdapterVersions

_closed: list[Any] = []
"""Engine cores that end with this process. Once nothing refers to one, vLLM shuts it down, which takes a second."""

# Finish reasons of vLLM with which the tokens are valid. The others are "error" and "repetition".
_FINISH_REASONS = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}


class VLLMEngine:
    """Engine with continuous batching, paged attention and a prefix cache.

    Logprobs are those of the distribution that is sampled from, after temperature, top_p, top_k, min_p, penalties,
    biases and the constraint have been applied.

    If several ranks share a model, each process has an engine, and all of them step together. The caller starts these
    processes, with torch.distributed's environment variables set.

    Args:
        spec: Specification of the engine.
        ends_with_process: Whether the process ends after `close`, which then releases nothing: vLLM takes a second for
            it, and the kernel releases everything at once.

    Example: `VLLMEngine(EngineSpec("policy", max_context=4096))`

    Raises:
        MissingExtraError: vLLM is not installed.
        ModelError: the folder is not a model that vLLM can load, or does not fit the settings.
    """

    extra_sampling = EXTRA_SAMPLING
    scores_prompts = True

    def __init__(self, spec: EngineSpec, *, ends_with_process: bool = False) -> None:
        if not (Path(spec.model_path) / "config.json").is_file():
            raise ModelError(f"{spec.model_path} has no config.json; it must be a Hugging Face model folder")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        require("vllm", "cpu")
        from tqdm import tqdm
        from vllm.platforms import current_platform
        from vllm.v1.engine.core_client import InprocClient

        from titan_rl.generation.vllm_requests import Constraints, VLLMRequests
        from titan_rl.generation.vllm_scheduler import ScoringScheduler

        self._ends_with_process = ends_with_process
        self._on_cpu: bool = current_platform.is_cpu()
        if self._on_cpu:
            from titan_rl.generation.vllm_cpu import cache_no_states, keep_transformers_classes, prepare_cpu

            prepare_cpu(spec)
        self._internal: dict[str, str] = {}  # core ids by request id
        self._external: dict[str, EngineRequest] = {}  # requests by core id
        self._adapter_ids: dict[str, int] = {}  # vLLM's ids of their adapters by core id
        self._ahead: list[TokenDelta] = []  # deltas of steps in which sequences were scored
        self._speculates = spec.speculative is not None
        self._num_prompt_tokens = self._num_cached_tokens = 0
        arguments = engine_arguments(spec, on_cpu=self._on_cpu)
        gc.freeze()  # vLLM collects garbage five times while it starts; this spares the modules loaded so far
        tqdm.set_lock(threading.RLock())  # tqdm's own lock is a named semaphore, which outlives a killed process
        try:
            if self._on_cpu:
                cache_no_states(arguments)
            self._has_cache = bool(arguments.enable_prefix_caching)
            config = arguments.create_engine_config()
            if self._on_cpu and config.model_config.using_transformers_backend():
                keep_transformers_classes()
            limit = getattr(config.model_config.hf_text_config, "max_position_embeddings", spec.max_context)
            if spec.max_context > limit:
                raise ValueError(f"max_context is {spec.max_context}, but the model has {limit} positions")
            vocab_size = config.model_config.get_vocab_size()
            self._requests = VLLMRequests(spec.max_context, vocab_size, speculative=self._speculates)
            self._tied: bool = getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)
            self._core = InprocClient(config, _executor(config), log_stats=False)
            assert isinstance(self._core.engine_core.scheduler, ScoringScheduler)
            self._scheduler = self._core.engine_core.scheduler
            (self._has_output_layer,) = set(self._core.collective_rpc(has_output_layer))
            constraints = Constraints(config)
            self._core.engine_core.structured_output_manager = constraints
            self._scheduler.structured_output_manager = constraints
            self._adapters: dict[str, AdapterVersions] = {}
            if spec.adapters:
                from titan_rl.generation.vllm_adapters import make_adapters

                self._adapters = make_adapters(self._core, self._requests, spec.adapters)
            self.pins_versions = any(adapter.num_versions > 1 for adapter in spec.adapters.values())
        except (ValueError, OSError, ImportError) as error:
            raise ModelError(f"vLLM cannot serve {spec.model_path}: {error}") from error

    def add(self, request: EngineRequest) -> None:
        if request.request_id in self._internal:
            raise RequestError(f"request_id {request.request_id!r} is already running; ids must be unique")
        pinned = None
        if request.version is not None and request.adapter in self._adapters:
            pinned = self._adapters[request.adapter].request_for(request.version)
        core_request = self._requests.generating(request, pinned)
        core_id = core_request.request_id
        self._core.add_request(core_request)
        self._internal[request.request_id] = core_id
        self._external[core_id] = request
        if core_request.lora_request is not None:
            self._adapter_ids[core_id] = core_request.lora_request.lora_int_id

    def abort(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        core_ids = [self._internal.pop(request_id) for request_id in gone & self._internal.keys()]
        for core_id in core_ids:
            del self._external[core_id]
            self._adapter_ids.pop(core_id, None)
        self._core.abort_requests(core_ids)
        self._ahead = [delta for delta in self._ahead if delta.request_id not in gone]

    def policy(self, adapter: str) -> AdapterPolicy:
        return AdapterPolicy(self, adapter)

    def pin(self, version: int | None, adapter: str = "") -> None:
        if adapter in self._adapters:
            self._adapters[adapter].pinned = version

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int, adapter: str = "") -> None:
        if self._adapters:
            self._adapters[adapter].load(items, version, set(self._adapter_ids.values()))
            return
        pairs = with_tied_head(items) if self._tied and self._has_output_layer else iter(items)
        if self._on_cpu:
            from titan_rl.generation.vllm_cpu import drop_packed_experts

            self._core.collective_rpc(drop_packed_experts)
        self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})

    def held_weights(self, adapter: str = "") -> list[HeldTensor]:
        if self._adapters:
            return self._adapters[adapter].held()
        from titan_rl.generation.vllm_held_weights import held_weights

        (held,) = self._core.collective_rpc(held_weights, args=(self._tied,))
        return held

    def score(self, sequences: Sequence[Sequence[int]], adapter: str = "") -> list[list[float]]:
        # Scoring with one of several adapters suspends the requests only if the KV cache is full.
        continues = bool(adapter) and self._scheduler.has_room_for(map(len, sequences))
        requests = self._requests.scoring(sequences, adapter)
        scores: list[list[float]] = [[] for _ in sequences]
        unscored = {request.request_id: index for index, request in enumerate(requests) if request is not None}
        with self._scheduler.with_extra_slots() if continues else self._scheduler.alone():
            for request in requests:
                if request is not None:
                    self._core.add_request(request)
            while unscored:
                outputs = self._core.get_output().outputs
                for output in outputs:
                    if (index := unscored.get(output.request_id)) is None:
                        continue
                    if output.new_prompt_logprobs_tensors is not None:
                        # [num_tokens - 1, 1]: the first column is the sequence's own token
                        scores[index] = output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
                    if output.finish_reason is not None:
                        del unscored[output.request_id]
                self._ahead += self._deltas_of(outputs)
        return scores

    def reset_prefix_cache(self, *, recompute_running: bool = False, adapter: str = "") -> None:
        """See `Engine.reset_prefix_cache`. `recompute_running` applies to the requests of all adapters."""
        # vLLM cannot empty the cache while requests run. Salting the cache keys of later requests hides it from them.
        self._requests.leave_cache(adapter)
        if recompute_running or not self._external:
            self._core.reset_prefix_cache(reset_running_requests=recompute_running)

    def gauges(self) -> Mapping[str, float]:
        running, waiting = self._scheduler.get_request_counts()
        gauges = {
            "running_requests": running,
            "waiting_requests": waiting,
            "places": self._scheduler.max_num_active_reqs,
            "kv_cache_usage": self._scheduler.get_kv_cache_usage(),
            "preemptions_total": self._scheduler.num_preemptions,
        }
        if self._has_cache:
            gauges["prefix_cache_queries_total"] = self._num_prompt_tokens
            gauges["prefix_cache_hits_total"] = self._num_cached_tokens
        if self._speculates:
            gauges["drafts_total"] = self._scheduler.num_drafts
            gauges["draft_tokens_total"] = self._scheduler.num_draft_tokens
            gauges["accepted_tokens_total"] = self._scheduler.num_accepted_tokens
        return gauges

    def sleep(self) -> None:
        # Level 1 would keep a copy of the weights in the host's memory, which the next pull makes useless.
        self._core.sleep(level=2)

    def wake(self) -> None:
        self._core.wake_up()

    def close(self) -> None:
        if self._ends_with_process:
            _closed.append(self._core)
        else:
            self._core.shutdown()

    def step(self) -> list[TokenDelta]:
        ahead, self._ahead = self._ahead, []
        return [*ahead, *self._deltas_of(self._core.get_output().outputs)]

    def _deltas_of(self, outputs: Sequence[Any]) -> list[TokenDelta]:
        """Deltas of one step of vLLM."""
        # A long prompt is computed in several steps, and vLLM returns no output for it before the last one.
        silent = set(self._scheduler.take_scheduled()).difference(output.request_id for output in outputs)
        deltas = [TokenDelta(self._external[core_id].request_id, (), ()) for core_id in silent & self._external.keys()]
        for output in outputs:
            core_id = output.request_id
            request = self._external.get(core_id)
            if request is None:  # aborted, or a sequence that is scored
                continue
            request_id = request.request_id
            finish_reason, failure = None, None
            if output.finish_reason is not None:
                del self._external[core_id], self._internal[request_id]
                self._adapter_ids.pop(core_id, None)
                if (reason := str(output.finish_reason)) in _FINISH_REASONS:
                    finish_reason = FinishReason(reason)
                else:
                    failure = f"vLLM finished it with {reason!r}"
            logprobs = output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs is not None else []
            top = _likeliest(output.new_logprobs, request.sampling.top_logprobs)
            metrics = {}
            if output.prefill_stats is not None:
                metrics = {"cached_prompt_tokens": float(output.prefill_stats.num_cached_tokens)}
                self._num_prompt_tokens += output.prefill_stats.num_prompt_tokens
                self._num_cached_tokens += output.prefill_stats.num_cached_tokens
            tokens = output.new_token_ids
            experts = output.routed_experts  # of every computed position; the last positions produced the new tokens
            if experts is not None:
                experts = experts[len(experts) - len(tokens) :]
            allowed = None
            if request.sampling.constraint is not None and (not tokens or core_id in self._scheduler.allowed_logprobs):
                allowed = [self._scheduler.allowed_logprobs[core_id] for _ in tokens]
            scores = None
            if request.sampling.prompt_logprobs is not None and output.new_prompt_logprobs_tensors is not None:
                scores = _scores_of(output.new_prompt_logprobs_tensors, request.sampling.prompt_logprobs)
            deltas.append(
                TokenDelta(request_id, tokens, logprobs, finish_reason, experts, metrics, failure, top, allowed, scores)
            )
        return deltas


@dataclass(frozen=True, slots=True)
class AdapterPolicy:
    """One of several adapters of a `VLLMEngine`: its `LoadedPolicy`, which can be read back."""

    engine: VLLMEngine
    adapter: str

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        self.engine.load_state_dict(items, version, self.adapter)

    def held_weights(self) -> list[HeldTensor]:
        return self.engine.held_weights(self.adapter)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.engine.score(sequences, self.adapter)

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        self.engine.reset_prefix_cache(recompute_running=recompute_running, adapter=self.adapter)


def _likeliest(logprobs: Any, count: int) -> TopLogprobs | None:
    """Convert vLLM's logprobs of the likeliest tokens.

    Args:
        logprobs: vLLM's logprobs of the sampled token, then of the likeliest tokens. There are more columns if another
            request of the batch asks for more.  # [num_tokens, at least 1 + count]
        count: Number of likeliest tokens to return.
    """
    if not count or logprobs is None:
        return None
    ids, values = logprobs.logprob_token_ids[:, 1 : count + 1], logprobs.logprobs[:, 1 : count + 1]
    return [
        [(token, value) for token, value in zip(*row, strict=True) if value > -math.inf]
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _scores_of(tensors: Any, top_k: int) -> PromptScores:
    """Convert vLLM's logprobs of a prompt.

    Args:
        tensors: vLLM's logprobs of the prompt's own token, then of the likeliest tokens.
            # [num_prompt_tokens - 1, at least 1 + top_k]
        top_k: Number of likeliest tokens to return.
    """
    ids, values = tensors.logprob_token_ids[:, 1 : top_k + 1], tensors.logprobs[:, 1 : top_k + 1]
    return PromptScores(
        logprob_array(tensors.logprobs[:, 0].tolist()),
        top_k,
        token_array(ids.flatten().tolist()),
        logprob_array(values.flatten().tolist()),
    )


def _executor(config: Any) -> Any:
    if config.parallel_config.distributed_executor_backend == "external_launcher":
        from titan_rl.generation.vllm_scheduler import RankExecutor

        return RankExecutor
    from vllm.v1.executor import Executor

    return Executor.get_class(config)


EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")
"""Hugging Face names of the embedding."""


def has_output_layer(worker: Any) -> bool:
    """Whether vLLM's model has an output layer. Without one it multiplies with the embedding."""
    modules = worker.get_model().named_modules(remove_duplicate=False)
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in modules)


def with_tied_head(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Add the output layer to the pairs of a model with tied embeddings. On a CPU vLLM keeps a packed copy of it, which
    loading the embedding does not change."""
    embedding, names = None, set[str]()
    for name, tensor in items:
        names.add(name)
        if name in EMBEDDINGS:
            embedding = tensor
        yield name, tensor
    if embedding is not None and "lm_head.weight" not in names:
        yield "lm_head.weight", embedding
