"""The TRL half of `benchmarks/vs_trl.py`, run by the interpreter of TRL's own environment.

    python -m benchmarks.trl_run SETTINGS.json     # prints a JSON line: [[reward, seconds since the start], ...] a step

Everything here is what a user of TRL would write: a dataset of chat prompts, a reward function, `GRPOTrainer`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.vs_trl import GROUPS, SIBLINGS, SortLists
from examples.alphabet_sort.env import prompt
from examples.alphabet_sort.rubric import similarity


class Stopwatch(TrainerCallback):
    def __init__(self) -> None:
        self.curve: list[tuple[float, float]] = []
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.curve.append((logs["reward"], time.monotonic() - self._began))


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    task = SortLists(**settings["task"])
    samples = [task.train_sample(settings["seed"], index) for index in range(settings["steps"] * GROUPS)]

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float | None]:
        texts = [completion[0]["content"] for completion in completions]
        return [similarity(samples[at], 0, text) ** task.power for at, text in zip(index, texts, strict=True)]

    stopwatch = Stopwatch()
    trainer = GRPOTrainer(
        model=settings["base"],
        reward_funcs=reward,
        train_dataset=Dataset.from_dict(
            {"prompt": [[dict(prompt(sample, 0))] for sample in samples], "index": list(range(len(samples)))}
        ),
        callbacks=[stopwatch],
        args=GRPOConfig(
            output_dir=settings["out"],
            seed=settings["seed"],
            use_cpu=True,
            bf16=False,
            max_steps=settings["steps"],
            per_device_train_batch_size=GROUPS * SIBLINGS,
            num_generations=SIBLINGS,
            shuffle_dataset=False,
            max_completion_length=settings["max_tokens"],
            temperature=1.0,
            top_k=0,
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            scale_rewards="group",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    print(json.dumps(stopwatch.curve))


if __name__ == "__main__":
    main()
