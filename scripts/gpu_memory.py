"""Estimate the GPU memory of the examples for GPUs, with several settings. Needs no GPU.

    python scripts/gpu_memory.py                                          # all of them
    python scripts/gpu_memory.py examples/gsm8k/qwen3_0_6b.toml

Each line has one setting of [training] that differs from the file, and the memory of the trainer's weights, gradients
and moments, of the passes of one micro-batch, and of an engine. The formulas are for dense Qwen3 and for one rank;
tests/training/test_gpu_memory.py compares them with the memory of a trainer on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.training.settings import TrainingConfig

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("examples/gsm8k/qwen3_0_6b.toml", "examples/alphabet_sort/qwen3_0_6b.toml")
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
CHUNK_LOGITS = 2**26
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"attention": "document"},
    {"optimizer_dtype": "int8"},
    {"optimizer_dtype": "int8", "master_dtype": "bfloat16"},
    {"offload": ("optimizer",)},
    {"data_parallel": 8},
    {"data_parallel": 8, "offload": ("parameters",)},
    {"rows_per_micro_batch": 1},
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in config.json that determine memory. The defaults are those of Qwen3-0.6B."""

    hidden_size: int = 1024
    num_hidden_layers: int = 28
    intermediate_size: int = 3072
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = True

    @staticmethod
    def read(folder: Path) -> Sizes:
        """Sizes of the model in a folder."""
        values: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        return Sizes(**{name: values[name] for name in Sizes.__dataclass_fields__})

    @property
    def queries(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def layer(self) -> int:
        """Parameters of attention, its norms, and the feed-forward part."""
        matrices = self.hidden_size * (2 * self.queries + 2 * self.keys + 3 * self.intermediate_size + 2)
        return matrices + 2 * self.head_dim

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding, and of the output head if it is not tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def parameters(self) -> int:
        return self.num_hidden_layers * self.layer + self.embeddings + self.hidden_size


def state_bytes(sizes: Sizes, training: TrainingConfig) -> dict[str, int]:
    """Bytes of weights and moments, which stay on a rank's device, and of gradients, which exist within a step."""
    if "parameters" in training.offload:
        return {"weights": 0, "moments": 0, "gradients": 0}
    master = BYTES[training.master_dtype]
    moments = 0 if "optimizer" in training.offload else 2 * BYTES[training.optimizer_dtype]
    count = sizes.parameters // training.num_ranks
    return {"weights": count * master, "moments": count * moments, "gradients": count * master}


def gathered_bytes(sizes: Sizes, itemsize: int) -> int:
    """Peak bytes that FSDP gathers on each rank.

    These are the weights of embedding and head, of a layer and of the next one, and the gradients of a layer in the
    same dtype. Offloaded parameters need no other memory on the device.
    """
    return (sizes.embeddings + 3 * sizes.layer) * itemsize


def kept_bytes(sizes: Sizes, training: TrainingConfig, tokens: int, itemsize: int) -> int:
    """Bytes of activations of one micro-batch that are kept for the backward pass, without the head.

    A layer keeps its input, both normed inputs and the sum between them; queries, keys and values after projection,
    norm, rotation and gathering, and the output of attention; and three vectors of the feed-forward part. Flex
    attention, which gathers nothing, keeps less.
    """
    if training.activation_checkpointing == "full":
        return tokens * sizes.num_hidden_layers * sizes.hidden_size * itemsize + _layer(sizes, tokens, itemsize)
    return sizes.num_hidden_layers * _layer(sizes, tokens, itemsize)


def _layer(sizes: Sizes, tokens: int, itemsize: int) -> int:
    entries = 4 * sizes.hidden_size + 3 * sizes.intermediate_size + 6 * sizes.queries + 6 * sizes.keys
    return tokens * (entries + 2 * sizes.head_dim) * itemsize


def head_bytes(sizes: Sizes, trained: int) -> int:
    """Bytes of the logits of one chunk, and of the values that are computed from them."""
    return 12 * min(CHUNK_LOGITS, trained * sizes.vocab_size)


def math_kernel_bytes(sizes: Sizes, training: TrainingConfig) -> int:
    """Bytes that torch's math kernel would keep: 12 for each attention score of rows with a single document."""
    scores = training.rows_per_micro_batch * training.row_tokens**2 * sizes.num_attention_heads
    return 12 * scores * sizes.num_hidden_layers


def estimate(sizes: Sizes, training: TrainingConfig, dtype: str, kv_cache_gib: float) -> dict[str, float]:
    """GiB of each part of a trainer and an engine that share a GPU."""
    tokens = training.rows_per_micro_batch * training.row_tokens
    found: dict[str, float] = dict(state_bytes(sizes, training))
    if training.num_ranks > 1:
        found["gathered"] = gathered_bytes(sizes, BYTES[dtype])
    elif dtype != training.master_dtype:
        found["weights in " + dtype] = sizes.parameters * BYTES[dtype]  # autocast keeps them until the backward pass
    found["passes"] = kept_bytes(sizes, training, tokens, BYTES[dtype]) + head_bytes(sizes, tokens)
    found["engine"] = sizes.parameters * BYTES[dtype] + kv_cache_gib * 2**30
    return {name: value / 2**30 for name, value in found.items()} | {"all": sum(found.values()) / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=[str(ROOT / each) for each in EXAMPLES], help="TOML files of runs")
    for name in parser.parse_args().files:
        settings = tomllib.loads(Path(name).read_text())
        folder = Path(settings["model"]["path"])
        sizes = Sizes.read(folder) if (folder / "config.json").is_file() else Sizes()
        dtype = settings["model"].get("dtype", "float32")
        print(f"{name}: {sizes.parameters / 1e9:.2f}B parameters, {dtype}, in GiB")
        for variant in VARIANTS:
            training = TrainingConfig(**{**settings["training"], **variant})
            parts = estimate(sizes, training, dtype, settings.get("generation", {}).get("kv_cache_gib", 1.0))
            text = ", ".join(f"{part} {value:.1f}" for part, value in parts.items())
            print(f"  {', '.join(f'{key} = {value}' for key, value in variant.items()) or 'as it is'}: {text}")
        kept = math_kernel_bytes(sizes, TrainingConfig(**settings["training"])) / 2**30
        print(f"  (scores that torch's math kernel would keep, and no kernel in use does: {kept:.1f})")


if __name__ == "__main__":
    main()
