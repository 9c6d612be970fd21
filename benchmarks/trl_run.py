"""TRL's side of `benchmarks/vs_trl.py`, and the evaluation of both sides.

    python -m benchmarks.trl_run train SETTINGS.json      # prints the seconds at which each step ended
    python -m benchmarks.trl_run evaluate SETTINGS.json   # prints the held-out reward of each policy

Each prints a line of JSON. `train` is what a user of TRL would write (a dataset of chat prompts, a reward function,
`GRPOTrainer`), except for the weight sync of its vLLM mode: TRL 1.16 loads weights into vLLM's modules one by one,
which fails on a CPU, where vLLM packs them after loading. Here vLLM loads all of them again, as it does itself.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from benchmarks.vs_trl import GROUPS, SAVED_EVERY, SIBLINGS, SortLists
from examples.alphabet_sort.env import prompt
from examples.alphabet_sort.rubric import similarity

HELD_OUT, ANSWERS = 64, 4


class Stopwatch(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.seconds.append(time.monotonic() - self._began)


def reload_weights(generation: Any) -> None:
    weights = {name: parameter.data for name, parameter in generation.model.named_parameters()}
    if generation.model.config.tie_word_embeddings:
        weights["lm_head.weight"] = generation.model.get_input_embeddings().weight.data
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
    generation.llm.reset_prefix_cache()


def train(settings: dict[str, Any]) -> list[float]:
    VLLMGeneration.sync_weights = reload_weights  # pyright: ignore[reportAttributeAccessIssue]
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
            save_strategy="steps",
            save_steps=SAVED_EVERY,
            save_only_model=True,
            report_to="none",
            disable_tqdm=True,
            **settings["mode"],
        ),
    )
    trainer.train()
    if settings["steps"] % SAVED_EVERY:
        trainer.save_model(f"{settings['out']}/checkpoint-{settings['steps']}")
    return stopwatch.seconds


def evaluate(settings: dict[str, Any]) -> list[float]:
    """Mean reward of each policy on held-out prompts, at temperature 1, with the same random numbers."""
    task = SortLists(**settings["task"])
    samples = task.validation_samples(HELD_OUT)
    rewards: list[float] = []
    for policy in settings["policies"]:
        tokenizer: Any = AutoTokenizer.from_pretrained(settings["policies"][0], padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        chats = [[dict(prompt(sample, 0))] for sample in samples]
        asked = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        torch.manual_seed(0)
        with torch.inference_mode():
            answered = model.generate(
                **asked,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=ANSWERS,
                max_new_tokens=settings["max_tokens"],
                pad_token_id=tokenizer.pad_token_id,
            )
        texts = tokenizer.batch_decode(answered[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        earned = [similarity(samples[at // ANSWERS], 0, text) ** task.power for at, text in enumerate(texts)]
        rewards.append(fmean(earned))
    return rewards


def main() -> None:
    settings = json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps({"train": train, "evaluate": evaluate}[sys.argv[1]](settings)))


if __name__ == "__main__":
    main()
