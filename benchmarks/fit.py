"""Error of the computed memory of a trainer's rank, and balance of its batches.

    python -m benchmarks.fit [--only memory|balance] [--cases "qwen3, tied" ...]

- `fit_error`: largest relative difference between the memory that `titan-rl fit` computes from config.json and the peak
  of a rank on a CPU, over the models of `CASES`: dense, tied and mixtures of both implementations, with and without
  checkpointing, with rows of different lengths, and on one and two ranks. Each rank is a separate process, which
  trains a tiny model first and then makes two optimizer steps of two full micro-batches. Its peak is the growth of its
  resident memory, as the kernel counts it (VmHWM).
- `fit_error_NAME`: the difference of each, positive if too much is computed.
- `dp_imbalance` and `dp_step_imbalance`: see `benchmarks/balance.py`.

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**16))  # returns freed memory to the kernel

from benchmarks.balance import report_balance
from benchmarks.paired import report
from benchmarks.peaks import in_its_own_process, peak_of
from benchmarks.trainer_memory import join_world, on_ranks
from titan_rl.training.settings import ModelConfig, TrainingConfig

TARGET = 0.1
MICRO_BATCHES = 2

_SIZES = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 8192, "max_position_embeddings": 2048,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the settings that train it.

    Args:
        family: `model_type`.
        sizes: fields of config.json, besides `_SIZES`.
        training: settings of [training].
    """

    family: str
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    implementation: str = "auto"
    dtype: str = "float32"
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def settings(self, folder: Path) -> tuple[ModelConfig, TrainingConfig]:
        training = TrainingConfig(**{"row_tokens": 512, "rows_per_micro_batch": 2, **self.training})
        model: dict[str, Any] = {"path": str(folder), "dtype": self.dtype, "implementation": self.implementation}
        return ModelConfig(**model, max_context=training.row_tokens), training


CASES: Mapping[str, Case] = {
    "qwen3, tied": Case("qwen3", {"tie_word_embeddings": True}),
    "qwen3, checkpointed": Case("qwen3", {"num_hidden_layers": 12}, training={"activation_checkpointing": "full"}),
    "llama, long rows": Case("llama", training={"row_tokens": 2048, "rows_per_micro_batch": 1}),
    "llama, tied, transformers": Case("llama", {"tie_word_embeddings": True}, "transformers"),
    "qwen2, 8-bit": Case("qwen2", training={"optimizer_dtype": "int8", "row_tokens": 256}),
    "gemma3_text": Case("gemma3_text", {"sliding_window": 128, "num_hidden_layers": 6}),
    "qwen3_moe": Case("qwen3_moe", _EXPERTS),
    "mixtral, checkpointed": Case(
        "mixtral", {"num_local_experts": 8, "intermediate_size": 384}, training={"activation_checkpointing": "full"}
    ),
    "qwen3, two ranks": Case("qwen3", {"num_hidden_layers": 8}, training={"data_parallel": 2}),
    "qwen3_moe, experts divided": Case("qwen3_moe", _EXPERTS, training={"data_parallel": 2, "expert_parallel": 2}),
    "mixtral, experts divided": Case(
        "mixtral",
        {"num_local_experts": 8, "intermediate_size": 384},
        training={"data_parallel": 2, "expert_parallel": 2, "activation_checkpointing": "full"},
    ),
    "olmo2, two ranks, checkpointed": Case(
        "olmo2", {"num_hidden_layers": 8}, training={"data_parallel": 2, "activation_checkpointing": "full"}
    ),
}


def make_model(case: Case, folder: Path, sizes: Mapping[str, Any]) -> None:
    """Write a model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.family, **{**_SIZES, "tie_word_embeddings": False, **case.sizes, **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def rank_peak(folder: Path, rank: int, ranks: int, port: int) -> int:
    """Peak of a rank of the case whose name is in the folder."""
    from titan_rl.training.trainer import TrainerCore

    case = CASES[(folder / "name").read_text()]
    world = join_world(rank, port, data_parallel=ranks)

    def train(model: str, **fewer: int) -> Any:
        config, training = case.settings(folder / model)
        training = training.model_copy(update=fewer)
        trainer = TrainerCore(config.model_copy(update={"max_context": training.row_tokens}), training, seed=0)
        rows = ranks * training.rows_per_micro_batch * MICRO_BATCHES
        for _ in range(2):
            trainer.step(full_samples(rows, training.row_tokens))
        return trainer

    train("small", row_tokens=64)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    peak, _ = peak_of(lambda: train("large"))
    world.barrier()
    return peak


def full_samples(count: int, length: int) -> list[Any]:
    """Samples that fill a row each."""
    from titan_rl.training.data.sample import TrainingSample

    mask, logprobs = [False] + [True] * (length - 1), [-5.0] * length
    ids = [[1 + (i + t) % 100 for t in range(length)] for i in range(count)]
    return [
        TrainingSample(str(i), str(i), ids[i], mask, logprobs, [1.0 - i % 2] * length, [0] * length, 1.0)
        for i in range(count)
    ]


def error_of(name: str) -> tuple[float, int]:
    """(Relative error, measured peak in bytes)."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "name").write_text(name)
        in_its_own_process(make_model, case, folder / "large", {})
        in_its_own_process(make_model, case, folder / "small", {"vocab_size": 256, "hidden_size": 128})
        model, training = case.settings(folder / "large")
        computed = in_its_own_process(_computed, model, training)
        measured = max(on_ranks(rank_peak, folder, training.num_ranks))
    parts = ", ".join(f"{part} {size / 2**20:.0f}" for part, size in computed.items())
    total = sum(computed.values())
    print(f"{name}: {measured / 2**20:.0f} MiB measured, {total / 2**20:.0f} of {parts}", file=sys.stderr)
    return total / measured - 1, measured


def _computed(model: ModelConfig, training: TrainingConfig) -> dict[str, int]:
    from titan_rl.training.memory import rank_memory

    return rank_memory(model, training, device="cpu").device


def report_memory(names: list[str]) -> None:
    errors: dict[str, float] = {}
    for name in names:
        errors[name], measured = error_of(name)
        plain = re.sub(r"\W+", "_", name)
        report(f"fit_error_{plain}", errors[name], f"ratio of {measured / 2**20:.0f} MiB")
    report("fit_error", max(map(abs, errors.values())), "ratio", TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("memory", "balance"))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    arguments = parser.parse_args()
    if arguments.only != "memory":
        report_balance()
    if arguments.only != "balance":
        report_memory(arguments.cases)


if __name__ == "__main__":
    main()
