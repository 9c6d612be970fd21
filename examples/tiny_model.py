"""A model of a million parameters, and its supervised training: how the base models of the examples are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

IGNORED = -100
MICRO_BATCH = 16

Row = tuple[list[int], list[int]]
"""Token ids, and the same as labels, where what is not learned is `IGNORED`.  # [num_tokens] each"""


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
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,  # vLLM on CPU serves stale tied weights after a swap
        **ids,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Padded on the right, which causal attention never sees.  # [num_rows, longest]"""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def learn(model: Qwen3ForCausalLM, rows_of: Callable[[int], list[Row]], *, steps: int, lr: float) -> float:
    """AdamW with warmup and cosine decay to a tenth.

    Args:
        rows_of: what to learn in a step.

    Returns:
        The mean loss of the last 50 steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    losses: list[float] = []
    model.train()
    for step in range(steps):
        rows = sorted(rows_of(step), key=lambda row: len(row[0]))  # of like length in a micro-batch: little is padded
        learned = sum(label != IGNORED for _, labels in rows for label in labels)
        losses.append(0.0)
        for start in range(0, len(rows), MICRO_BATCH):
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
