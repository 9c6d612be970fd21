"""Loop of a supervised run: batches of demonstrations become optimizer steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_rl.cluster.hosts.lifecycle import HostHistory
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.run.directory import RunDirectory
from titan_rl.run.held_out import best_version
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.processor_meter import ProcessorMeter, ProcessorSource
from titan_rl.run.observability.progress import Progress, ShownStep
from titan_rl.run.observability.step_metrics import Stage
from titan_rl.run.observability.summary import verdict_of, verdict_row
from titan_rl.run.sft.demonstration_sources import TokenSource
from titan_rl.run.terminal.live_display import format_seconds
from titan_rl.run.training_loop import TrainingLoop
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import MADE_BY_SFT
from titan_rl.training.state.checkpoint import atomic_directory, step_of
from titan_rl.training.trainer_protocol import Trainer


class LearnedSteps:
    """`TrainedSteps` of a supervised run, whose plan determines the samples of each step.

    Args:
        plan: Indices of the demonstrations that each step learns.
    """

    def __init__(self, tokens: TokenSource, plan: Sequence[Sequence[int]]) -> None:
        self._tokens = tokens
        self._plan = plan

    async def since(self, checkpoint: Path | None, version: int) -> AsyncGenerator[Sequence[TrainingSample]]:
        for numbers in self._plan[0 if checkpoint is None else step_of(checkpoint) : version]:
            yield self._tokens.samples(numbers)  # already encoded, because this process has trained on them


def install(config: RunConfig, export: Path, run: Path, before: float | None, after: float | None) -> Path:
    """Copy an exported model to `sft.out`, with a note about its training.

    Args:
        run: Folder of the run that trained the model.
        before, after: Held-out loss before and after training, or None.

    Returns:
        The folder `sft.out`.

    Raises:
        NoSpaceError: The disk is full.
        CheckpointError: The model could not be written; the folder is unchanged.
    """
    out = Path(config.sft.out)
    note = {
        "steps": config.training.steps,
        "held_out_loss": {"before": before, "after": after},
        "run": run.name,
        "seed": config.seed,
        "settings": config.sft.model_dump(mode="json", exclude={"start", "out", "data"}),
    }
    with atomic_directory(out) as folder:
        for file in export.iterdir():
            shutil.copyfile(file, folder / file.name)
        (folder / MADE_BY_SFT).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    return out


LOGGED = (
    "loss",
    "grad_norm",
    "lr",
    "entropy",
    "num_tokens",
    "num_samples",
    "padding_fraction",
    "respawns",
    "recovery_s",
    "skipped_steps",
)
"""Metrics of the trainer that are logged. The others are comparisons with a sampling policy, which does not exist
here."""


@dataclass(frozen=True, slots=True)
class SupervisedSummary:
    """Summary of a finished supervised run. Both losses are means over the same held-out demonstrations; None if none
    are held out."""

    loss_before: float | None
    loss_after: float | None
    steps: int
    tokens: int  # trained tokens, which are the assistant's
    seconds: float
    out: Path
    run_dir: Path

    @property
    def rows(self) -> Mapping[str, str]:
        return {
            "held-out loss": _compared(self.loss_before, self.loss_after),
            **verdict_row(verdict_of(self.run_dir)),
            "steps": f"{self.steps:,}",
            "tokens": f"{self.tokens:,}",
            "time": format_seconds(self.seconds),
            "model": f"{self.out}",
        }

    @property
    def achieved(self) -> str | None:
        verdict = verdict_of(self.run_dir)
        return "verdict" if verdict is not None and verdict["tone"] == "good" else None


class SupervisedLoop(TrainingLoop[SupervisedSummary]):
    """Training loop over demonstrations. It does not close the objects that it is given.

    The demonstrations of the next step are encoded while the trainer computes the current one.

    Args:
        plan: Indices of the demonstrations that each step learns.
        held_out: Indices of the demonstrations that no step learns.
        start: State of the checkpoint that the trainer has loaded.
        sinks: Sink for the metrics.
        hosts: History of the trainer's hosts, for their metrics.
        processes: Processes whose processor time is measured.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        tokens: TokenSource,
        *,
        plan: Sequence[Sequence[int]],
        held_out: Sequence[int],
        run_dir: RunDirectory,
        start: RunState,
        sinks: MetricSink,
        progress: Progress,
        hosts: HostHistory | None = None,
        processes: ProcessorSource | None = None,
    ) -> None:
        super().__init__(config, trainer, run_dir=run_dir, state=start, sinks=sinks, progress=progress)
        self._tokens = tokens
        self._plan = plan
        self._held_out = held_out
        self._hosts = hosts or HostHistory()
        self._processor = ProcessorMeter(processes)
        self._num_too_long = 0
        self._held_out_rewards = dict(start.held_out)

    @property
    def held_out(self) -> Mapping[int, float]:
        return self._held_out_rewards

    async def run(self) -> SupervisedSummary:
        """Run the remaining steps of the plan, export the model, and copy it to `sft.out`.

        Raises:
            TitanRLError: The error that ended the run.
        """
        with contextlib.closing(self._stages):
            held_out = await in_thread(self._tokens.samples, self._held_out) if self._held_out else []
            before = self._run_dir.metric(0, "validation/loss") if self.version else await self._measure(held_out)
            async with self._saved_at_the_end():
                async with asyncio.TaskGroup() as background:
                    await self._learn(held_out, background)
                after = await self._measure(held_out)
        await self._export()
        return SupervisedSummary(
            loss_before=before,
            loss_after=after,
            steps=self.version,
            tokens=self._state.tokens,
            seconds=self._run_dir.elapsed_s,
            out=await in_thread(install, self._config, self._run_dir.export, self._run_dir.path, before, after),
            run_dir=self._run_dir.path,
        )

    async def _learn(self, held_out: Sequence[TrainingSample], background: asyncio.TaskGroup) -> None:
        next_samples: asyncio.Task[list[TrainingSample]] | None = None
        for step in range(self.version + 1, len(self._plan) + 1):
            began = time.monotonic()
            self._stages.enter(Stage.BATCH, step)
            samples = await (next_samples or self._samples(step, background))
            waited = time.monotonic() - began
            next_samples = self._samples(step + 1, background) if step < len(self._plan) else None
            self._stages.enter(Stage.TRAIN, step)
            with self._progress.working(f"training step {step}"):
                await self._calls.finish(self._train_on(samples, waited_s=waited))
            self._skipped.check()
            if step == len(self._plan):  # the end of the run has its own measurement and checkpoint
                break
            if self._config.sft.interval and step % self._config.sft.interval == 0:
                await self._measure(held_out)
            keeps_best = self._config.checkpoint.keep == "best" and best_version(self.held_out) == step
            if self._saver.is_due(step) or keeps_best:
                self._stages.enter(Stage.CHECKPOINT, step)
                await self._saver.begin(background)
        await self._saver.written()

    def _samples(self, step: int, background: asyncio.TaskGroup) -> asyncio.Task[list[TrainingSample]]:
        numbers = self._plan[step - 1]
        return background.create_task(in_thread(self._tokens.samples, numbers), name=f"tokens-{step}")

    async def _train_on(self, samples: Sequence[TrainingSample], *, waited_s: float) -> None:
        """Train a step, and report it. If the run is stopped during the step, the step is also reported, because it is
        saved."""
        began = time.monotonic()
        result = await self._trainer.step(samples)
        self._skipped.note(result)
        metrics = {**result.metrics, "skipped_steps": float(self._skipped.count)}
        seconds = waited_s + time.monotonic() - began
        tokens = self._state.tokens + int(metrics["num_tokens"])
        self._state = replace(self._state, step=result.version, tokens=tokens)
        speed = sum(len(sample.token_ids) for sample in samples) / seconds  # of all tokens of the conversations
        self._sinks.log(
            self.version,
            {f"train/{name}": metrics[name] for name in LOGGED if name in metrics}
            | self._hosts.take_metrics()
            | self._processor.take_metrics()
            | {"throughput/tokens_per_s": speed, "time/step_s": seconds, "time/wait_for_tokens_s": waited_s},
        )
        self._progress.step(_shown_step(self.version, metrics.get("loss", math.nan), speed, seconds))
        if len(self._tokens.too_long) > self._num_too_long:
            self._num_too_long = len(self._tokens.too_long)
            self._progress.warning(
                f"{self._num_too_long} demonstrations so far are longer than model.max_context = "
                f"{self._config.model.max_context} tokens, and are left out"
            )

    async def _measure(self, held_out: Sequence[TrainingSample]) -> float | None:
        """Measure, log and report the loss of the held-out demonstrations."""
        if not held_out:
            return None
        self._stages.enter(Stage.VALIDATION, self.version)
        with self._progress.working("measuring the held-out loss"):
            loss = await self._trainer.measure(held_out)
        self._sinks.log(self.version, {"validation/loss": loss})
        self._held_out_rewards[self.version] = -loss
        self._progress.message(f"held-out loss {loss:.3f} after step {self.version}")
        return loss

    async def copy_state(self) -> Mapping[str, Any]:
        run_state = asdict(replace(self._state, held_out=dict(self.held_out)))
        await self._trainer.begin_save(self._run_dir.checkpoints, run_state)
        return run_state


def _shown_step(step: int, loss: float, tokens_per_s: float, seconds: float) -> ShownStep:
    return ShownStep(step, seconds, ("loss", loss, ""), {"tokens/s": f"{tokens_per_s:6.0f}"})


def _compared(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "none are held out"
    return f"{before:.3f} before, {after:.3f} after ({after - before:+.3f})"
