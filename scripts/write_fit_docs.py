"""Write the tables of docs/how_to/fit.md, the computed memory of public models: `python -m scripts.write_fit_docs`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from titan_rl.generation.gpu_share import GPU_SHARE, WORK_BYTES
from titan_rl.run.checks.gpu_memory import CONTEXT_BYTES
from titan_rl.training.memory import rank_memory, total_parameters
from titan_rl.training.settings import ModelConfig, TrainingConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how_to" / "fit.md"
MARK = "<!-- computed -->"
MODEL_CONFIGS = ROOT / "scripts" / "model_configs"

GIB = 2**30
LIMIT_GIB = 80
ROW_TOKENS = 16_384
GPUS = (1, 2, 4, 8, 16, 32, 64)
EXPERT_RANKS = 8
"""Number of ranks that divide the experts: those of one host."""
MODELS = {
    "8B": "qwen3_8b",
    "30B-A3B": "qwen3_30b_a3b",
    "70B": "llama_70b",
    "235B-A22B": "qwen3_235b_a22b",
}
STATES: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "small": {"optimizer_dtype": "int8", "master_dtype": "bfloat16"},
    "offloaded": {"offload": ("parameters", "activations")},
}


def page() -> str:
    """Make the text of the page, with current tables after its mark."""
    text = PAGE.read_text(encoding="utf-8")
    return "\n".join([text[: text.index(MARK)] + MARK, "", *trainer_rows(MODELS), *_engines(), ""])


def trainer_rows(models: Mapping[str, str]) -> Iterator[str]:
    """Yield the rows of the table of trainers for some of `MODELS`, after the rows of its head."""
    yield "| model | state | " + " | ".join(f"{count} GPU{'s' * (count > 1)}" for count in GPUS) + " |"
    yield "|---|---|" + "---:|" * len(GPUS)
    for name, file in models.items():
        for state, given in STATES.items():
            yield f"| {name} | {state} | " + " | ".join(_trainer(file, given, count) for count in GPUS) + " |"
            if state != "float32" and "num_experts" in _config(file):
                cells = (_trainer(file, given, count, EXPERT_RANKS) for count in GPUS)
                yield f"| {name} | {state}, experts divided | " + " | ".join(cells) + " |"


def _trainer(file: str, given: Mapping[str, Any], count: int, expert_parallel: int = 1) -> str:
    if count % expert_parallel or (count == 1 and "parameters" in given.get("offload", ())):
        return "-"
    training = TrainingConfig(
        data_parallel=count,
        expert_parallel=expert_parallel,
        activation_checkpointing="full",
        row_tokens=ROW_TOKENS,
        rows_per_micro_batch=1,
        **given,
    )
    total = (rank_memory(_model(file), training, hf=_config(file)).total + CONTEXT_BYTES) / GIB
    return f"{total:.0f}" if total <= LIMIT_GIB else f"({total:,.0f})"


def _engines() -> Iterator[str]:
    yield ""
    yield (
        f"Computed, not measured: an engine in bfloat16 that has {GPU_SHARE:.0%} of GPUs of {LIMIT_GIB} GiB, and the "
        "tokens that its KV cache holds."
    )
    yield ""
    sizes = (1, 2, 4, 8)
    yield "| model | " + " | ".join(f"`tensor_parallel_size = {size}`" for size in sizes) + " |"
    yield "|---|" + "---|" * len(sizes)
    for name, file in MODELS.items():
        yield f"| {name} | " + " | ".join(_engine(file, size) for size in sizes) + " |"


def _engine(file: str, size: int) -> str:
    hf = _config(file)
    weights = ceil(2 * total_parameters(hf, "torchtitan") / size)
    kv_heads = max(1, hf["num_key_value_heads"] // size)  # vLLM copies heads if there are fewer than ranks
    token = 2 * 2 * hf["num_hidden_layers"] * kv_heads * hf["head_dim"]
    cache = GPU_SHARE * LIMIT_GIB * GIB - weights - WORK_BYTES
    shown = f"{weights / GIB:.0f} GiB of weights"
    return f"{shown}, {int(cache // token):,} tokens" if cache > 0 else f"({shown})"


def _model(file: str) -> ModelConfig:
    return ModelConfig(path=file, dtype="bfloat16", max_context=ROW_TOKENS)


def _config(file: str) -> dict[str, Any]:
    return json.loads((MODEL_CONFIGS / f"{file}.json").read_text())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
