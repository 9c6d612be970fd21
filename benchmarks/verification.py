"""Detection of engines that hold wrong weights, and the cost of verification.

    python -m benchmarks.verification [--tries 100] [--kinds dense tied mixture] [--dtypes float32 bfloat16]
        [--width 128]

A trainer makes steps of AdamW at learning rates of 1e-6, 1e-5 and 1e-4, a third of the tries each, and publishes every
version. vLLM's engines load the previous version. Then the next one is loaded with one of these faults, which the
engine does not report, and read back as in a pull:

- nothing: the engine ignores the load;
- layer: one decoder layer keeps its old weights;
- lm_head: the output head keeps its old weights; for tied embeddings, the packed copy that computes logits;
- expert: one expert of one layer keeps its old weights (mixture);
- rank: of two tensor parallel ranks, one ignores the load;
- previous: the tensors loaded under the new version's name are those of the previous version.

After each fault the version is loaded correctly, and must pass. `verification_vs_load` is the processor time of
computing checksums while weights are packed and of reading back, divided by that of a load without either, with the
minimum of each; its name ends with the width. Most of the time of a load of the tiny models is vLLM's for each of
their 47 tensors; with `--width 1024`, that of copying and packing them. Probes are not run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

LRS = (1e-6, 1e-5, 1e-4)
FAULTS = ("nothing", "layer", "lm_head", "expert", "previous")
LAYERS, EXPERTS, VOCABULARY = 4, 8, 512
SPARE_STEPS = 4  # some change nothing in what a fault keeps
TARGET = 0.25


def make_model(folder: Path, kind: str, width: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind == "tied",
    }
    torch.manual_seed(0)
    if kind == "mixture":
        moe = {
            "moe_intermediate_size": 3 * width // 4,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **moe))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    return folder


@dataclass
class Chain:
    """Versions that were published one after the other."""

    lr: float
    tries: int
    manifests: list[Any]


def publish_chains(folder: Path, dtype: str, tries: int, root: Path, transports: list[Any]) -> list[Chain]:
    """Make the steps for a third of the tries at each learning rate. The versions live as long as the transports."""
    from titan_rl.training.data.sample import TrainingSample
    from titan_rl.training.publishing import WeightPublisher
    from titan_rl.training.settings import ModelConfig, TrainingConfig
    from titan_rl.training.trainer import TrainerCore
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    class Keeping(SharedMemoryTransport):
        def release(self, version: int) -> None:
            pass

    chance, chains, steps = random.Random(0), list[Chain](), tries // len(LRS) + SPARE_STEPS
    for lr in LRS:
        trainer = TrainerCore(
            ModelConfig.model_validate({"path": str(folder), "dtype": dtype}),
            TrainingConfig(steps=steps, lr=lr, warmup_steps=0),
            seed=0,
        )
        transports.append(transport := Keeping("verification", keep=steps + 2, root=root))
        publisher = WeightPublisher(trainer, transport, num_probes=0)
        manifests = [publisher.publish()]
        for step in range(steps):
            samples = []
            for index in range(4):
                ids = [chance.randrange(VOCABULARY) for _ in range(24)]
                mask, logprobs = [False] * 4 + [True] * 20, [0.0] * 4 + [-6.0] * 20
                advantages = [0.0] * 4 + [chance.choice((-1.0, 1.0))] * 20
                of = str(step), f"{step}/{index}"
                samples.append(TrainingSample(*of, ids, mask, logprobs, advantages, [step] * 24, temperature=1.0))
            trainer.step(samples)
            manifests.append(publisher.publish())
        chains.append(Chain(lr, tries // len(LRS) + (len(chains) < tries % len(LRS)), manifests))
    return chains


@dataclass
class Plan:
    """Work of one group of engines. It pickles."""

    folder: str
    kind: str
    dtype: str
    chains: list[Chain]
    out: str


def run_engines(plan: Plan) -> None:
    """Run one rank, which tries every fault on every pair of versions."""
    from titan_rl.core.errors import VerificationError
    from titan_rl.generation.engine import EngineSpec
    from titan_rl.generation.loop.calls import Weights
    from titan_rl.generation.loop.ranks import EngineRank, GlooRanks
    from titan_rl.generation.types import KVPolicy
    from titan_rl.generation.vllm_engine import VLLMEngine
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
    from titan_rl.weights.verification import published_checksums

    rank_number, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    chance = random.Random(1)  # the same on every rank

    class FaultyEngine(VLLMEngine):
        fault = ""
        old: dict[str, torch.Tensor]

        part = ""  # the part that keeps its old weights

        def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
            if self.fault == "nothing" or (self.fault == "rank" and rank_number == 1):
                return
            if self.fault == "lm_head" and self._tied:
                self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(items)})
                return
            if self.fault in ("layer", "lm_head", "expert", "previous"):
                items = [(name, self.old[name] if self.part in name else tensor) for name, tensor in items]
            super().load_state_dict(items, version)

    spec = EngineSpec(plan.folder, dtype=plan.dtype, max_context=64, kv_cache_gib=0.02, tensor_parallel_size=world)
    engine = FaultyEngine(spec)
    rank = EngineRank(lambda: engine, GlooRanks() if world > 1 else None, KVPolicy())
    rank.start()
    transport = SharedMemoryTransport("verification")
    if world > 1:
        faults: tuple[str, ...] = ("rank",)
    else:
        faults = tuple(fault for fault in FAULTS if fault != "expert" or plan.kind == "mixture")
    caught, tries, alarms, passes = dict.fromkeys(faults, 0), dict.fromkeys(faults, 0), 0, 0
    loads, readbacks = [], []

    def pull(manifest: Any, fault: str = "", old: Any = None) -> float:
        """Load and verify a version, and return the seconds of the load.

        Raises:
            VerificationError: the weights were found to be wrong.
        """
        weights = Weights(transport.pull(manifest), None, published_checksums(manifest))
        engine.fault = fault
        engine.old = dict(transport.pull(old)) if old is not None else {}
        began = time.thread_time()
        rank.load(weights, manifest.version)
        loaded = time.thread_time()
        readback = rank.read_back(weights, manifest.version)
        if readback is None or readback.unread:
            raise RuntimeError(f"not all could be read back: {readback}")
        readbacks.append(time.thread_time() - loaded)
        return loaded - began

    for chain in plan.chains:
        wanted = {fault: tries[fault] + chain.tries for fault in faults}
        for before, now in itertools.pairwise(chain.manifests):
            parts = changed_parts(before, now)
            for fault in faults:
                if not parts[fault] or tries[fault] == wanted[fault]:
                    continue
                engine.part = chance.choice(parts[fault])
                pull(before)
                tries[fault] += 1
                try:
                    pull(now, fault, before)
                except VerificationError:
                    caught[fault] += 1
                passes += 1
                try:
                    loads.append(pull(now))
                except VerificationError:
                    alarms += 1
    figures: dict[str, Any] = {"caught": caught, "tries": tries, "alarms": alarms, "passes": passes}
    if world == 1:
        figures["vs_load"] = cost(engine, plan, transport, readbacks)
    if rank_number == 0:
        Path(plan.out).write_bytes(pickle.dumps(figures))


def changed_parts(before: Any, now: Any) -> dict[str, list[str]]:
    """For each fault, the parts that can be wrong by keeping old weights: an expert without tokens does not change."""
    from titan_rl.weights.verification import published_checksums

    old, new = published_checksums(before), published_checksums(now)
    layers = [f"model.layers.{layer}." for layer in range(LAYERS)]
    head = ["lm_head."] if "lm_head.weight" in old else ["model.embed_tokens."]
    parts = {
        "nothing": [""],
        "previous": [""],
        "rank": [""],
        "layer": layers,
        "lm_head": head,
        "expert": [f"{layer}mlp.experts.{expert}." for layer in layers for expert in range(EXPERTS)],
    }
    return {
        fault: [part for part in each if any(part in name and old[name] != new[name] for name in old)]
        for fault, each in parts.items()
    }


def cost(engine: Any, plan: Plan, transport: Any, readbacks: list[float]) -> float:
    """Processor time of verification divided by that of the load."""
    from vllm.model_executor.layers import utils

    from titan_rl.generation.vllm_held_weights import pack

    noting: Any = utils.dispatch_cpu_unquantized_gemm
    engine.fault = ""
    manifest = plan.chains[0].manifests[0]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for index in range(80):
        utils.dispatch_cpu_unquantized_gemm = noting if index % 2 else pack
        items = transport.pull(manifest)
        began = time.thread_time()
        engine.load_state_dict(items, 0)
        seconds[bool(index % 2)].append(time.thread_time() - began)
    plain, noted = min(seconds[False]), min(seconds[True])  # other work on the machine only adds
    return (min(readbacks) + noted - plain) / plain


def measure(kind: str, dtype: str, tries: int, width: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Report the figures of one rank, and of two."""
    model, transports = make_model(folder / "model", kind, width), []
    try:
        chains = publish_chains(model, dtype, tries, folder, transports)
        for world in (1, 2):
            plan = Plan(str(model), kind, dtype, chains, str(folder / f"figures-{world}"))
            (folder / "plan").write_bytes(pickle.dumps(plan))
            port = str(random.randrange(20_000, 30_000))
            processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.verification", "--plan", str(folder / "plan")],
                    env=os.environ
                    | ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "RANK": str(rank),
                        "LOCAL_RANK": str(rank)} if world > 1 else {}),
                )
                for rank in range(world)
            ]  # fmt: skip
            try:
                codes = [process.wait(timeout=1800) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            if any(codes):
                raise SystemExit(f"engines of {kind}, {dtype} ended with {codes}")
            yield pickle.loads(Path(plan.out).read_bytes())
    finally:
        for transport in transports:
            transport.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=100, help="of each fault, of each kind and dtype")
    parser.add_argument("--kinds", nargs="+", default=["dense", "tied", "mixture"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--width", type=int, default=128, help="of the models")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        run_engines(pickle.loads(Path(options.plan).read_bytes()))
        return
    worst, alarms, passes, costs = 1.0, 0, 0, []
    for kind in options.kinds:
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="titan_rl-verification-") as folder:
                for figures in measure(kind, dtype, options.tries, options.width, Path(folder)):
                    for fault, tries in figures["tries"].items():
                        share = figures["caught"][fault] / tries
                        worst = min(worst, share)
                        print(f"  {kind}, {dtype}, {fault}: {figures['caught'][fault]} of {tries} caught", flush=True)
                    alarms, passes = alarms + figures["alarms"], passes + figures["passes"]
                    if "vs_load" in figures:
                        costs.append(figures["vs_load"])
                        print(f"  {kind}, {dtype}: verification_vs_load {costs[-1]:.3f}", flush=True)
    for name, value, target, unit in (
        ("wrong_weights_caught", worst, 1.0, "share"),
        ("right_weights_refused", alarms / passes, 0.0, "share"),
        (f"verification_vs_load_{options.width}", max(costs), TARGET, "ratio"),
    ):
        print(json.dumps({"name": name, "value": round(value, 3), "target": target, "unit": unit}))


if __name__ == "__main__":
    main()
