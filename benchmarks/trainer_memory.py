"""Peak memory of the ranks of a trainer: at their start, between two passes, and when weights are published or
exported.

- `rank_peak_vs_shard`: peak of a rank at its start, divided by the bytes of the parameters that it then holds.
- `fsdp_kept_vs_weights`: share of the layers' bfloat16 weights, which two ranks gather, that is kept from the forward
  to the backward pass.
- `logprob_peak_bytes_vs_vocab`: peak of logprobs and their gradients, forward and backward, with a vocabulary of 128k
  divided by that with 32k.
- `context_parallel_peak_vs_1`: peak of the forward and backward pass of one long row on the worse of two ranks that
  share its tokens, divided by the peak of a single rank.
- `export_peak_vs_model`: peak of an export in bfloat16, divided by the bytes that it writes.
- `publish_peak_vs_version`: the same for publishing a version, which is itself in memory then.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired import report, report_computed
from benchmarks.peaks import CONTEXT, in_its_own_process, peak_of
from titan_rl.training.choices import DType
from titan_rl.training.selected_logprobs import CHUNK_LOGITS, selected_logprobs
from titan_rl.training.settings import ModelConfig, TrainingConfig

TOKENS, WIDTH = 4096, 64
LONG_ROW, SHORT_ROW = 4096, 80  # the latter is no weight's shape

PARAMETERS_70B, LAYERS_70B, VOCABULARY_70B, WIDTH_70B, GPUS = 70e9, 80, 128_256, 8_192, 64
ROW_70B, CONTEXT_RANKS_70B = 131_072, 8
BYTES_A_LOGIT = 14
"""Bytes per logit for logprobs and gradients: logits in bfloat16 and float32, their softmax, and both gradients."""


def join_world(rank: int, port: int, **parallel: int) -> Any:
    from titan_rl.training.parallel import World

    importlib.import_module("titan_rl.training.parallel")  # has torch know the backends of meshes
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(math.prod(parallel.values())))
    world = World.join(**parallel)
    world.barrier()
    return world


def on_ranks(work: Callable[[Path, int, int, int], Any], folder: Path, ranks: int) -> list[Any]:
    """Results of a function on each rank, called with the rank, the number of ranks and a port for the rendezvous."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with ProcessPoolExecutor(ranks, mp_context=CONTEXT) as pool:
        started = [pool.submit(work, folder, rank, ranks, port) for rank in range(ranks)]
        return [each.result(timeout=300) for each in started]


def make_model(folder: Path, megabytes: int, width: int = 512, kv_heads: int = 8) -> None:
    """Create a model of equal layers, in float32."""
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


def start_rank(folder: Path, rank: int, ranks: int, port: int) -> tuple[int, int]:
    """(Peak of making a policy, bytes of its parameters on this rank)."""
    from titan_rl.training.parallel import local
    from titan_rl.training.policy import Policy

    world = join_world(rank, port, data_parallel=ranks)
    model, training = ModelConfig(path=str(folder), max_context=128), TrainingConfig(row_tokens=128)
    peak, policy = peak_of(lambda: Policy(model, training, world))
    held = sum(local(parameter).untyped_storage().nbytes() for parameter in policy.model.parameters())
    world.barrier()
    return peak, held


def start_whole(folder: Path) -> int:
    """Peak of a rank that builds the whole model and reads the whole folder, before it keeps its part."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    def start() -> None:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        model.load_state_dict({name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()})

    return peak_of(start)[0]


def report_start(folder: Path, ranks: int) -> None:
    started = on_ranks(start_rank, folder, ranks)
    ratio = max(peak / held for peak, held in started)
    whole = in_its_own_process(start_whole, folder) / max(held for _, held in started)
    report("rank_peak_vs_shard", ratio, "ratio", 1.5, (whole, "the whole model built and read on each rank"))
    shard, of_all = 4 * PARAMETERS_70B / GPUS / 1e9, 4 * PARAMETERS_70B / 1e9
    before = f"{of_all:.0f} for the model, and as much again for what is read of it"
    report_computed("start_gb_70b_64_gpus", shard * ratio, "GB", f"a float32 shard, times the ratio; before: {before}")


def kept_by_policy(folder: Path, rank: int, ranks: int, port: int) -> float:
    return _kept(folder, join_world(rank, port, data_parallel=ranks), "bfloat16")


def kept_under_autocast(folder: Path, rank: int, ranks: int, port: int) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        return _kept(folder, join_world(rank, port, data_parallel=ranks), "float32")


def _kept(folder: Path, world: Any, dtype: DType) -> float:
    """Share of the layers' weights that is kept for the backward pass in bfloat16."""
    from titan_rl.training.policy import Policy

    model = ModelConfig(path=str(folder), max_context=128, dtype=dtype)
    policy = Policy(model, TrainingConfig(row_tokens=SHORT_ROW), world)
    weights = [parameter for parameter in policy.model.layers.parameters() if parameter.ndim == 2]
    shapes = {tuple(parameter.shape) for parameter in weights}
    saved: list[torch.UntypedStorage] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape)[::-1]} & shapes:
            saved.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_N, _ = policy.logprobs(_row(policy, SHORT_ROW - 1))
    kept = {storage.data_ptr(): storage.nbytes() for storage in saved}  # without freed storages
    logprobs_N.sum().backward()
    world.barrier()
    return sum(kept.values()) / (2 * sum(parameter.numel() for parameter in weights))


def report_kept(folder: Path) -> None:
    kept, before = (max(on_ranks(way, folder, 2)) for way in (kept_by_policy, kept_under_autocast))
    report("fsdp_kept_vs_weights", kept, "ratio", 0.05, (before, "parameters gathered in float32, under autocast"))
    whole = 2 * PARAMETERS_70B / 1e9
    gathered = 2 * whole / LAYERS_70B
    told = f"what is kept, and two layers that are gathered; before: {before * whole + 2 * gathered:.0f}"
    report_computed("fsdp_gb_70b_64_gpus", kept * whole + gathered, "GB", told)


def _row(policy: Any, num_tokens: int) -> Any:
    """One row of one sample, as tensors."""
    from titan_rl.training.data.packing import Family
    from titan_rl.training.data.sample import TrainingSample
    from titan_rl.training.tensor_batch import make_tensor_batch

    tokens, mask, blank, versions = [1] * num_tokens, [True] * num_tokens, [0.0] * num_tokens, [0] * num_tokens
    sample = TrainingSample("", "", tokens, mask, blank, blank, versions, temperature=1.0)
    return make_tensor_batch([[Family((sample,))]], policy.device, policy.lay_out)


def row_peak(folder: Path, rank: int, ranks: int, port: int) -> int:
    """Peak of a forward and backward pass, including gradients."""
    from titan_rl.training.policy import Policy

    world = join_world(rank, port, context_parallel=ranks)
    policy = Policy(ModelConfig(path=str(folder), max_context=LONG_ROW), TrainingConfig(row_tokens=LONG_ROW), world)
    batch = _row(policy, LONG_ROW)
    peak, _ = peak_of(lambda: policy.logprobs(batch)[0].sum().backward())
    world.barrier()
    return peak


def report_long_row() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_its_own_process(make_model, Path(folder), 17, 256, 1)  # next to which a row's activations are large
        alone, shared = (max(on_ranks(row_peak, Path(folder), ranks)) for ranks in (1, 2))
    report("context_parallel_peak_vs_1", shared / alone, "ratio", 0.6, (1.0, "one rank with all of the row"))
    row = 2 * WIDTH_70B * LAYERS_70B * ROW_70B / 1e9
    told = f"what each layer begins with, of {ROW_70B:,} tokens on {CONTEXT_RANKS_70B} ranks; before: {row:.0f}"
    report_computed("row_gb_70b_64_gpus", row / CONTEXT_RANKS_70B, "GB", told)


def leaving_peaks(folder: Path) -> tuple[list[int], int]:
    """(Peaks of an export, of one from a whole copy, of publishing a version, of one from a whole copy; its bytes)."""
    from safetensors.torch import save_file

    from titan_rl.training.publishing import WeightPublisher
    from titan_rl.training.settings import ModelConfig, TrainingConfig
    from titan_rl.training.trainer import TrainerCore
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    trainer = TrainerCore(ModelConfig(path=str(folder), dtype="bfloat16"), TrainingConfig(), seed=0)
    export, _ = peak_of(lambda: trainer.export_hf(folder / "export"))
    export_whole, _ = peak_of(lambda: save_file(dict(trainer.named_tensors()), folder / "whole.safetensors"))
    publisher = WeightPublisher(trainer, SharedMemoryTransport("benchmark"), num_probes=0)
    published, manifest = peak_of(publisher.publish)
    publisher.close()
    other = SharedMemoryTransport("whole")
    published_whole, _ = peak_of(lambda: other.publish(0, list(trainer.named_tensors())))
    other.close()
    return [export, export_whole, published, published_whole], manifest.shards[0].num_bytes


def report_leaving(folder: Path) -> None:
    peaks, num_bytes = in_its_own_process(leaving_peaks, folder)
    export, export_whole, published, published_whole = (peak / num_bytes for peak in peaks)
    report("export_peak_vs_model", export, "ratio", 0.2, (export_whole, "all tensors converted first"))
    report("publish_peak_vs_version", published, "ratio", 1.2, (published_whole, "all tensors converted first"))
    largest = 2 * VOCABULARY_70B * WIDTH_70B / 1e9
    before = 2 * PARAMETERS_70B / 1e9
    report_computed("export_gb_70b_64_gpus", largest, "GB", f"the largest tensor in bfloat16; before: {before:.0f}")
    shard = 2 * PARAMETERS_70B / GPUS / 1e9
    told = f"a shard in bfloat16, times the ratio; before: {shard * published_whole:.1f}"
    report_computed("publish_gb_70b_64_gpus", shard * published, "GB", told)


def scoring_peak(vocabulary: int, chunk_logits: int) -> int:
    """Peak bytes of scoring and its backward pass, including the gradients."""
    hidden_ND = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight_VD = torch.randn(vocabulary, WIDTH, requires_grad=True)
    targets_N, temperatures_N = torch.arange(TOKENS), torch.ones(TOKENS)

    def score() -> None:
        scored = selected_logprobs(hidden_ND, weight_VD, targets_N, temperatures_N, chunk_logits=chunk_logits)
        scored[0].sum().backward()

    return peak_of(score)[0]


def report_scoring() -> None:
    def growth(small: int, large: int, chunk_logits: int) -> float:
        first, second = (in_its_own_process(scoring_peak, size, chunk_logits) for size in (small, large))
        return second / first

    ratio, whole = growth(2**15, 2**17, CHUNK_LOGITS), growth(2**13, 2**15, 2**40)
    report("logprob_peak_bytes_vs_vocab", ratio, "ratio", 1.2, (whole, "all logits at once, 32k over 8k"))
    at_once = BYTES_A_LOGIT * VOCABULARY_70B * 8192 / 1e9
    told = f"a chunk, {BYTES_A_LOGIT} bytes a logit; before: {at_once:.1f} for 8,192 trained tokens"
    report_computed("logprob_gb_70b_64_gpus", BYTES_A_LOGIT * CHUNK_LOGITS / 1e9, "GB", told)


def report_trainer_memory(ranks: int, megabytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_its_own_process(make_model, Path(folder), megabytes)
        report_start(Path(folder), ranks)
        report_leaving(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        in_its_own_process(make_model, Path(folder), megabytes // 8)
        report_kept(Path(folder))
    report_scoring()
    report_long_row()
