"""Train the base model: it knows the format of the conversations, and sorts only sometimes.

    python -m examples.alphabet_sort.base_model --out examples/alphabet_sort/base

Supervised learning, first on right demonstrations, then on imperfect ones of which a share lists the names in random
order. The first part brings the skill, the second has the model sort about as rarely as the demonstrations do, which
leaves the skill for reinforcement learning to bring out. The task's settings are those of `cpu.toml`, and only training
conversations are used, so the held-out lists stay unseen.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from examples.alphabet_sort.data import Sample, tagged
from examples.alphabet_sort.env import prompt, tag
from examples.alphabet_sort.tokenizer import build_tokenizer
from examples.tiny_model import IGNORED, Row, build_model, learn
from titan_rl import Message
from titan_rl.config.load import load_config
from titan_rl.rollout.task import Task

DATA_SEED = 1_000_000  # apart from the seeds that runs use


def demonstrate(sample: Sample, rng: random.Random, shuffled: float) -> list[Message]:
    """The conversation with answers of which the share `shuffled` is in random order."""
    messages: list[Message] = []
    for turn in range(len(sample.turns)):
        lines = sample.answer(turn)
        if rng.random() < shuffled:
            lines = tagged(rng.sample(names := sample.names(turn), len(names)), sample.new_names(turn))
        answer = "\n".join([f"<{tag(turn)}>", *lines, f"</{tag(turn)}>"])
        messages += [prompt(sample, turn), {"role": "assistant", "content": answer}]
    return messages


def encode(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> Row:
    """Token ids, and the same as labels, where all but the assistant's tokens are ignored.  # [num_tokens] each"""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
        body = tokenizer.encode(f"{message['content']}<|im_end|>")
        tail = tokenizer.encode("\n")
        ids += head + body + tail
        learned = body if message["role"] == "assistant" else [IGNORED] * len(body)
        labels += [IGNORED] * len(head) + learned + [IGNORED] * len(tail)
    return ids, labels


def rows_of(
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    *,
    right_steps: int,
    batch_size: int,
    shuffled: float,
    seed: int,
) -> Callable[[int], list[Row]]:
    """What to learn in a step.

    Args:
        batch_size: conversations a step.
        shuffled: share of answers in random order, once `right_steps` steps are done.
    """
    rng = random.Random(seed)

    def rows(step: int) -> list[Row]:
        samples = [task.train_sample(DATA_SEED + seed, step * batch_size + row) for row in range(batch_size)]
        share = shuffled if step >= right_steps else 0.0
        return [encode(tokenizer, demonstrate(sample, rng, share)) for sample in samples]

    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, in Hugging Face format")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--right-steps", type=int, default=1000, help="steps before the imperfect demonstrations")
    parser.add_argument("--batch-size", type=int, default=32, help="conversations a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--shuffled", type=float, default=0.7, help="share of answers in random order")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    task = load_config(Path(__file__).parent / "cpu.toml", check_files=False).tasks[0].task
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    started = time.monotonic()
    rows = rows_of(
        tokenizer,
        task,
        right_steps=args.right_steps,
        batch_size=args.batch_size,
        shuffled=args.shuffled,
        seed=args.seed,
    )
    loss = learn(model, rows, steps=args.steps, lr=args.lr)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    seconds = round(time.monotonic() - started)
    print(json.dumps({"parameters": model.num_parameters(), "loss": round(loss, 4), "seconds": seconds}))


if __name__ == "__main__":
    main()
