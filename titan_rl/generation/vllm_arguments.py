"""vLLM's arguments from an `EngineSpec` and the user's options. Importing this module does not import vLLM."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.core.errors import ModelError
from titan_rl.generation.engine import AdapterSpec, EngineSpec
from titan_rl.generation.gpu_share import CPU_KV_GIB, adapter_bytes, gpu_share_of, kv_bytes_of, weight_bytes

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OWN: Mapping[str, str | None] = {**_TABLES["determined"], **dict.fromkeys(_TABLES["fixed"]["names"])}
"""Fields of EngineArgs that the library sets, each with the setting that determines it; None for a fixed value."""


def problem_of(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first option that must not be passed to vLLM, and the reason; None if all options are valid.

    Unknown names are detected only if vLLM is installed; it is not imported.

    Example: `problem_of({"dtype": "float16"})` is `("dtype", "is determined by model.dtype; set that instead")`.
    """
    known = _argument_names()
    for name in options:
        if name in OWN:
            setting = OWN[name]
            if setting is not None:
                return name, f"is determined by {setting}; set that instead"
            return name, "is set by titan_rl, and no other value works; leave it out"
        if known and name not in known:
            close = get_close_matches(name, known - OWN.keys(), 1)
            return name, "is not a field of vLLM's EngineArgs" + (f"; did you mean {close[0]}?" if close else "")
    return None


@cache
def _argument_names() -> frozenset[str]:
    """The fields of vLLM's EngineArgs, read from its source, because importing vLLM takes seconds. Empty if vLLM is not
    installed."""
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            tree = ast.parse((Path(folder) / "engine" / "arg_utils.py").read_text())
        except (OSError, SyntaxError):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                return frozenset(target.id for target in fields if isinstance(target, ast.Name))
    return frozenset()


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core runs in the thread that calls it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that share cores must not bind to the same ones
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # see max_model_len below
}
"""Environment variables that vLLM reads when it is imported."""

CPU_BATCHED_TOKENS = 4096  # largest number of tokens of one step, unless a single prompt has more
GPU_BATCHED_TOKENS = 8192


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports for the slots of adapters."""


def adapter_slots(adapters: Collection[AdapterSpec]) -> tuple[int, int]:
    """Number of adapter slots in an engine, and the rank of each. vLLM reserves their memory."""
    rank = max(each.rank for each in adapters)
    return sum(each.num_versions for each in adapters), next(allowed for allowed in LORA_RANKS if allowed >= rank)


def adapter_targets(adapters: Iterable[AdapterSpec]) -> list[str]:
    """Layers for which the slots of an engine have matrices: the layers that any adapter changes."""
    return list(dict.fromkeys(target for each in adapters for target in each.targets))


def engine_arguments(spec: EngineSpec, *, on_cpu: bool) -> EngineArgs:
    """Make vLLM's arguments for an engine.

    Raises:
        ModelError: weights and KV cache do not fit the GPU, or vLLM lacks GPU kernels for the specification.
    """
    if spec.adapters and spec.dtype == "float32" and not on_cpu:
        raise ModelError('vLLM computes adapters in bfloat16 only on GPUs; set model.dtype = "bfloat16"')
    from vllm.engine.arg_utils import EngineArgs

    from titan_rl.generation.vllm_scheduler import SCORE_SLOTS, AdaptiveScheduler, ScoringScheduler

    kv_bytes, gpu_share = (int((spec.kv_cache_gib or CPU_KV_GIB) * 2**30), None) if on_cpu else _gpu_memory(spec)
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_context + 1,  # room for the token that vLLM samples after a sequence it scores
        "max_num_seqs": spec.max_running + SCORE_SLOTS,
        "max_num_active_seqs": spec.max_running,
        "scheduler_cls": AdaptiveScheduler if spec.adapts else ScoringScheduler,
        "kv_cache_memory_bytes": kv_bytes,
        "enable_prefix_caching": spec.prefix_cache,
        "speculative_config": None if spec.speculative is None else dict(spec.speculative),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        # With async scheduling, a step's tokens are returned while the next step is already running: tokens around a
        # swap would be attributed to weights that did not sample them, and scoring could not suspend other requests.
        "async_scheduling": False,
        "enforce_eager": on_cpu,
        # If a prompt is split, vLLM rewinds the generator of a request with a seed, which is impossible on a CPU.
        "enable_chunked_prefill": False if on_cpu else None,
        # With vLLM's default of 2048, a full batch of prompts would wait for many steps.
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS if on_cpu else GPU_BATCHED_TOKENS, spec.max_context + 1),
        # On a CPU the default of 128 hides most of a short conversation from the prefix cache.
        "block_size": 32 if on_cpu else None,
        "enable_return_routed_experts": spec.routed_experts,
        "enable_sleep_mode": spec.sleeps,
        "gpu_memory_utilization": gpu_share or EngineArgs.gpu_memory_utilization,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "distributed_executor_backend": "external_launcher" if spec.tensor_parallel_size > 1 else "uni",
        "disable_log_stats": True,
    }
    if adapters := spec.adapters.values():
        num_slots, rank = adapter_slots(adapters)
        arguments |= {
            "enable_lora": True,
            "max_loras": num_slots,
            "max_cpu_loras": num_slots,
            "max_lora_rank": rank,
            "lora_target_modules": adapter_targets(adapters),
        }
    options = dict(spec.options)
    options["hf_overrides"] = _overrides(Path(spec.model_path)) | options.get("hf_overrides", {})
    return EngineArgs(**arguments | options)


def _overrides(model: Path) -> dict[str, Any]:
    """Values that replace those of config.json, so that vLLM computes the same as transformers."""
    config = model / "config.json"
    hf = json.loads(config.read_text()) if config.exists() else {}  # vLLM reports a missing file
    if hf.get("model_type") == "cohere2" and (window := hf.get("sliding_window") or 0) > 1:
        return {"sliding_window": window - 1}  # vLLM's layers attend to one token more
    if hf.get("model_type") == "lfm2":  # published folders have these fields, which transformers does not write
        return {name: hf["hidden_size"] for name in ("block_dim", "conv_dim") if name not in hf}
    return {}


def _gpu_memory(spec: EngineSpec) -> tuple[int, float]:
    """Bytes of the KV cache, and the engine's share of the GPU's memory."""
    import torch

    if spec.kv_cache_gib is not None and spec.gpu_share is not None:
        return int(spec.kv_cache_gib * 2**30), spec.gpu_share
    free, total = torch.cuda.mem_get_info()
    folder = Path(spec.model_path)
    weights = weight_bytes(folder, spec.dtype) // spec.tensor_parallel_size
    if adapters := spec.adapters.values():
        num_slots, rank = adapter_slots(adapters)
        weights += num_slots * adapter_bytes(folder, spec.dtype, adapter_targets(adapters), rank=rank)
    if spec.kv_cache_gib is not None:
        kv_bytes = int(spec.kv_cache_gib * 2**30)
    else:
        kv_bytes = kv_bytes_of(total, free, weight_bytes=weights, share=spec.gpu_share, neighbours=spec.gpu_neighbours)
    return kv_bytes, spec.gpu_share or gpu_share_of(total, weight_bytes=weights, kv_bytes=kv_bytes)
