"""Plan of a supervised run: its demonstrations, their batches, its initial model, and the settings of its trainer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from titan_rl.config.build import make_renderer
from titan_rl.config.conflicts import reset_without_effect
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.renderer.types import renderable
from titan_rl.run.sft.demonstrations import Found, TokenSource, best_rollouts, read_chats, task_demonstrations
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.training.tiny_model import make_tiny_model

WARMUP_SHARE = 0.05
"""Share of the steps over which the learning rate rises."""

HELD_OUT_SHARE = 10
"""One of this many demonstrations is held out, at most."""


def hold_out(count: int, most: int, seed: int) -> tuple[list[int], list[int]]:
    """Split demonstrations into learned and held-out ones, each in order.

    Args:
        count: Number of demonstrations.
        most: Largest number that is held out.
    """
    held = set(random.Random(f"{seed}/held out").sample(range(count), min(most, count // HELD_OUT_SHARE)))
    return [at for at in range(count) if at not in held], sorted(held)


def batches(
    items: Sequence[int],
    *,
    batch_size: int,
    steps: int | None,
    epochs: int,
    shuffle: bool,
    seed: int,
    lengths: Sequence[int] | None = None,
    batch_tokens: int = 0,
) -> list[list[int]]:
    """Divide demonstrations into the batches of steps. Equal arguments give equal batches.

    Args:
        items: Items of one epoch, in the order of their source.
        batch_size: Items in one step. If there are fewer, an item is repeated.
        steps: Number of steps, over as many epochs as needed. None: `epochs`, whose last step may have fewer items.
        lengths: Tokens of each item. Steps are then limited by `batch_tokens` instead of `batch_size`.
    """
    stream = _stream(items, epochs if steps is None else None, shuffle, seed)
    cut = _by_number(stream, batch_size) if lengths is None else _by_tokens(stream, lengths, batch_tokens)
    return list(islice(cut, steps))


def _stream(items: Sequence[int], epochs: int | None, shuffle: bool, seed: int) -> Iterator[int]:
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from random.Random(f"{seed}/{epoch}").sample(items, len(items)) if shuffle else items
        epoch += 1


def _by_number(stream: Iterator[int], batch_size: int) -> Iterator[list[int]]:
    while batch := list(islice(stream, batch_size)):
        yield batch


def _by_tokens(stream: Iterator[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    batch: list[int] = []
    tokens = 0
    for item in stream:
        if batch and tokens + lengths[item] > most:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += lengths[item]
    if batch:
        yield batch


TEXTS = 500
"""Number of conversations from which the words of a tiny model are taken."""

LONGEST_CONTEXT = 1024
"""Smallest context of a tiny model, which leaves room to raise model.max_context."""


def find_demonstrations(config: RunConfig) -> list[Found]:
    """Find the demonstrations that the settings name.

    Raises:
        ConfigError: the task has no demonstrations.
        DataError: a demonstration cannot be used. The message names its place.
    """
    sft = config.sft
    if not sft.data:
        return task_demonstrations(
            [(source.task, source.weight) for source in config.tasks], sft.demonstrations, config.rollout
        )
    data = Path(sft.data)
    if data.is_dir():
        return best_rollouts(data, sft.demonstrations, top_k=sft.top_k, min_reward=sft.min_reward)
    return read_chats(data, sft.demonstrations)


def digest(found: Sequence[Found]) -> str:
    """Digest that identifies demonstrations and their order."""
    summed = hashlib.blake2b(digest_size=16)
    for _, demonstration in found:
        summed.update(json.dumps([demonstration.messages, demonstration.tools], default=str).encode())
    return summed.hexdigest()


def make_start(folder: Path, model: ModelConfig, found: Sequence[Found], config: RunConfig) -> None:
    """Make a tiny model that has words for the demonstrations, as the renderer shows them.

    Raises:
        ConfigError: no model has that size.
        DataError: a demonstration cannot be rendered.
    """
    max_context = max(LONGEST_CONTEXT, model.max_context)
    tiny = config.sft.tiny_model
    make_tiny_model(folder, texts=(), level="byte", parameters=100_000, max_context=1 << 30)
    texts: list[str] = []
    if tiny.level == "word":
        renderer, tokenizer = make_renderer(model), load_tokenizer(folder)
        some = found[:: -(-len(found) // TEXTS)]
        texts = [tokenizer.decode(_rendered(renderer, one)) for one in some]
    try:
        make_tiny_model(
            folder,
            texts=texts,
            level=tiny.level,
            parameters=tiny.parameters,
            max_context=max_context,
            seed=config.seed,
        )
    except ValueError as error:
        raise ConfigError(f"sft.tiny_model.{error}") from None


def _rendered(renderer: Renderer, found: Found) -> list[int]:
    name, demonstration = found
    tools = None if demonstration.tools is None else renderable(demonstration.tools)
    try:
        return renderer.render_ids(renderable(demonstration.messages), tools=tools)
    except Exception as error:  # a template may raise anything
        raise DataError(f"{name}: it cannot be rendered: {error!r}") from error


def plan_steps(config: RunConfig, tokens: TokenSource, count: int) -> tuple[list[list[int]], list[int]]:
    """Return the demonstrations of each step, and the held-out ones.

    Args:
        count: Number of demonstrations.

    Raises:
        DataError: a demonstration cannot be rendered, and `sft.batch_tokens` needs its length.
    """
    sft = config.sft
    learned, held_out = hold_out(count, sft.held_out, config.seed)
    steps = batches(
        learned,
        batch_size=sft.batch_size,
        steps=sft.steps,
        epochs=sft.epochs,
        shuffle=sft.shuffle,
        seed=config.seed,
        lengths=None if sft.batch_tokens is None else [tokens.length(number) for number in range(count)],
        batch_tokens=sft.batch_tokens or 0,
    )
    return steps, held_out


def supervised(config: RunConfig, model: ModelConfig, steps: int) -> RunConfig:
    """Settings of the run whose trainer makes the supervised steps."""
    sft = config.sft
    training = TrainingConfig.model_validate(
        config.training.model_dump()
        | {
            "steps": steps,
            "loss": "nll",
            "average": "token",
            "kl_coef": 0.0,
            "offload": tuple(part for part in config.training.offload if part != "reference"),
            "minibatches": 1,
            "share_prompts": False,
            "lr": sft.lr,
            "warmup_steps": round(WARMUP_SHARE * steps),
            "lr_decay": "cosine",
            "min_lr_ratio": sft.min_lr_ratio,
            "weight_decay": sft.weight_decay,
        }
    )
    started = sft.model_copy(update={"start": model.path})
    update = {"model": model, "training": training, "correction": CorrectionConfig(), "sft": started}
    return reset_without_effect(config.model_copy(update=update))
