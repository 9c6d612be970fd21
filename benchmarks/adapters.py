"""LoRA adapters: bytes, decoding speed, stalls of swaps, wrong adapters, and the trainer's memory and time.

    python -m benchmarks.adapters [--rounds 8] [--tries 100] [--seeds 5]
                                  [--only bytes decode swap wrong trainer evaluation reward]

- adapter_bytes_vs_formula: bytes of a published version, over the sum of rank x (in + out) x bytes per element.
- lora_decode_vs_base: tokens per second of an engine with an adapter of rank 8, over those of an engine without one, in
  turns; `before` is the figure with vLLM's own kernels.
- lora_swap_stall_vs_reload: seconds of loading a version and reading it back, over vLLM's own reload of a folder
  (`add_lora` with `load_inplace`).
- wrong_adapters_caught: share of faulty loads that the probes or reading back reject, in float32 and bfloat16:
  withheld, applied twice, one layer missing, the previous version, permuted query and key rows. Every correct load must
  pass.
- lora_trainer_peak_vs_full and lora_step_vs_full: memory and seconds of an optimizer step with an adapter of rank 8,
  over those of training all weights. The model has 30M parameters.
- steps_per_hour_with_evaluation: steps per hour of alphabet-sort at rank 1 and staleness 1 with a validation every 5
  steps beside training, over those without. A validation has a twentieth of the rollouts of 5 steps, because on these
  cores everything that generates takes time from training. `before` is the figure when training waits.
- adapter_reward_vs_full: mean reward of alphabet-sort in the last validation at rank 1 over the seeds, over that of
  training all weights; and the same at rank 8.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.paired import Spread, report
from benchmarks.peaks import in_its_own_process, peak_of
from titan_rl.core.errors import VerificationError
from titan_rl.generation.engine import AdapterSpec, EngineSpec
from titan_rl.generation.request import EngineRequest
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import TARGETS, ModelConfig, TrainingConfig
from titan_rl.types import SamplingParams

RANK, REQUESTS, TOKENS = 8, 32, 96
SPEC = AdapterSpec(RANK, 32.0, TARGETS)
PARTS = ("bytes", "decode", "swap", "wrong", "trainer", "evaluation", "reward")
FAULTS = ("withheld", "applied_twice", "layer_missing", "previous", "permuted")
DTYPES = ("float32", "bfloat16")
TRIES_OF_A_RUN = 20


def make_model(folder: Path, *, width: int = 128, layers: int = 4) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=550,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_trainer(folder: Path, *, rank: int = RANK, dtype: str = "float32", lr: float = 3e-3, seed: int = 0) -> Any:
    from titan_rl.training.trainer import TrainerCore

    training = TrainingConfig.model_validate({"adapter": {"rank": rank}, "steps": 10_000, "lr": lr})
    return TrainerCore(ModelConfig.model_validate({"path": str(folder), "dtype": dtype}), training, seed=seed)


def samples(seed: int, count: int = 8, length: int = 40) -> list[TrainingSample]:
    chance = random.Random(seed)
    found: list[TrainingSample] = []
    for number in range(count):
        ids = [chance.randrange(550) for _ in range(length)]
        mask = [False] * 4 + [True] * (length - 4)
        advantages = [chance.choice((-1.0, 1.0)) if trained else 0.0 for trained in mask]
        logprobs = [-6.3 if trained else 0.0 for trained in mask]
        found.append(TrainingSample("g", f"g/{number}", ids, mask, logprobs, advantages, [0] * length, temperature=1.0))
    return found


def make_engine(folder: Path, dtype: str = "float32", adapter: AdapterSpec | None = SPEC) -> Any:
    from titan_rl.generation.vllm_engine import VLLMEngine

    adapters = {} if adapter is None else {"": adapter}
    spec = EngineSpec(str(folder), dtype=dtype, max_context=256, max_running=64, kv_cache_gib=0.2, adapters=adapters)
    return VLLMEngine(spec)


@contextmanager
def publishing(trainer: Any) -> Iterator[tuple[Any, Any]]:
    from titan_rl.training.publishing import WeightPublisher
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    with SharedMemoryTransport(f"adapters-{os.getpid()}") as transport:
        yield WeightPublisher(trainer, transport), transport


def bytes_vs_formula(folder: Path) -> None:
    for rank in (1, 8):
        with publishing(make_trainer(folder, rank=rank)) as (publisher, _):
            manifest = publisher.publish()
        published = sum(entry.num_bytes for shard in manifest.shards for entry in shard.entries)
        width, heads, kv = 128, 128, 64
        attention = 2 * (width + heads) + 2 * (width + kv)
        formula = 4 * 4 * rank * (attention + 3 * (width + 3 * width))
        report(f"adapter_bytes_vs_formula_rank_{rank}", published / formula, "ratio", 1.0)


def decode_seconds(engine: Any, turn: int) -> float:
    for number in range(REQUESTS):
        sampling = SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS)
        engine.add(EngineRequest(f"{turn}-{number}", [5 + number, 6, 7], sampling))
    began, left = time.perf_counter(), REQUESTS
    while left:
        left -= sum(delta.finish_reason is not None for delta in engine.step())
    return time.perf_counter() - began


def decode(folder: Path, rounds: int) -> None:
    """Engines take turns in one process, so that a drift of the machine affects all."""
    from titan_rl.generation import vllm_adapters

    engines = {"base": make_engine(folder, adapter=None), "grouped": make_engine(folder)}
    grouping, vllm_adapters.prepare_cpu_adapters = vllm_adapters.prepare_cpu_adapters, lambda: None
    from vllm.platforms import current_platform

    own = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: own)  # pyright: ignore[reportAttributeAccessIssue]
    engines["vllm"] = make_engine(folder)
    vllm_adapters.prepare_cpu_adapters = grouping
    trainer = make_trainer(folder)
    trainer.step(samples(0))
    for name in ("grouped", "vllm"):
        engines[name].load_state_dict(((key, each.tensor) for key, each in trainer.held_slices()), 1)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, rounds):
        for name in list(engines) + list(reversed(engines)):
            seconds = decode_seconds(engines[name], turn)
            if turn >= 0:
                found[name].append(seconds)
    ratios = {
        name: Spread([base / other for base, other in zip(found["base"], found[name], strict=True)])
        for name in ("grouped", "vllm")
    }
    report("lora_decode_vs_base", ratios["grouped"], "ratio", 0.9, (ratios["vllm"].median, "vLLM's own kernels"))


def swap(folder: Path, rounds: int) -> None:
    from titan_rl.generation.types import compare, read_back
    from titan_rl.generation.vllm_adapters import request_of
    from titan_rl.weights.verification import published_checksums

    engine, trainer = make_engine(folder), make_trainer(folder)
    stalls: list[float] = []
    reloads: list[float] = []
    with publishing(trainer) as (publisher, transport), tempfile.TemporaryDirectory() as place:
        trainer.adapter.write_peft(Path(place) / "adapter", base=str(folder))
        request = request_of(1)
        request.lora_path, request.load_inplace = str(Path(place) / "adapter"), True
        for number in range(4):
            engine.add(EngineRequest(str(number), [5, 6, 7], SamplingParams(max_tokens=200, min_tokens=200)))
        for turn in range(4 * rounds + 4):
            trainer.step(samples(turn))
            manifest = publisher.publish()
            sums, items = published_checksums(manifest), list(transport.pull(manifest))
            engine.step()
            began = time.perf_counter()
            engine.load_state_dict(items, manifest.version)
            compare(sums, [read_back(engine, sums)], manifest.version)
            stall = time.perf_counter() - began
            engine.step()
            began = time.perf_counter()
            engine._core.add_lora(request)
            if turn >= 4:
                stalls.append(stall)
                reloads.append(time.perf_counter() - began)
    found = Spread([stall / reload for stall, reload in zip(stalls, reloads, strict=True)])
    report("lora_swap_stall_vs_reload", found, "ratio, at most", 1.2)


Tensors = Mapping[str, torch.Tensor]


def faulty(fault: str, new: Tensors, old: Tensors, chance: random.Random) -> Tensors:
    """The tensors that an engine would have loaded."""
    if fault in ("withheld", "previous"):
        return old
    if fault == "applied_twice":
        return {name: 2 * each if "lora_B" in name else each for name, each in new.items()}
    if fault == "layer_missing":
        layer = chance.choice(sorted({name.rpartition(".lora_")[0] for name in new}))
        return {name: each for name, each in new.items() if not name.startswith(f"{layer}.")}
    swapped = dict(new)
    for name, each in new.items():
        if "q_proj.lora_B" in name or "k_proj.lora_B" in name:
            swapped[name] = each.view(-1, 2, 16, each.shape[1]).flip(1).reshape(each.shape)
    return swapped


def wrong(folder: Path, dtype: str, tries: int) -> dict[str, tuple[int, int]]:
    """Numbers of caught faults by kind: by the probes alone, and by the probes or reading back.

    Rewards are random, so a policy degrades quickly; therefore each run has only `TRIES_OF_A_RUN` versions.
    """
    engine, chance = make_engine(folder, dtype), random.Random(0)
    caught: dict[str, tuple[int, int]] = dict.fromkeys(FAULTS, (0, 0))
    for seed, start in enumerate(range(0, tries, TRIES_OF_A_RUN)):
        trainer = make_trainer(folder, dtype=dtype, seed=seed)
        found = wrong_in_a_run(engine, trainer, min(TRIES_OF_A_RUN, tries - start), chance)
        caught = {fault: (caught[fault][0] + by, caught[fault][1] + all_) for fault, (by, all_) in found.items()}
    return caught


def wrong_in_a_run(engine: Any, trainer: Any, tries: int, chance: random.Random) -> dict[str, tuple[int, int]]:
    from titan_rl.generation.types import compare, read_back
    from titan_rl.weights.verification import SwapCheck, published_checksums

    caught: dict[str, tuple[int, int]] = dict.fromkeys(FAULTS, (0, 0))

    def complaint(manifest: Any, sums: Any, check: SwapCheck | None) -> str | None:
        try:
            if check is None:
                compare(sums, [read_back(engine, sums)], manifest.version)
            else:
                check.verify(manifest, engine.score)
        except VerificationError as error:
            return str(error)
        return None

    check, old = SwapCheck(), dict[str, torch.Tensor]()
    with publishing(trainer) as (publisher, transport):
        for turn in range(tries + 2):
            trainer.step(samples(chance.randrange(2**31)))
            manifest = publisher.publish()
            sums = published_checksums(manifest)
            new = {name: each.clone() for name, each in transport.pull(manifest)}
            for fault in FAULTS if turn > 1 else ():
                before = check._before, check._anchor
                engine.load_state_dict(faulty(fault, new, old, chance).items(), manifest.version)
                probes = complaint(manifest, sums, check) is not None
                held = complaint(manifest, sums, None) is not None
                check._before, check._anchor = before
                caught[fault] = caught[fault][0] + probes, caught[fault][1] + (probes or held)
            engine.load_state_dict(new.items(), manifest.version)
            if refused := complaint(manifest, sums, check) or complaint(manifest, sums, None):
                raise SystemExit(f"a correct load was refused in {trainer.dtype}: {refused}")
            old = new
    return caught


def trainer_figures(folder: str, rank: int, steps: int) -> tuple[int, float]:
    """Peak memory of building a trainer and some steps, in bytes, and the fastest step."""
    seconds: list[float] = []

    def work() -> None:
        trainer = make_trainer(Path(folder), rank=rank)
        for turn in range(steps):
            batch = samples(turn, count=8, length=64)
            began = time.perf_counter()
            trainer.step(batch)
            seconds.append(time.perf_counter() - began)

    peak, _ = peak_of(work)
    return peak, min(seconds)


def trainer(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), width=768, layers=4)
        peaks: list[float] = []
        steps: list[float] = []
        for _ in range(max(1, rounds // 4)):
            adapter = in_its_own_process(trainer_figures, folder, RANK, 6)
            full = in_its_own_process(trainer_figures, folder, 0, 6)
            peaks.append(adapter[0] / full[0])
            steps.append(adapter[1] / full[1])
    report("lora_trainer_peak_vs_full", Spread(peaks), "ratio, at most", 1.0)
    report("lora_step_vs_full", Spread(steps), "ratio, at most", 1.0)


def alphabet_sort(folder: Path, name: str, **options: Any) -> list[dict[str, float]]:
    """Train on alphabet-sort, and return the records of metrics.jsonl."""
    command = [sys.executable, "-m", "titan_rl.cli.main", "train", "examples/alphabet_sort/cpu.toml"]
    options = {"run_dir": folder, "name": name, **options}
    given = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    subprocess.run([*command, *given], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (run,) = folder.glob(f"*{name}*")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


EVERY = 5
EVALUATION = {
    "training.adapter.rank": 1,
    "generation.adapter_swap": "pinned",
    "scheduling.max_staleness": 1,
    "validation.num_prompts": 32,
    "validation.samples_per_prompt": 1,
}


def seconds_per_step(folder: Path, name: str, steps: int, **options: Any) -> float:
    """Seconds per step from the first validation between steps, which comes while engines warm up, to the last."""
    records = alphabet_sort(folder, name, **EVALUATION, **{"training.steps": steps}, **options)
    times = {record["step"]: record["time_s"] for record in records if "time/step_s" in record}
    return (times[steps - 1] - times[EVERY - 1]) / (steps - EVERY)


def evaluation(rounds: int, steps: int) -> None:
    """Runs without evaluation, with one beside training and with one that training waits for, in turns."""
    ways = {
        "none": {"validation.interval": 0},
        "beside": {"validation.interval": EVERY},
        "waits": {"validation.interval": EVERY, "validation.beside_training": "false"},
    }
    rates: dict[str, list[float]] = {"beside": [], "waits": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            order = list(ways) if turn % 2 == 0 else list(reversed(ways))
            taken = {way: seconds_per_step(Path(folder), f"{way}-{turn}", steps, **ways[way]) for way in order}
            for way, found in rates.items():
                found.append(taken["none"] / taken[way])
            print(json.dumps({"steps_per_hour": {way: round(3600 / seconds) for way, seconds in taken.items()}}))
    waits = Spread(rates["waits"]).median
    beside = Spread(rates["beside"])
    report("steps_per_hour_with_evaluation", beside, "ratio", 0.97, before=(waits, "training that waits"))


def reward_after(seed: int, rank: int, steps: int, folder: Path) -> float:
    options = {"seed": seed, "training.adapter.rank": rank, "training.steps": steps}
    records = alphabet_sort(folder, f"rank-{rank}-seed-{seed}", **options)
    return [line["validation/reward_mean"] for line in records if "validation/reward_mean" in line][-1]


def reward(seeds: int, steps: int) -> None:
    """Compare seed by seed, so that an interrupted benchmark has complete comparisons."""
    found: dict[int, list[float]] = {0: [], 1: [], 8: []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for rank, rewards in found.items():
                rewards.append(reward_after(seed, rank, steps, Path(folder)))
            print(json.dumps({"seed": seed, **{f"rank {rank}": rewards[-1] for rank, rewards in found.items()}}))
    for rank, rewards in found.items():
        error = stdev(rewards) / math.sqrt(seeds) if seeds > 1 else math.nan
        print(json.dumps({"rank": rank, "mean": fmean(rewards), "standard_error": error, "steps": steps}))
        if rank:
            name = "adapter_reward_vs_full" if rank == 1 else f"adapter_reward_vs_full_rank_{rank}"
            report(name, fmean(rewards) / fmean(found[0]), "ratio", 0.97)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80, help="of each run of the reward and of the evaluation")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = make_model(Path(place) / "model")
        if "bytes" in arguments.only:
            bytes_vs_formula(folder)
        if "decode" in arguments.only:
            in_its_own_process(decode, folder, arguments.rounds)
        if "swap" in arguments.only:
            in_its_own_process(swap, folder, arguments.rounds)
        if "wrong" in arguments.only:
            by_dtype = {dtype: in_its_own_process(wrong, folder, dtype, arguments.tries) for dtype in DTYPES}
            for dtype, caught in by_dtype.items():
                print(json.dumps({"dtype": dtype, "caught (by probes, in all)": caught, "tries": arguments.tries}))
            total = sum(found for caught in by_dtype.values() for _, found in caught.values())
            report("wrong_adapters_caught", total / (len(DTYPES) * len(FAULTS) * arguments.tries), "share", 1.0)
    if "trainer" in arguments.only:
        trainer(arguments.rounds)
    if "evaluation" in arguments.only:
        evaluation(arguments.rounds, arguments.steps)
    if "reward" in arguments.only:
        reward(arguments.seeds, arguments.steps)


if __name__ == "__main__":
    main()
