"""Options that settings pass on to vLLM, checked without importing it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OWN = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_context",
    "seed": "seed",
    "max_num_seqs": "generation.max_running",
    "max_num_active_seqs": "generation.max_running",
    "kv_cache_memory_bytes": "generation.kv_cache_gib",
    "gpu_memory_utilization": "generation.gpu_share",
    "enable_prefix_caching": "generation.prefix_cache",
    "speculative_config": "[generation.speculative]",
    "enable_return_routed_experts": "generation.return_routed_experts",
    "tensor_parallel_size": "generation.tensor_parallel_size",
    "enable_sleep_mode": "scheduling.on_batch_ready",
    "tokenizer": None,
    "skip_tokenizer_init": None,
    "scheduler_cls": None,
    "logprobs_mode": None,
    "generation_config": None,
    "async_scheduling": None,
    "distributed_executor_backend": None,
    "disable_log_stats": None,
    "quantization": None,
    "load_format": None,
    "pipeline_parallel_size": None,
    "data_parallel_size": None,
    "enable_lora": None,
}
"""EngineArgs that are the library's to set, each with the setting that says it; None where nothing else would work:
tokens would carry the wrong version, logprobs would be those of another distribution, or weights could not be swapped.
"""


def problem_of(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """What keeps vLLM from being given these options: the name of one, and what is wrong with it.

    Unknown names are found where vLLM is installed; it is not imported.

    Example: `problem_of({"dtype": "float16"})` is `("dtype", "is what model.dtype says; set that instead")`.
    """
    known = _argument_names()
    for name in options:
        if name in OWN:
            setting = OWN[name]
            if setting is not None:
                return name, f"is what {setting} says; set that instead"
            return name, "is set by titan_rl, which works with no other value; leave it out"
        if known and name not in known:
            close = get_close_matches(name, known - OWN.keys(), 1)
            return name, "is no field of vLLM's EngineArgs" + (f"; did you mean {close[0]}?" if close else "")
    return None


@cache
def _argument_names() -> frozenset[str]:
    """The fields of vLLM's EngineArgs, read from its source: importing it takes seconds. Empty where it is missing."""
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
