"""Model families: how many are proved, and the cost of transformers' implementation.

    python -m benchmarks.models [--rounds 5] [--only proved|step|mixture] [--profile]

`families_proved` counts the families of which `make test-models` has recorded no failed check, in no variant.
`transformers_step_vs_torchtitan` compares a step of a Qwen3 of 5M parameters, with 128 answers to 16 prompts, in the
two implementations. `mixture_step_128_vs_8` compares a mixture of 128 experts with one of 8 of the same size, of which
each token takes 4, in transformers' implementation: the time of a step's forward and backward passes per token.
`mixture_optimizer_128_vs_8` is the time of its optimizer, whose work grows with all experts and not with the tokens.

Times are processor times of the trainer's thread, with one thread for torch; ratios are medians of rounds, in which
each takes a turn. Prints one JSON object per line. With `--profile` also the time of torch's operators.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.paired import Spread, report
from titan_rl.training.choices import Implementation
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

RESULTS = Path(__file__).parents[1] / "tests" / "models" / "results.json"
VOCABULARY = 2048
GROUPS, SIBLINGS, PROMPT, ANSWER = 16, 8, 32, 32


def count_proved(results: Mapping[str, Mapping[str, str]]) -> int:
    """Number of families without a failed check.

    Args:
        results: "yes", "no" or "-" by row and check. Rows are families, with a variant after a comma.
    """
    failed = {name.partition(",")[0] for name, by_check in results.items() if "no" in by_check.values()}
    return len({name.partition(",")[0] for name in results} - failed)


def answers() -> list[TrainingSample]:
    """Answers of about 32 tokens to prompts of 32 that siblings share."""
    rng = random.Random(0)
    samples: list[TrainingSample] = []
    for group in range(GROUPS):
        prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT)]
        for sibling in range(SIBLINGS):
            length = rng.randint(ANSWER // 2, ANSWER * 3 // 2)
            tokens = [*prompt, *(rng.randrange(VOCABULARY) for _ in range(length))]
            mask = [position >= PROMPT for position in range(len(tokens))]
            logprobs = [-7.6 if trained else 0.0 for trained in mask]
            advantages = [rng.uniform(-1, 1) if trained else 0.0 for trained in mask]
            versions = [0 if trained else -1 for trained in mask]
            samples.append(
                TrainingSample(f"g{group}", f"g{group}/{sibling}", tokens, mask, logprobs, advantages, versions, 1.0)
            )
    return samples


def write_model(model_type: str, folder: Path, **fields: Any) -> Path:
    """Write a model with random weights and the sizes of the benchmark."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 1024,
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | fields)).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


class TimedTrainer:
    """A trainer with the processor time of its last step, in all and of its optimizer."""

    def __init__(self, folder: Path, implementation: Implementation) -> None:
        model = ModelConfig(path=str(folder), max_context=256, implementation=implementation)
        self._core = TrainerCore(model, TrainingConfig(steps=10_000, lr=1e-6), seed=0)
        self._samples = answers()
        self.optimizer_s = 0.0
        optimizers = self._core._optimizers
        optimizers.step = self._timed(optimizers.step)
        for _ in range(2):
            self.step()

    def step(self) -> float:
        """Seconds of a step."""
        began = time.thread_time()
        self._core.step(self._samples)
        return time.thread_time() - began

    def passes(self) -> float:
        """Seconds of a step without its optimizer."""
        return self.step() - self.optimizer_s

    def profile(self) -> str:
        """Time of torch's operators in a step."""
        with torch.profiler.profile() as profile:
            self.step()
        return profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.optimizer_s = time.thread_time() - began

        return timed


def compare_implementations(rounds: int, folder: Path, *, profile: bool) -> None:
    """Report `transformers_step_vs_torchtitan`."""
    write_model("qwen3", folder)
    ours, theirs = TimedTrainer(folder, "transformers"), TimedTrainer(folder, "torchtitan")
    pairs = [(ours.step(), theirs.step()) for _ in range(rounds)]
    report("transformers_step_vs_torchtitan", Spread([own / other for own, other in pairs]), "ratio", 1.1)
    report("torchtitan_step_s", Spread([other for _, other in pairs]), "s")
    if profile:
        print(ours.profile(), theirs.profile(), sep="\n")


def compare_mixtures(rounds: int, folder: Path, *, profile: bool) -> None:
    """Report `mixture_step_128_vs_8` and `mixture_optimizer_128_vs_8`."""
    trainers: list[TimedTrainer] = []
    for count in (128, 8):
        sizes = {"num_experts": count, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "num_hidden_layers": 4}
        write_model("qwen3_moe", folder / str(count), norm_topk_prob=True, **sizes)
        trainers.append(TimedTrainer(folder / str(count), "transformers"))
    many, few = trainers
    passes: list[float] = []
    optimizers: list[float] = []
    for _ in range(rounds):
        passes.append(many.passes() / few.passes())
        optimizers.append(many.optimizer_s / few.optimizer_s)
    report("mixture_step_128_vs_8", Spread(passes), "ratio", 1.15)
    report("mixture_optimizer_128_vs_8", Spread(optimizers), "ratio")
    if profile:
        print(many.profile(), few.profile(), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("proved", "step", "mixture"), help="leave the others out")
    parser.add_argument("--profile", action="store_true", help="also print what torch's operators take")
    arguments = parser.parse_args()
    if arguments.only in (None, "proved"):
        report("families_proved", count_proved(json.loads(RESULTS.read_text())), "families", 25)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only in (None, "step"):
            compare_implementations(arguments.rounds, Path(folder) / "dense", profile=arguments.profile)
        if arguments.only in (None, "mixture"):
            compare_mixtures(arguments.rounds, Path(folder), profile=arguments.profile)


if __name__ == "__main__":
    main()
