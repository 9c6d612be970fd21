"""Training of the alphabet_sort example with tiny models of other families: held-out reward before and after.

    python -m benchmarks.model_trainings [--only qwen2 gemma3 llama mixture] [--seeds 0 1 2] [--steps 20]

Each family is a model of the size of the example's (4 layers of width 128), with random weights and the example's
tokenizer. `titan-rl sft` teaches it half of the example's demonstrations once, into build/model_trainings. `titan-rl
train` then trains it with each seed, with the settings of the example's cpu.toml.

Prints one JSON object per family and seed, and one for the mean over the seeds:

- reward_FAMILY_seed_N: mean reward of 256 held-out rollouts after the last step, and the same before the first step.
- reward_gain_FAMILY: mean difference of these two over the seeds, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from shutil import copy
from statistics import fmean, stdev
from typing import Any

import tomli_w

from titan_rl.run.directory import read_jsonl

SUBJECT = ("titan_rl",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "alphabet_sort"
KEPT = ROOT / "build" / "model_trainings"

TARGET = 0.1
"""Least gain of reward in 20 steps."""

DEMONSTRATIONS = 19_200
"""Half of those that the example's base model has learned from."""

SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "llama": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mixture": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    },
}
"""Fields of config.json, besides `SIZES`. Llama and Gemma have the structure of Llama 3.2 and Gemma 3, both with tied
embeddings."""


@dataclass(frozen=True, slots=True)
class Training:
    """Held-out reward before and after a run, and the seconds of the whole run."""

    before: float
    after: float
    seconds: float


def make_start(name: str, folder: Path) -> Path:
    """Write a model of a family with random weights and the tokenizer of the example's base model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**SIZES, **FAMILIES[name]}
    base = json.loads((EXAMPLE / "base" / "config.json").read_text(encoding="utf-8"))
    fields |= {key: base[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.float().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copy(EXAMPLE / "base" / file, folder)
    return folder


def make_base(name: str) -> Path:
    """Teach a family the demonstrations of the example, unless a folder has it already."""
    base = KEPT / name
    if not (base / "config.json").is_file():
        with tempfile.TemporaryDirectory() as folder:
            start = make_start(name, Path(folder) / "start")
            settings = example_settings(base)
            settings["sft"] = settings["sft"] | {"start": str(start), "demonstrations": DEMONSTRATIONS}
            del settings["sft"]["tiny_model"]
            run("sft", settings, Path(folder))
    return base


def example_settings(base: Path) -> dict[str, Any]:
    settings = tomllib.loads((EXAMPLE / "cpu.toml").read_text(encoding="utf-8"))
    settings["model"] |= {"path": str(base)}
    return settings


def run(command: str, settings: Mapping[str, Any], folder: Path, *options: str) -> None:
    config = folder / "config.toml"
    config.write_text(tomli_w.dumps(settings), encoding="utf-8")
    words = ["titan_rl.cli.main", command, str(config), "--run_dir", str(folder / "runs"), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment, check=True, stdout=sys.stderr)


def train(base: Path, seed: int, steps: int) -> Training:
    settings = example_settings(base)
    del settings["sft"]
    settings["training"] |= {"steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        run("train", settings, Path(folder), "--seed", str(seed))
        seconds = time.monotonic() - began
        records: list[dict[str, Any]] = read_jsonl(Path(folder) / "runs" / "latest" / "metrics.jsonl")
    before, *_, after = (record[name] for record in records if (name := "validation/reward_mean") in record)
    return Training(before, after, seconds)


def tell(name: str, value: float, unit: str, target: float | None = None, **more: float) -> None:
    line: dict[str, Any] = {"name": name, "value": round(value, 3), "target": target, "unit": unit}
    print(json.dumps(line | {key: round(each, 3) for key, each in more.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.only:
        base = make_base(name)
        gains: list[float] = []
        for seed in arguments.seeds:
            done = train(base, seed, arguments.steps)
            gains.append(done.after - done.before)
            tell(f"reward_{name}_seed_{seed}", done.after, "reward", before=done.before, seconds=done.seconds)
        error = stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else float("nan")
        tell(f"reward_gain_{name}", fmean(gains), "reward", TARGET, standard_error=error)


if __name__ == "__main__":
    main()
