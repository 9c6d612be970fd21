"""A killed run resumes where it was: nothing is skipped, trained twice or generated again."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S
from depth import DEEP
from test_controller import Counting, FakeReplica, FakeTrainer
from test_readme_examples import CountDown

from titan_rl import Completion, GeneratorRouter, Rollouter
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import CheckpointConfig, SamplingConfig, ValidationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.sinks import JSONLSink
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.state.checkpoint import atomic_directory, latest, step_directory, write_checksums, write_summed
from titan_rl.training.trainer_protocol import StepResult, Trainer
from titan_rl.weights.types import Manifest, PublishedWeights

STEPS, GROUPS = 7, 3
NUM_KILLS = 20 if DEEP else 8


class SavingTrainer(FakeTrainer):
    """Trainer whose weights are the list of groups that they were trained on.

    Like an actor, it executes calls one after another whether or not the caller still waits; only `kill` ends that.
    `at_moment` is called before, within and after each call with a running number.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        super().__init__()
        self.weights: list[list[str]] = []
        if checkpoint is not None:
            self.weights = json.loads((checkpoint / "weights.json").read_text())
            self.version = len(self.weights)
        self.at_moment: Callable[[int], None] = lambda moment: None
        self.moments = 0
        self._work: list[asyncio.Task[Any]] = []
        self._last: asyncio.Task[Any] | None = None
        self._writing: asyncio.Task[Any] | None = None

    async def step(self, samples) -> StepResult:
        async def step() -> StepResult:
            await self.take_time()
            self.weights.append(sorted({sample.group_id for sample in samples}))
            result = await FakeTrainer.step(self, samples)
            await self.take_time()
            return result

        return await self._in_turn(step())

    async def begin_publish(self) -> None:
        async def begin() -> None:
            await self.take_time()
            await FakeTrainer.begin_publish(self)

        await self._in_turn(begin())

    async def finish_publish(self) -> Manifest:
        await self.take_time()
        return await super().finish_publish()

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        async def begin() -> int:
            await self.take_time()
            if self._writing is not None:
                await asyncio.wait([self._writing])
            state = json.dumps(self.weights), json.dumps(run_state), step_directory(root, self.version)
            self._writing = self._start(self._write(*state))
            await self.take_time()
            return self.version

        return await self._in_turn(begin())

    async def finish_save(self) -> None:
        await self.take_time()
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self, weights: str, run_state: str, path: Path) -> None:
        for _ in range(4):  # the run continues meanwhile
            await self.take_time()
        with atomic_directory(path) as folder:
            files = {"weights.json": weights, "run_state.json": run_state}
            write_checksums(folder, {name: write_summed(folder / name, text) for name, text in files.items()})
        await self.take_time()

    def kill(self) -> None:
        for task in self._work:
            task.cancel()

    async def take_time(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.moments += 1
        self.at_moment(self.moments)
        await asyncio.sleep(0)

    async def _in_turn(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def after(before: asyncio.Task[Any] | None) -> Any:
            if before is not None:
                await asyncio.wait([before])
            return await work

        self._last = self._start(after(self._last))
        self._last.add_done_callback(lambda _: work.close())  # also if it was killed before its turn
        return await asyncio.shield(self._last)

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self._work.append(asyncio.ensure_future(work))
        return self._work[-1]


class CountingReplica(FakeReplica):
    """Replica that records training requests; each answer takes a few iterations of the event loop."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._random = random.Random(seed)

    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        if request_id.startswith("train"):
            self.asked.append(request_id)
            for _ in range(self._random.randrange(12)):
                await asyncio.sleep(0)
        return await super().generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)


class RecordingRouter(GeneratorRouter):
    """Router that records answered requests; answers in flight are lost with the process."""

    def __init__(self, replica: CountingReplica) -> None:
        super().__init__([replica])
        self.answered: list[str] = []

    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        completion = await super().generate(
            prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
        )
        if request_id.startswith("train") and completion.token_ids:
            self.answered.append(request_id)
        return completion


class Rig:
    """A run on fakes that starts from the newest checkpoint in its folder.

    Args:
        trainer_of: Makes the controller's trainer; by default it is one that cannot die.
        replica_of: Makes the replica from the seed.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        trainer_of: Callable[[RunConfig, RunJournal, PublishedWeights, Progress], Trainer] | None = None,
        steps: int = STEPS,
        interval: int = 3,
        tasks: Sequence[TaskSource] = (TaskSource(task=Counting()),),  # pyright: ignore[reportArgumentType]
        validation: ValidationConfig = ValidationConfig(num_prompts=1, samples_per_prompt=1),  # noqa: B008  frozen
        replica_of: Callable[[int], CountingReplica] = CountingReplica,
        **scheduling: Any,
    ) -> None:
        self.folder = folder
        run_dir = RunDirectory(folder)
        config = RunConfig(
            seed=1,
            model=ModelConfig(path="unused", max_context=16),
            tasks=tuple(tasks),
            sampling=SamplingConfig(max_tokens=1),
            rollout=RolloutConfig(group_size=2),
            scheduling=SchedulingConfig(groups_per_step=GROUPS, **scheduling),
            training=TrainingConfig(steps=steps, row_tokens=16),
            validation=validation,
            checkpoint=CheckpointConfig(interval=interval),
        )
        checkpoint = latest(run_dir.checkpoints)
        start = RunState() if checkpoint is None else RunState.read(checkpoint)
        self.journal = RunJournal(run_dir.journal, start.position)
        self.known = {key[0] for known in self.journal.state.completions.values() for key in known}
        self.known |= {
            turn.completion.request_id
            for record in self.journal.state.finished.values()
            for rollout in record.rollouts
            for turn in rollout.turns
        }
        self.trainer = SavingTrainer(checkpoint)
        self.replica = replica_of(seed)
        pull = self.replica.pull

        async def pull_in_its_time(version: int) -> None:
            await self.trainer.take_time()
            await pull(version)

        self.replica.pull = pull_in_its_time
        self.router = RecordingRouter(self.replica)
        with (folder / "progress.txt").open("w") as file:
            progress = Progress(steps, file)
        progress.message = progress.step = lambda *_: None  # pyright: ignore
        published = PublishedWeights()
        self.controller = Controller(
            config,
            group_runners={
                source.name: Rollouter(CountDown, source.task.rubric(), max_context=16) for source in config.sources
            },
            router=self.router,
            trainer=self.trainer if trainer_of is None else trainer_of(config, self.journal, published, progress),
            stop_token_ids=[],
            published=published,
            run_dir=run_dir,
            sinks=JSONLSink(run_dir),
            progress=progress,
            journal=self.journal,
            start=start,
        )

    async def run(self) -> None:
        await asyncio.wait_for(self.controller.run(), HANG_S)
        self.journal.close()

    async def run_until(self, moment: int) -> None:
        """Run, and cancel at this moment of the trainer."""
        run = asyncio.ensure_future(self.controller.run())
        self.trainer.at_moment = lambda now: run.cancel() if now == moment else None
        await asyncio.wait([run], timeout=150)
        assert run.done()
        if not run.cancelled():
            run.result()
        self.trainer.kill()
        self.journal.close()


def at_each_record(journal: RunJournal, act: Callable[[int], None]) -> None:
    append, number = journal._writer.append, 0  # pyright: ignore[reportPrivateUsage]

    def spy(record: bytes) -> None:
        nonlocal number
        append(record)
        number += 1
        act(number)

    journal._writer.append = spy  # pyright: ignore


SCHEDULES = pytest.mark.parametrize(
    "scheduling",
    [
        {"max_staleness": 0},
        {"max_staleness": 1},
        {"max_staleness": 1, "oversample": 1.0, "on_batch_ready": "abort", "tail": "tail_batch"},
    ],
    ids=["on-policy", "one step off", "partial"],
)


@SCHEDULES
async def test_kill_at_any_record_keeps_the_training_data(tmp_path, scheduling):
    first = Rig(tmp_path / "run", 0, **scheduling)
    moments = set(random.Random(5).sample(range(1, 90), NUM_KILLS))
    answered: dict[int, set[str]] = {}

    def copy_disk(number: int) -> None:
        """Copy what a SIGKILL at this moment leaves: the files as they are, with the last record possibly torn."""
        if number in moments:
            answered[number] = set(first.router.answered)
            first.journal.drain()
            killed = tmp_path / f"killed-{number}"
            shutil.copytree(tmp_path / "run", killed)
            newest = max((killed / "journal").iterdir())
            newest.write_bytes(newest.read_bytes() + b"\x20\x00\x00\x00torn"[: number % 8])

    at_each_record(first.journal, copy_disk)
    await first.run()
    undisturbed = first.trainer.weights
    assert len(answered) == NUM_KILLS

    for number, before in answered.items():
        again = Rig(tmp_path / f"killed-{number}", seed=number, **scheduling)
        assert not again.known & set(again.replica.asked)
        await again.run()
        assert len(again.trainer.weights) == STEPS
        assert not again.known & set(again.replica.asked), "recorded turns are not generated again"
        lost = set(again.replica.asked) & before
        groups = {request_id.split("/")[0] for request_id in lost}
        assert not lost, f"turns answered before moment {number} were generated again, in {groups}"
        trained = [group for step in again.trainer.weights for group in step]
        assert len(trained) == len(set(trained))
        assert set(trained) == {group for step in undisturbed for group in step}
        if scheduling == {"max_staleness": 0}:
            assert again.trainer.weights == undisturbed


async def test_resumed_run_keeps_reward_and_tokens_of_its_first_part(tmp_path):
    first = Rig(tmp_path / "run", 0, max_staleness=0)
    snapshot = tmp_path / "killed"

    def copy_disk(number: int) -> None:
        if (latest(tmp_path / "run" / "checkpoints") is not None) and not snapshot.exists():
            first.journal.drain()
            shutil.copytree(tmp_path / "run", snapshot)

    at_each_record(first.journal, copy_disk)
    await first.run()
    state = RunState.read(latest(snapshot / "checkpoints") or snapshot)
    assert state.step == 3
    assert state.tokens > 0
    assert state.reward_before is not None
    again = Rig(snapshot, 1, max_staleness=0)
    await again.run()
    assert RunState.read(latest(snapshot / "checkpoints") or snapshot) == RunState.read(
        latest(tmp_path / "run" / "checkpoints") or snapshot
    )


def steps_reported(folder: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(folder / "metrics.jsonl") if "train/loss" in record]


@SCHEDULES
async def test_stop_at_any_trainer_moment_neither_loses_nor_repeats_groups(tmp_path, scheduling):
    steps = 4
    whole = Rig(tmp_path / "whole", 0, steps=steps, interval=2, **scheduling)
    await whole.run()
    undisturbed = whole.trainer.weights
    assert whole.trainer.moments > 30
    off_schedule = 0
    for moment in range(1, whole.trainer.moments + 1, 1 if DEEP else 4):
        folder = tmp_path / f"stopped-{moment}"
        first = Rig(folder, 0, steps=steps, interval=2, **scheduling)
        await first.run_until(moment)
        checkpoint = latest(folder / "checkpoints")
        saved = RunState.read(checkpoint).step if checkpoint is not None else 0
        assert saved == len(first.trainer.weights), f"all steps trained at moment {moment} are saved"
        assert steps_reported(folder) == list(range(1, saved + 1)), f"at moment {moment}"
        off_schedule += saved % 2  # no checkpoint is due there

        again = Rig(folder, moment, steps=steps, interval=2, **scheduling)
        if saved < steps:
            await again.run()
            assert steps_reported(folder) == list(range(1, steps + 1))
        assert again.trainer.weights[:saved] == first.trainer.weights
        trained = [group for step in again.trainer.weights for group in step]
        assert sorted(trained) == sorted(group for step in undisturbed for group in step), f"at moment {moment}"
        if scheduling == {"max_staleness": 0}:
            assert again.trainer.weights == undisturbed
    assert off_schedule >= (6 if DEEP else 1)
