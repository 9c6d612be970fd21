"""A run that is killed goes on where it was: nothing is skipped, trained twice or generated again."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_controller import Counting, FakeReplica, FakeTrainer
from test_readme_examples import CountDown

from titan_rl import Completion, GeneratorRouter, Rollouter
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import (
    CheckpointConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    ValidationConfig,
)
from titan_rl.config.training import TrainingConfig
from titan_rl.controller import Controller
from titan_rl.durability.run_journal import RunJournal
from titan_rl.durability.run_state import RunState
from titan_rl.observability.progress import Progress
from titan_rl.observability.run_dir import RunDirectory
from titan_rl.statedict.board import VersionBoard
from titan_rl.training.checkpoint import atomic_directory, latest, step_directory

STEPS, GROUPS = 7, 3


class SavingTrainer(FakeTrainer):
    """Its weights are the list of what they were trained on."""

    def __init__(self, checkpoint: Path | None) -> None:
        super().__init__()
        self.weights: list[list[str]] = []
        if checkpoint is not None:
            self.weights = json.loads((checkpoint / "weights.json").read_text())
            self.version = len(self.weights)

    async def step(self, samples) -> dict[str, float]:
        self.weights.append(sorted({sample.group_id for sample in samples}))
        return await super().step(samples)

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> None:
        self.state = json.dumps(self.weights), json.dumps(run_state), step_directory(root, self.version)

    async def finish_save(self) -> None:
        weights, run_state, path = self.state
        for _ in range(20):  # the run goes on meanwhile
            await asyncio.sleep(0)
        with atomic_directory(path) as folder:
            (folder / "weights.json").write_text(weights)
            (folder / "run_state.json").write_text(run_state)


class CountingReplica(FakeReplica):
    """Notes what it was asked for training; its answers take a few turns of the event loop each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.answered: list[str] = []
        self._random = random.Random(seed)

    async def generate(self, prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        if request_id.startswith("train"):
            self.asked.append(request_id)
            for _ in range(self._random.randrange(12)):
                await asyncio.sleep(0)
        completion = await super().generate(
            prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
        )
        if request_id.startswith("train"):
            self.answered.append(request_id)
        return completion


class Rig:
    """A run on fakes over a folder, from wherever the folder says it was."""

    def __init__(self, folder: Path, seed: int, **scheduling: Any) -> None:
        task, run_dir = Counting(), RunDirectory(folder)
        config = RunConfig(
            seed=1,
            model=ModelConfig(path="unused", max_context=16),
            task=task,  # pyright: ignore[reportArgumentType]
            sampling=SamplingConfig(max_tokens=1),
            rollout=RolloutConfig(group_size=2),
            scheduling=SchedulingConfig(groups_per_step=GROUPS, **scheduling),
            training=TrainingConfig(steps=STEPS, row_tokens=16),
            validation=ValidationConfig(num_prompts=1, samples_per_prompt=1),
            checkpoint=CheckpointConfig(interval=3),
        )
        checkpoint = latest(run_dir.checkpoints)
        resumed = None if checkpoint is None else RunState.read(checkpoint)
        self.journal = RunJournal(run_dir.journal, 0 if resumed is None else resumed.step)
        self.known = {key[0] for parts in self.journal.state.parts.values() for key in parts}
        self.known |= {
            turn.completion.request_id
            for record in self.journal.state.finished.values()
            for rollout in record.rollouts
            for turn in rollout.turns
        }
        self.trainer = SavingTrainer(checkpoint)
        self.replica = CountingReplica(seed)
        with (folder / "progress.txt").open("w") as file:
            progress = Progress(STEPS, file)
        progress.message = progress.step = lambda *_: None  # pyright: ignore
        self.controller = Controller(
            config,
            task,  # pyright: ignore[reportArgumentType]
            rollouter=Rollouter(CountDown, task.rubric(), max_context=16),
            router=GeneratorRouter([self.replica]),
            trainer=self.trainer,
            stop_token_ids=[],
            board=VersionBoard(),
            run_dir=run_dir,
            log=lambda step, metrics: None,
            progress=progress,
            journal=self.journal,
            resumed=resumed,
        )

    async def run(self) -> None:
        await asyncio.wait_for(self.controller.run(), 30)
        self.journal.close()


def at_each_record(journal: RunJournal, act: Callable[[int], None]) -> None:
    append, number = journal._writer.append, 0  # pyright: ignore[reportPrivateUsage]

    def spy(record: bytes) -> None:
        nonlocal number
        append(record)
        number += 1
        act(number)

    journal._writer.append = spy  # pyright: ignore


@pytest.mark.parametrize(
    "scheduling",
    [
        {"max_staleness": 0},
        {"max_staleness": 1},
        {"max_staleness": 1, "oversample": 1.0, "on_batch_ready": "abort", "tail": "tail_batch"},
    ],
    ids=["on-policy", "one step off", "partial"],
)
async def test_killed_at_twenty_moments_a_run_trains_on_what_it_would_have(tmp_path, scheduling):
    first = Rig(tmp_path / "run", 0, **scheduling)
    moments = set(random.Random(5).sample(range(1, 90), 20))
    answered: dict[int, set[str]] = {}

    def keep_the_disk(number: int) -> None:
        """What a SIGKILL at this moment leaves: the files as they are, the last record perhaps torn."""
        if number in moments:
            answered[number] = set(first.replica.answered)
            first.journal.drain()
            killed = tmp_path / f"killed-{number}"
            shutil.copytree(tmp_path / "run", killed)
            newest = max((killed / "journal").iterdir())
            newest.write_bytes(newest.read_bytes() + b"\x20\x00\x00\x00torn"[: number % 8])

    at_each_record(first.journal, keep_the_disk)
    await first.run()
    undisturbed = first.trainer.weights
    assert len(answered) == 20

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


async def test_a_resumed_run_keeps_the_reward_and_tokens_of_its_first_part(tmp_path):
    first = Rig(tmp_path / "run", 0, max_staleness=0)
    snapshot = tmp_path / "killed"

    def keep_the_disk(number: int) -> None:
        if (latest(tmp_path / "run" / "checkpoints") is not None) and not snapshot.exists():
            first.journal.drain()
            shutil.copytree(tmp_path / "run", snapshot)

    at_each_record(first.journal, keep_the_disk)
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
