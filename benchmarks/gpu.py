"""A trainer and an engine on one GPU, at the shape of Qwen3-0.6B with random weights. Needs a GPU.

    python -m benchmarks.gpu [--only memory|engine]

- `gpu_fit_error`: largest relative difference between the memory that `titan-rl fit` computes for a trainer and what
  is taken of the GPU, over the settings of `STATES`. `gpu_fit_error_NAME`: of each, positive if too much is computed.
- `gpu_step_NAME`: tokens per second of a step, and the part of the GPU's bfloat16 peak that the operations of the
  model are: six per parameter and token, and those of causal attention, without what checkpointing computes again.
- `gpu_decode_vs_vllm`: tokens per second of this library's engine over those of vLLM's own `LLM.generate`, with
  the same 256 prompts of 128 tokens and 256 tokens to each, sampled at temperature 1 with logprobs.
- `gpu_swap_vs_copy`: time of a swap of all weights from tensors on the GPU over that of copying the same bytes there.

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.fit import full_samples
from benchmarks.paired import Spread, report
from benchmarks.peaks import in_its_own_process
from titan_rl.training.settings import ModelConfig, TrainingConfig

QWEN3_0_6B = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
ROW_TOKENS, MICRO_BATCHES = 16_384, 2
STATES: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "checkpointed": {"activation_checkpointing": "full"},
    "small": {"activation_checkpointing": "full", "optimizer_dtype": "int8", "master_dtype": "bfloat16"},
    "reference": {"activation_checkpointing": "full", "kl_coef": 0.1},
}
ATTENTION_FLOPS = 6 * 28 * 16 * 128 * ROW_TOKENS
"""Operations of causal attention per token of a full row, forward and backward: 12 per layer, head dimension and pair
of tokens (appendix B of PaLM, arXiv 2204.02311), and half of all pairs."""
NUM_REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 256, 128, 256
PEAK_FLOPS = 989e12
"""Operations per second of an H100 in bfloat16 without sparsity, from NVIDIA's data sheet."""


def make_model(folder: Path) -> None:
    """Write a model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **QWEN3_0_6B), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def trainer_settings(folder: Path, state: str) -> tuple[ModelConfig, TrainingConfig]:
    model = ModelConfig(path=str(folder), dtype="bfloat16", max_context=ROW_TOKENS)
    training: dict[str, Any] = {"row_tokens": ROW_TOKENS, "rows_per_micro_batch": 1, **STATES[state]}
    return model, TrainingConfig(**training)


def trainer_figures(folder: Path, state: str) -> dict[str, float]:
    """Bytes that a trainer takes of the GPU and those computed, its parameters, and the seconds of a step."""
    import torch

    from titan_rl.run.checks.gpu_memory import CONTEXT_BYTES
    from titan_rl.training.memory import rank_memory
    from titan_rl.training.trainer import TrainerCore

    free_at_start, _ = torch.cuda.mem_get_info()  # makes this process's context
    config, training = trainer_settings(folder, state)
    trainer = TrainerCore(config, training, seed=0)
    samples = full_samples(MICRO_BATCHES, ROW_TOKENS)
    seconds: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        trainer.step(samples)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    free, total = torch.cuda.mem_get_info()
    computed = {**rank_memory(config, training, device="cuda").device, "CUDA": CONTEXT_BYTES}
    parts = ", ".join(f"{part} {size / 2**30:.1f}" for part, size in computed.items())
    context, allocated, reserved = (
        size / 2**30
        for size in (total - free_at_start, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    )
    print(
        f"{state}: {(total - free) / 2**30:.2f} GiB taken, {context:.2f} at the start; allocated {allocated:.2f}, "
        f"reserved {reserved:.2f}; computed {sum(computed.values()) / 2**30:.2f}: {parts}",
        file=sys.stderr,
    )
    return {
        "taken": total - free,
        "computed": sum(computed.values()),
        "parameters": sum(tensor.numel() for _, tensor in trainer.named_tensors()),
        "seconds": median(seconds[1:]),
    }


def report_memory(folder: Path) -> None:
    errors: list[float] = []
    for state in STATES:
        found = in_its_own_process(trainer_figures, folder, state)
        errors.append(found["computed"] / found["taken"] - 1)
        report(f"gpu_fit_error_{state}", errors[-1], f"ratio of {found['taken'] / 2**30:.1f} GiB")
        rate = MICRO_BATCHES * ROW_TOKENS / found["seconds"]
        used = (6 * found["parameters"] + ATTENTION_FLOPS) * rate / PEAK_FLOPS
        report(f"gpu_step_{state}", rate, f"tokens/s, {used:.0%} of the peak")
    report("gpu_fit_error", max(map(abs, errors)), "ratio", 0.1)


def prompts() -> list[list[int]]:
    return [[1 + (7 * i + 3 * t) % 50_000 for t in range(PROMPT_TOKENS)] for i in range(NUM_REQUESTS)]


def engine_figures(folder: Path) -> dict[str, float]:
    """Tokens per second of this library's engine, and the seconds of a swap and of a copy."""
    import torch
    from safetensors.torch import load_file

    from titan_rl.generation.engine import EngineSpec
    from titan_rl.generation.request import EngineRequest
    from titan_rl.generation.vllm_engine import VLLMEngine
    from titan_rl.types import SamplingParams

    engine = VLLMEngine(
        EngineSpec(str(folder), dtype="bfloat16", max_context=1024, max_running=NUM_REQUESTS, kv_cache_gib=16.0)
    )
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, min_tokens=ANSWER_TOKENS, temperature=1.0)

    def generate(round_name: str) -> float:
        for number, prompt in enumerate(prompts()):
            engine.add(EngineRequest(f"{round_name}-{number}", prompt, sampling))
        left, began = NUM_REQUESTS * ANSWER_TOKENS, time.perf_counter()
        while left:
            left -= sum(len(delta.token_ids) for delta in engine.step())
        return NUM_REQUESTS * ANSWER_TOKENS / (time.perf_counter() - began)

    rates = []
    for number in range(3):
        engine.reset_prefix_cache()
        rates.append(generate(str(number)))
    tensors = [(name, tensor.cuda()) for name, tensor in load_file(folder / "model.safetensors").items()]

    def timed(act: Any) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    swaps = [timed(lambda: engine.load_state_dict(tensors, 1)) for _ in range(4)][1:]
    copies = [timed(lambda: [tensor.clone() for _, tensor in tensors]) for _ in range(4)][1:]
    engine.close()
    return {"rate": median(rates[1:]), "swap": median(swaps), "copy": median(copies)}


def bare_rate(folder: Path) -> float:
    """Tokens per second of vLLM's own class, with the arguments that this library gives it where they concern speed."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1025,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=16 * 2**30,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=ANSWER_TOKENS,
        min_tokens=ANSWER_TOKENS,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    rates = []
    for _ in range(3):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], sampling, use_tqdm=False)
        rates.append(NUM_REQUESTS * ANSWER_TOKENS / (time.perf_counter() - began))
    return median(rates[1:])


def report_engine(folder: Path) -> None:
    found = in_its_own_process(engine_figures, folder)
    report("gpu_decode", found["rate"], "tokens/s")
    report("gpu_swap", found["swap"] * 1e3, "ms")
    report("gpu_swap_vs_copy", found["swap"] / found["copy"], "ratio")
    bare = in_its_own_process(bare_rate, folder)
    report("gpu_decode_vs_vllm", Spread([found["rate"] / bare]), f"ratio of {bare:.0f} tokens/s", 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("memory", "engine"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_its_own_process(make_model, folder)
        if arguments.only != "engine":
            report_memory(folder)
        if arguments.only != "memory":
            report_engine(folder)


if __name__ == "__main__":
    main()
