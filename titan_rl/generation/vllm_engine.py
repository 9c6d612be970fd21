"""vLLM as an `Engine`, in this process: its engine core alone, without its tokenizer or output processing."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.calls.imports import require
from titan_rl.errors import ModelError, RequestError
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.gpu_share import gpu_share_of, weight_bytes
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.vllm_weights import drop_packed_experts, with_tied_head
from titan_rl.types import FinishReason, TopLogprobs

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core runs in the thread that calls it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that share cores must not bind to the same ones
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # see max_model_len below
}

# Those of vLLM's that leave the tokens valid. Its others are "error" and "repetition".
_FINISH_REASONS = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}

CPU_BATCHED_TOKENS = 4096  # most tokens of one step


class VLLMEngine:
    """Continuous batching with paged attention and a prefix cache.

    Logprobs are those of the distribution sampled from: temperature, top_p, top_k and min_p applied.

    Args:
        model_path: Hugging Face folder with config.json and safetensors; no tokenizer is needed.
        dtype: of weights, activations and KV cache.
        max_context: most tokens of prompt and completion together.
        max_running: most requests advanced at a time; others wait.
        adapts: fewer are advanced while the KV cache is expected to be full, see `AdaptivePlaces`.
        kv_cache_gib: memory for the KV cache.
        seed: of requests that bring none.
        routed_experts: return the experts that each token of a mixture of experts took. Not on CPU, where vLLM has the
            model runner for it only with a Triton that compiles for CPUs.
        gpu_share: of the memory of its GPU that this process has; by default what weights, KV cache and work space come
            to, see `gpu_share_of`. vLLM does not start where so much is not free.
        prefix_cache: requests reuse the KV cache of others that begin with the same tokens.
        speculative: vLLM's speculative_config, by which it guesses tokens and checks several in one step.
        sleeps: its memory can be given back for a time. Not on CPU.
        tensor_parallel_size: ranks that share the model, each with an engine of its own, in lockstep. They are
            started by whoever started this process, with torch.distributed's environment variables set.

    Raises:
        MissingExtraError: vLLM is not installed.
        ModelError: the folder is not a model that vLLM can load, or does not fit the settings.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        max_context: int = 512,
        max_running: int = 64,
        adapts: bool = False,
        kv_cache_gib: float = 1.0,
        seed: int = 0,
        routed_experts: bool = False,
        gpu_share: float | None = None,
        prefix_cache: bool = True,
        speculative: Mapping[str, Any] | None = None,
        sleeps: bool = False,
        tensor_parallel_size: int = 1,
    ) -> None:
        if not (Path(model_path) / "config.json").is_file():
            raise ModelError(f"{model_path} has no config.json; it must be a Hugging Face model folder")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        require("vllm", "cpu")
        import torch
        import torch._dynamo.config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.core_client import InprocClient

        from titan_rl.generation.vllm_adaptive import AdaptiveScheduler
        from titan_rl.generation.vllm_requests import VLLMRequests
        from titan_rl.generation.vllm_scheduler import SCORE_PLACES, ScoringScheduler
        from titan_rl.generation.vllm_speculation import keep_kernels, repair_sampler

        gc.freeze()  # vLLM collects garbage five times as it starts, then freezes all: its modules need none of that
        on_cpu = current_platform.is_cpu()
        if on_cpu and routed_experts:
            raise ModelError(
                "vLLM does not return routed experts on CPU; set generation.return_routed_experts = false or use a GPU"
            )
        if on_cpu and sleeps:
            raise ModelError(
                "vLLM cannot sleep on CPU; set scheduling.on_batch_ready to 'continue', 'keep' or 'abort', or use a GPU"
            )
        if on_cpu:
            # Compiling takes 20 s or more at start and at the first step, and gains nothing for models that fit a CPU.
            torch._dynamo.config.disable = True

            gpu_share = None
            keep_kernels()
            if speculative is not None:
                repair_sampler()
        elif gpu_share is None:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            gpu_share = gpu_share_of(
                total,
                weight_bytes=weight_bytes(Path(model_path), dtype) // tensor_parallel_size,
                kv_bytes=int(kv_cache_gib * 2**30),
            )

        self._on_cpu = on_cpu
        self._internal: dict[str, str] = {}  # request id -> core id
        self._external: dict[str, EngineRequest] = {}  # by core id
        self._has_cache, self._guesses = prefix_cache, speculative is not None
        self._num_prompt_tokens = self._num_cached_tokens = 0
        arguments = EngineArgs(
            model=model_path,
            skip_tokenizer_init=True,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            seed=seed,
            max_model_len=max_context + 1,  # room for the token that vLLM samples after a sequence it scores
            max_num_seqs=max_running + SCORE_PLACES,
            max_num_active_seqs=max_running,
            scheduler_cls=AdaptiveScheduler if adapts else ScoringScheduler,
            kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
            enable_prefix_caching=prefix_cache,
            speculative_config=None if speculative is None else dict(speculative),
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            async_scheduling=False,  # a step's tokens must come from the weights loaded when it was taken
            enforce_eager=on_cpu,
            # Of a split prompt vLLM rewinds the generator of a seed, which generators on a CPU cannot do.
            enable_chunked_prefill=False if on_cpu else None,
            max_num_batched_tokens=max(CPU_BATCHED_TOKENS, max_context + 1) if on_cpu else None,
            # On a CPU the default of 128 hides most of a short conversation from the prefix cache.
            block_size=32 if on_cpu else None,
            enable_return_routed_experts=routed_experts,
            enable_sleep_mode=sleeps,
            gpu_memory_utilization=gpu_share or EngineArgs.gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size,
            distributed_executor_backend="external_launcher" if tensor_parallel_size > 1 else "uni",
            disable_log_stats=True,
        )
        try:
            config = arguments.create_engine_config()
            limit = getattr(config.model_config.hf_text_config, "max_position_embeddings", max_context)
            if max_context > limit:
                raise ValueError(f"max_context is {max_context} and the model has {limit} positions")
            vocab_size = config.model_config.get_vocab_size()
            self._requests = VLLMRequests(max_context, vocab_size, guesses=speculative is not None)
            self._tied: bool = getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)
            self._core = InprocClient(config, _executor(config), log_stats=False)
            assert isinstance(self._core.engine_core.scheduler, ScoringScheduler)
            self._scheduler = self._core.engine_core.scheduler
        except (ValueError, OSError, ImportError) as error:
            raise ModelError(f"vLLM cannot serve {model_path}: {error}") from error

    def add(self, request: EngineRequest) -> None:
        if request.request_id in self._internal:
            raise RequestError(f"request_id {request.request_id!r} is already running; ids must be unique")
        core_request = self._requests.generating(request)
        core_id = core_request.request_id
        self._core.add_request(core_request)
        self._internal[request.request_id] = core_id
        self._external[core_id] = request

    def abort(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        core_ids = [self._internal.pop(request_id) for request_id in gone & self._internal.keys()]
        for core_id in core_ids:
            del self._external[core_id]
        self._core.abort_requests(core_ids)

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        pairs = with_tied_head(items) if self._tied else iter(items)
        if self._on_cpu:
            self._core.collective_rpc(drop_packed_experts)
        self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        requests = self._requests.scoring(sequences)
        scores: list[list[float]] = [[] for _ in sequences]
        unscored = {request.request_id: index for index, request in enumerate(requests) if request is not None}
        with self._scheduler.alone():
            for request in requests:
                if request is not None:
                    self._core.add_request(request)
            while unscored:
                for output in self._core.get_output().outputs:
                    index = unscored[output.request_id]
                    if output.new_prompt_logprobs_tensors is not None:
                        # [num_tokens - 1, 1]: the first column is the token that was there
                        scores[index] = output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
                    if output.finish_reason is not None:
                        del unscored[output.request_id]
        return scores

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        # vLLM cannot empty the cache while requests run; salting the keys of later requests hides it from them.
        self._requests.leave_cache()
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
        if self._guesses:
            gauges["drafts_total"] = self._scheduler.num_drafts
            gauges["draft_tokens_total"] = self._scheduler.num_draft_tokens
            gauges["accepted_tokens_total"] = self._scheduler.num_accepted_tokens
        return gauges

    def sleep(self) -> None:
        # Level 1 would keep a copy of the weights in the host's memory, which a pull replaces.
        self._core.sleep(level=2)

    def wake(self) -> None:
        self._core.wake_up()

    def close(self) -> None:
        self._core.shutdown()

    def step(self) -> list[TokenDelta]:
        outputs = self._core.get_output().outputs
        # A long prompt is computed in several steps, and vLLM puts out nothing before its last.
        silent = set(self._scheduler.take_begun()).difference(output.request_id for output in outputs)
        deltas = [TokenDelta(self._external[core_id].request_id, (), ()) for core_id in silent & self._external.keys()]
        for output in outputs:
            core_id = output.request_id
            request = self._external.get(core_id)
            if request is None:  # aborted
                continue
            request_id = request.request_id
            finish_reason, failure = None, None
            if output.finish_reason is not None:
                del self._external[core_id], self._internal[request_id]
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
            experts = output.routed_experts  # of every position computed: the last ones produced the new tokens
            if experts is not None:
                experts = experts[len(experts) - len(tokens) :]
            deltas.append(TokenDelta(request_id, tokens, logprobs, finish_reason, experts, metrics, failure, top))
        return deltas


def _likeliest(logprobs: Any, count: int) -> TopLogprobs | None:
    """
    Args:
        logprobs: of vLLM, [num_tokens, at least 1 + count]: the sampled token, then the likeliest. There are more where
            another request of the batch asks for more.
    """
    if not count or logprobs is None:
        return None
    ids, values = logprobs.logprob_token_ids[:, 1 : count + 1], logprobs.logprobs[:, 1 : count + 1]
    return [
        [(token, value) for token, value in zip(*row, strict=True) if value > -math.inf]
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _executor(config: Any) -> Any:
    if config.parallel_config.distributed_executor_backend == "external_launcher":
        from titan_rl.generation.vllm_executor import RankExecutor

        return RankExecutor
    from vllm.v1.executor import Executor

    return Executor.get_class(config)
