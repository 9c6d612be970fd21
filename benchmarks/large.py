"""What large models, long contexts and long runs cost: memory of a rank, and what a token and a step leave behind.

    python -m benchmarks.large [--ranks 4] [--megabytes 400] [--only memory|tokens]

Peaks are those of the process's resident memory, as the kernel counts them (VmHWM), less what it had before. Each part
runs in processes of its own. Prints one JSON object a line: {"name": ..., "value": ..., "target": ..., "unit": ...}.

- `rank_peak_vs_shard`: the most that a rank needs at its start, over the bytes of the parameters that it then holds.
- `export_peak_vs_model`: the most that an export in bfloat16 needs, over the bytes that it writes.
- `publish_peak_vs_version`: the same of publishing a version, which itself is in memory then.
- `logprob_peak_bytes_vs_vocab`: the most that logprobs and their gradients need, forward and backward, with a
  vocabulary of 128k over one of 32k; and `logprob_peak_bytes_whole_vs_vocab`, with all logits at once, 32k over 8k.
- `context_parallel_peak_vs_1`: the most that the forward and backward pass of one long row needs on the worst of two
  ranks that share its tokens, over what one rank needs for all of it.
- `start_gb_70b_64_gpus` and three like it: what these mean for a 70B model, computed.
- `tokens_per_second_through_the_controller`, `memory_a_token` and what is beside them: `benchmarks/token_path.py`.
- `report_peak_mb_10k_steps`, `resume_s_10k_steps` and what is beside them: `benchmarks/long_runs.py`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # what is freed is given back

import torch

from benchmarks.paired import report, report_computed
from titan_rl.training.objective.selected_logprobs import CHUNK_LOGITS, selected_logprobs

TOKENS, WIDTH = 4096, 64
LONG_ROW = 4096
CONTEXT = multiprocessing.get_context("spawn")

PARAMETERS_70B, VOCABULARY_70B, WIDTH_70B, GPUS = 70e9, 128_256, 8_192, 64
BYTES_A_LOGIT = 14
"""Of logprobs and their gradients: the logits in bfloat16 and float32, their softmax, and the gradients of both."""


def peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """(bytes that the process had at most meanwhile, beyond those it had before; what the work returns)."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    result = work()
    return _status("VmHWM") - before, result


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def join_world(rank: int, port: int, **parallel: int) -> Any:
    from titan_rl.training.parallel.world import World

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(math.prod(parallel.values())))
    world = World.join(**parallel)
    world.barrier()
    return world


def start_rank(folder: Path, rank: int, ranks: int, port: int) -> tuple[int, int]:
    """(peak of making a policy, bytes of its parameters on this rank)."""
    from titan_rl.training.parallel.parallel import local
    from titan_rl.training.policy.policy import Policy

    world = join_world(rank, port, data_parallel=ranks)
    peak, policy = peak_of(lambda: Policy(folder, world, max_context=128, row_tokens=128))
    held = sum(local(parameter).untyped_storage().nbytes() for parameter in policy.model.parameters())
    world.barrier()
    return peak, held


def rank_peak_vs_shard(ranks: int, megabytes: int) -> float:
    """The worst rank's."""
    with tempfile.TemporaryDirectory() as folder, CONTEXT.Pool(1) as maker:
        maker.apply(make_model, (Path(folder), megabytes))
        return max(peak / held for peak, held in on_ranks(start_rank, Path(folder), ranks))


def on_ranks(work: Callable[[Path, int, int, int], Any], folder: Path, ranks: int) -> list[Any]:
    """What each of them returns, told its rank, their number and a port to meet at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with CONTEXT.Pool(ranks) as pool:
        started = [pool.apply_async(work, (folder, rank, ranks, port)) for rank in range(ranks)]
        return [each.get(timeout=300) for each in started]


def row_peak(folder: Path, rank: int, ranks: int, port: int) -> int:
    """Of a forward and backward pass, gradients included."""
    from titan_rl.training.data.family import Family
    from titan_rl.training.data.sample import TrainingSample
    from titan_rl.training.policy.policy import Policy
    from titan_rl.training.policy.tensor_batch import make_tensor_batch

    world = join_world(rank, port, context_parallel=ranks)
    policy = Policy(folder, world, max_context=LONG_ROW, row_tokens=LONG_ROW)
    blank = [0.0] * LONG_ROW
    sample = TrainingSample("", "", [1] * LONG_ROW, [True] * LONG_ROW, blank, blank, [0] * LONG_ROW, temperature=1.0)
    batch = make_tensor_batch([[Family((sample,))]], policy.device, policy.lay_out)
    peak, _ = peak_of(lambda: policy.logprobs(batch)[0].sum().backward())
    world.barrier()
    return peak


def context_parallel_peak_vs_1() -> float:
    with tempfile.TemporaryDirectory() as folder, CONTEXT.Pool(1) as maker:
        maker.apply(make_model, (Path(folder), 17, 256, 1))  # next to which a row's activations are large
        alone, shared = (max(on_ranks(row_peak, Path(folder), ranks)) for ranks in (1, 2))
    return shared / alone


def make_model(folder: Path, megabytes: int, width: int = 512, kv_heads: int = 8) -> None:
    """Of equal layers, in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    of_layer = 4 * (4 * width * width + 3 * width * 4 * width)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=max(1, (megabytes << 20) // of_layer),
        num_attention_heads=width // 64,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=LONG_ROW,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def leaving_peaks(folder: Path) -> tuple[int, int, int]:
    """(peak of an export, of a version that is published, bytes of either)."""
    from titan_rl.training.publishing import WeightPublisher
    from titan_rl.training.settings import ModelConfig, TrainingConfig
    from titan_rl.training.trainer import TrainerCore
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    trainer = TrainerCore(ModelConfig(path=str(folder), dtype="bfloat16"), TrainingConfig(), seed=0)
    export, _ = peak_of(lambda: trainer.export_hf(folder / "export"))
    publisher = WeightPublisher(trainer, SharedMemoryTransport("benchmark"), num_probes=0)
    published, manifest = peak_of(publisher.publish)
    publisher.close()
    return export, published, manifest.shards[0].num_bytes


def leaving(megabytes: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder, CONTEXT.Pool(1) as pool:
        pool.apply(make_model, (Path(folder), megabytes))
        with CONTEXT.Pool(1) as trainer:
            export, published, num_bytes = trainer.apply(leaving_peaks, (Path(folder),))
    return export / num_bytes, published / num_bytes


def scoring_peak(vocabulary: int, chunk_logits: int) -> int:
    """Bytes that are gone or free again afterwards, and the gradients."""
    hidden_ND = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight_VD = torch.randn(vocabulary, WIDTH, requires_grad=True)
    targets_N, temperatures_N = torch.arange(TOKENS), torch.ones(TOKENS)

    def score() -> None:
        scored = selected_logprobs(hidden_ND, weight_VD, targets_N, temperatures_N, chunk_logits=chunk_logits)
        scored[0].sum().backward()

    return peak_of(score)[0]


def growth(small: int, large: int, chunk_logits: int) -> float:
    peaks: list[int] = []
    for vocabulary in (small, large):
        with CONTEXT.Pool(1) as pool:
            peaks.append(pool.apply(scoring_peak, (vocabulary, chunk_logits)))
    return peaks[1] / peaks[0]


def report_70b(rank_peak: float, publish_peak: float) -> None:
    """What the ratios mean for a 70B model on 64 GPUs with 8,192 trained tokens a rank: computed, in GB a rank."""
    shard = PARAMETERS_70B / GPUS / 1e9
    whole = PARAMETERS_70B * 4 / 1e9
    report_computed(
        "start_gb_70b_64_gpus", 4 * shard * rank_peak, "GB", f"a float32 shard, times the ratio; whole: {whole:.0f}"
    )
    report_computed("publish_gb_70b_64_gpus", 2 * shard * publish_peak, "GB", "a shard in bfloat16, times the ratio")
    export = 2 * VOCABULARY_70B * WIDTH_70B / 1e9
    report_computed("export_gb_70b_64_gpus", export, "GB", "the largest tensor in bfloat16; all at once: 140")
    at_once = BYTES_A_LOGIT * VOCABULARY_70B * 8192 / 1e9
    chunk = BYTES_A_LOGIT * CHUNK_LOGITS / 1e9
    report_computed(
        "logprob_gb_70b_64_gpus", chunk, "GB", f"a chunk, {BYTES_A_LOGIT} bytes a logit; whole: {at_once:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=400, help="of the model whose ranks are started, about")
    parser.add_argument("--only", choices=("memory", "tokens"), help="leave the others out")
    arguments = parser.parse_args()
    if arguments.only != "memory":
        from benchmarks.long_runs import report_long_runs
        from benchmarks.token_path import report_token_path

        report_token_path()
        report_long_runs()
    if arguments.only == "tokens":
        return
    peak = rank_peak_vs_shard(arguments.ranks, arguments.megabytes)
    report("rank_peak_vs_shard", peak, "ratio", 1.5)
    report("context_parallel_peak_vs_1", context_parallel_peak_vs_1(), "ratio", 0.6)
    export, published = leaving(arguments.megabytes)
    report("export_peak_vs_model", export, "ratio", 0.2)
    report("publish_peak_vs_version", published, "ratio", 1.2)
    report("logprob_peak_bytes_vs_vocab", growth(2**15, 2**17, CHUNK_LOGITS), "ratio", 1.2)
    report("logprob_peak_bytes_whole_vs_vocab", growth(2**13, 2**15, 2**40), "ratio")
    report_70b(peak, published)


if __name__ == "__main__":
    main()
