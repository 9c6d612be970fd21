"""Supervised run, from a checked config to the trained model: demonstrations, batches, settings, and the end of the
run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from titan_rl.cluster.hosts.elastic import hosts_watcher
from titan_rl.cluster.hosts.host_files import HostFiles
from titan_rl.cluster.hosts.lifecycle import HostHistory
from titan_rl.config.build import make_renderer, template_note
from titan_rl.config.conflicts import reset_without_effect
from titan_rl.config.hosts import check_own_machine
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.console import Verbosity
from titan_rl.core.errors import CheckpointError, ConfigError, DataError
from titan_rl.rollout.policy_text import PREFIX, joined
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.renderer.types import renderable
from titan_rl.rollout.task import Demonstration
from titan_rl.run.checks.requirements import check_policy, require_modules
from titan_rl.run.components import Planes
from titan_rl.run.directory import RunDirectory, run_name
from titan_rl.run.observability.progress import status
from titan_rl.run.observability.summary import show_summary
from titan_rl.run.process.environment import file_modes
from titan_rl.run.resumption import check_resumption, open_run_dir
from titan_rl.run.session import RunSession
from titan_rl.run.sft.demonstration_sources import Found, TokenSource, best_rollouts, read_chats, task_demonstrations
from titan_rl.run.sft.loop import LearnedSteps, SupervisedLoop, SupervisedSummary
from titan_rl.run.trainer_recovery import open_trainer
from titan_rl.training.settings import AdapterConfig, CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.training.tiny_model import make_tiny_model
from titan_rl.weights.types import PublishedWeights

WARMUP_SHARE = 0.05
"""Share of the steps in which the learning rate rises."""

HELD_OUT_SHARE = 10
"""Inverse of the largest share of demonstrations that is held out: at most one of this many."""


def hold_out(count: int, most: int, seed: int) -> tuple[list[int], list[int]]:
    """Split demonstrations into those to learn and those to hold out. Return the indices of both, each in order.

    Args:
        count: Number of demonstrations.
        most: Largest number of demonstrations to hold out.
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
        batch_size: Number of items in one step. If there are fewer items in total, items are repeated.
        steps: Number of steps, over as many epochs as needed. With None, `epochs` determines it, and the last step may
            have fewer items.
        lengths: Number of tokens of each item. If given, steps are limited by `batch_tokens` instead of `batch_size`.
    """
    stream = _stream(items, epochs if steps is None else None, shuffle, seed)
    if lengths is None:
        return list(islice(_cut(stream, lambda item: 1, batch_size), steps))
    return list(islice(_cut(stream, lengths.__getitem__, batch_tokens), steps))


def _stream(items: Sequence[int], epochs: int | None, shuffle: bool, seed: int) -> Iterator[int]:
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from random.Random(f"{seed}/{epoch}").sample(items, len(items)) if shuffle else items
        epoch += 1


def _cut(stream: Iterator[int], size_of: Callable[[int], int], most: int) -> Iterator[list[int]]:
    """Cut a stream into batches whose items have at most a total size. A larger item has its own batch."""
    batch: list[int] = []
    size = 0
    for item in stream:
        if batch and size + size_of(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


TEXTS = 500
"""Most conversations from which the words of a tiny model are taken."""

LONGEST_CONTEXT = 1024
"""Smallest context of a tiny model. It leaves room to raise model.max_context."""


def find_demonstrations(config: RunConfig) -> list[Found]:
    """Find the demonstrations that the settings name.

    Raises:
        ConfigError: The task has no demonstrations.
        DataError: A demonstration cannot be used. The message names its source.
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
    """Compute a digest that identifies demonstrations and their order."""
    summed = hashlib.blake2b(digest_size=16)
    for _, demonstration in found:
        summed.update(json.dumps([demonstration.messages, demonstration.tools], default=str).encode())
    return summed.hexdigest()


def make_start(folder: Path, model: ModelConfig, found: Sequence[Found], config: RunConfig) -> None:
    """Create a tiny model whose tokenizer has the words of the demonstrations, as the renderer renders them.

    Raises:
        ConfigError: No model has the size that the settings give.
        DataError: A demonstration cannot be rendered.
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
        return renderer.render_ids(renderable(joined(demonstration.messages)), tools=tools)
    except Exception as error:  # a template may raise anything
        raise DataError(f"{name}: it cannot be rendered: {error!r}") from error


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    """Plan of a supervised run.

    Attributes:
        config: Settings of the run that runs the supervised steps, including the model from which it starts.
        tokens: Tokens of the demonstrations.
        steps: Indices of the demonstrations that each step learns.
        held_out: Indices of the demonstrations that no step learns.
        warnings: Reasons why the demonstrations cannot be learned well, or are left out.
    """

    config: RunConfig
    tokens: TokenSource
    steps: list[list[int]]
    held_out: list[int]
    warnings: Sequence[str] = ()

    def __str__(self) -> str:
        num_learned = self.tokens.num_demonstrations - len(self.held_out)
        return (
            f"{num_learned:,} demonstrations to learn in {len(self.steps):,} steps, and {len(self.held_out)} held out"
        )


def plan_run(config: RunConfig, found: list[Found], folder: Path) -> SupervisedPlan:
    """Plan a supervised run.

    Args:
        folder: Folder in which a tiny model is created if the settings name no model.

    Raises:
        ConfigError: The settings do not fit the model.
        DataError: A demonstration cannot be rendered, or there are too few demonstrations.
    """
    sft = config.sft
    found, unlearned = _learnable(found)
    start = Path(sft.start or folder / "start")
    model = config.model.model_copy(update={"path": str(start)})
    if not sft.start:
        make_start(start, model, found, config)
    tokens = TokenSource(make_renderer(model), found, model.max_context)
    learned, held_out = hold_out(len(found), sft.held_out, config.seed)
    steps = batches(
        learned,
        batch_size=sft.batch_size,
        steps=sft.steps,
        epochs=sft.epochs,
        shuffle=sft.shuffle,
        seed=config.seed,
        lengths=None if sft.batch_tokens is None else [tokens.length(number) for number in range(len(found))],
        batch_tokens=sft.batch_tokens or 0,
    )
    is_word = not sft.start and sft.tiny_model.level == "word"
    warnings = [unlearned, _unspelled(start, found) if is_word else None]
    return SupervisedPlan(supervised(config, model, len(steps)), tokens, steps, held_out, [*filter(None, warnings)])


def _learnable(found: list[Found]) -> tuple[list[Found], str | None]:
    """Demonstrations with an answer to learn, and a warning if others are left out."""
    kept = [(name, one) for name, one in found if _is_learned(one)]
    if not kept:
        raise DataError(f'{found[0][0]}: all answers of all demonstrations have "weight": 0; nothing is to be learned')
    num_left_out = len(found) - len(kept)
    such = next((name for name, one in found if not _is_learned(one)), "")
    warning = f'{num_left_out:,} of {len(found):,} demonstrations, such as {such}, have only answers with "weight": 0, '
    return kept, f"{warning}and are left out" if num_left_out else None


def _is_learned(one: Demonstration) -> bool:
    answers = [message for message in one.messages if message.get("role") == "assistant" and not message.get(PREFIX)]
    return not answers or any(message.get("weight") != 0 for message in answers)


MOST_LABELS = 64
"""Number of different answers of one token up to which a task may be a classification, which can be learned."""


def _unspelled(folder: Path, found: Sequence[Found]) -> str | None:
    """Warning if the answers are single tokens of a word vocabulary, such as words spelled backwards: a model cannot
    take a token apart, so it could only memorize them."""
    tokenizer = load_tokenizer(folder)
    messages = [message for _, one in found[:: -(-len(found) // TEXTS)] for message in one.messages]
    answers = [str(message.get("content") or "") for message in messages if message.get("role") == "assistant"]
    single = [answer for answer in answers if len(tokenizer.encode(answer, add_special_tokens=False)) == 1]
    if 2 * len(single) < len(answers) or len(set(single)) <= MOST_LABELS:
        return None
    return (
        f"{len(single)} of {len(answers)} answers are a single token of the tiny model, with {len(set(single))} "
        'different ones: it can memorize such answers, but not compute new ones; set sft.tiny_model.level = "byte", '
        "unless the answers are labels"
    )


def supervised(config: RunConfig, model: ModelConfig, steps: int) -> RunConfig:
    """Build the settings of the run whose trainer runs the supervised steps."""
    sft = config.sft
    # A model that is created for the task has no abilities that an adapter would preserve.
    adapter = config.training.adapter if sft.start else AdapterConfig()
    training = TrainingConfig.model_validate(
        config.training.model_dump()
        | {
            "adapter": adapter.model_dump(),
            "steps": steps,
            "algorithm": "sft",
            "loss": "nll",
            "average": "token",
            "kl_coef": 0.0,
            "reference_interval": 0,
            "stop_at": {},
            "distill_coef": 0.0,
            "critic": "none",
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


def run_sft(
    config: RunConfig,
    resume: Path | None = None,
    *,
    started_by: str | None = None,
    verbosity: Verbosity = Verbosity.NORMAL,
) -> int:
    """Train a model on demonstrations, from beginning to end.

    Args:
        config: Result of `load_sft_config`.
        resume: Folder of an earlier run with this config, which is continued from its newest checkpoint.
        started_by: Command to name if the run fails before it has saved anything.

    Returns:
        The exit code: 0, or 128 + the number of the signal that ended the run in order.

    Raises:
        TitanRLError: The error that ended the run.
    """
    require_modules("torch", "monarch", "torchtitan", "transformers")
    with status("reading the demonstrations", verbosity):
        found = find_demonstrations(config)
    check_own_machine(config.hosts)
    with file_modes(share=config.share_run_dir):
        run_dir = open_run_dir(config, resume, f"sft-{run_name(config)}", supervised=True)
        with status("reading the model and the demonstrations", verbosity):
            plan = plan_run(config, found, run_dir.path)
        _check_data(run_dir.supervised, digest(found))
        if resume is None:
            run_dir.write_config(plan.config)
        session = RunSession[SupervisedSummary](
            plan.config,
            run_dir,
            begins=resume is None,
            started_by=started_by,
            command="sft",
            processes="titan_rl.cluster.trainer_processes",
            verbosity=verbosity,
        )
        code = session.run(partial(_teach, plan))
    if session.summary is not None:
        show_summary(session.summary)
    return code


def check(config: RunConfig, folder: Path, resume: Path | None = None) -> tuple[RunConfig, str]:
    """Check a supervised run without starting it.

    Args:
        folder: Folder for temporary files.
        resume: Folder of an earlier run, which would be continued.

    Returns:
        The settings of the run, with `sft.start` as given, and a description of the demonstrations.

    Raises:
        TitanRLError: The run would not begin.
    """
    found = find_demonstrations(config)
    plan = plan_run(config, found, folder)
    ready = plan.config
    check_policy(ready)
    losses: Sequence[str] = ()
    if resume is not None:
        losses = check_resumption(ready, resume, supervised=True)
        _check_data(RunDirectory(resume).supervised, digest(found))
    samples = plan.tokens.samples(plan.steps[0])
    lengths = [len(sample.token_ids) for sample in samples]
    learned = sum(sample.num_trained_tokens for sample in samples)
    notes = [*losses, *(f"warning: {warning}" for warning in plan.warnings)]
    summary = "".join(f"{note}\ntitan-rl: " for note in notes) + (
        f"{plan}; the first step learns {learned:,} of {sum(lengths):,} tokens, {max(lengths)} in the longest "
        "conversation"
    )
    shown = ready.sft.model_copy(update={"start": config.sft.start})
    return ready.model_copy(update={"sft": shown, "model": config.model, "training": config.training}), summary


def _check_data(file: Path, now: str) -> None:
    """Check that a resumed run has the demonstrations with which it began, because its steps refer to them by index."""
    if not file.exists():
        file.write_text(json.dumps({"demonstrations": now}) + "\n", encoding="utf-8")
        return
    try:
        before = cast("dict[str, Any]", parse_json(file.read_text(encoding="utf-8")))["demonstrations"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{file} does not identify the demonstrations of the run: {error}; restore the file"
        ) from None
    if before != now:
        raise CheckpointError(
            f"{file.parent} was trained on other demonstrations, or in another order; restore them, or start a new run"
        )


async def _teach(
    plan: SupervisedPlan, session: RunSession[SupervisedSummary], resources: contextlib.AsyncExitStack
) -> SupervisedSummary:
    from titan_rl.cluster.trainer_processes import start_trainer

    config, run_dir, progress = session.config, session.run_dir, session.progress
    if note := template_note(config.model):
        progress.message(note)
    for loss in session.start.losses:
        progress.warning(loss)
    for warning in plan.warnings:
        progress.warning(warning)
    progress.message(f"{plan}; starting a trainer")
    resources.enter_context(LoopWatchdog(progress))
    (files := HostFiles(run_dir.path)).begin()
    history = HostHistory()
    with progress.working("starting a trainer"):
        processes = await resources.enter_async_context(start_trainer(config, run_dir, progress))
    training = processes.training
    watch_hosts = hosts_watcher(config.hosts, files, processes, history, session.provided)
    planes = Planes(None, training, watch_hosts, waits_for=str, hosts=history, processes=processes)
    steps = LearnedSteps(plan.tokens, plan.steps)
    opening = open_trainer(training, steps, config, run_dir, PublishedWeights(), progress)
    trainer = await resources.enter_async_context(opening)
    await session.start.load(trainer, progress)
    loop = SupervisedLoop(
        config,
        trainer,
        plan.tokens,
        plan=plan.steps,
        held_out=plan.held_out,
        run_dir=run_dir,
        start=session.start.state,
        sinks=session.sinks,
        progress=progress,
        hosts=history,
        processes=processes,
    )
    async with session.training(planes, loop):
        summary = await loop.run()
    await training.close()
    return summary
