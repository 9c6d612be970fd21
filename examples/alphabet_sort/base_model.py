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
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.alphabet_sort.data import Sample, tagged
from examples.alphabet_sort.env import prompt, tag
from examples.alphabet_sort.tokenizer import MAX_CONTEXT, build_tokenizer
from titan_rl import Message
from titan_rl.config.load import load_config
from titan_rl.rollout.task import Task

DATA_SEED = 1_000_000  # apart from the seeds that runs use
IGNORED = -100
MICRO_BATCH = 16


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.9M parameters."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=False,  # vLLM on CPU serves stale tied weights after a swap
        **ids,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


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


def encode(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
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


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Padded on the right, which causal attention never sees.  # [num_rows, longest]"""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    *,
    steps: int,
    right_steps: int,
    batch_size: int,
    lr: float,
    shuffled: float,
    seed: int,
) -> float:
    """AdamW with warmup and cosine decay to a tenth.

    Args:
        batch_size: conversations a step.
        shuffled: share of answers in random order, once `right_steps` steps are done.

    Returns:
        The mean loss of the last 50 steps.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    losses: list[float] = []
    model.train()
    for step in range(steps):
        samples = [task.train_sample(DATA_SEED + seed, step * batch_size + row) for row in range(batch_size)]
        share = shuffled if step >= right_steps else 0.0
        rows = [encode(tokenizer, demonstrate(sample, rng, share)) for sample in samples]
        rows.sort(key=lambda row: len(row[0]))  # rows of like length share a micro-batch, so little is padded
        learned = sum(label != IGNORED for _, labels in rows for label in labels)
        losses.append(0.0)
        for start in range(0, batch_size, MICRO_BATCH):
            micro_batch = rows[start : start + MICRO_BATCH]
            ids_BT = padded([ids for ids, _ in micro_batch], 0)
            labels_BT = padded([labels for _, labels in micro_batch], IGNORED)
            logits_BTV = model(ids_BT).logits
            loss = (
                cross_entropy(
                    logits_BTV[:, :-1].flatten(0, 1),
                    labels_BT[:, 1:].flatten(),
                    ignore_index=IGNORED,
                    reduction="sum",
                )
                / learned
            )
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:5d}  loss {sum(losses[-50:]) / 50:.4f}", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


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
    task = load_config(Path(__file__).parent / "cpu.toml", check_files=False).task
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    started = time.monotonic()
    loss = train(
        model,
        tokenizer,
        task,
        steps=args.steps,
        right_steps=args.right_steps,
        batch_size=args.batch_size,
        lr=args.lr,
        shuffled=args.shuffled,
        seed=args.seed,
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    seconds = round(time.monotonic() - started)
    print(json.dumps({"parameters": model.num_parameters(), "loss": round(loss, 4), "seconds": seconds}))


if __name__ == "__main__":
    main()
