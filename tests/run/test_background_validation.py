"""Background validation has the results of blocking validation, and survives the end of runs and of generators."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S
from depth import DEEP
from test_controller import Counting
from test_killed_run import SavingTrainer, at_each_record
from test_readme_examples import CountDown, count_down

from titan_rl import Completion, FinishReason, GeneratorRouter, Reward, Rollout, Rollouter, Rubric, VersionSpan
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import CheckpointConfig, GenerationConfig, SamplingConfig, ValidationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.errors import EngineDeadError, StateDictError, TrainingError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.held_out import best_of
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.sinks import JSONLSink
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.training.settings import AdapterConfig, ModelConfig, TrainingConfig
from titan_rl.training.state.checkpoint import latest, list_checkpoints, step_directory, step_of
from titan_rl.weights.types import PublishedWeights

STEPS, INTERVAL = 8, 2


class Versions(Counting):
    """Task whose reward is the version that produced the last completion."""

    def rubric(self) -> Rubric:
        return Rubric([Reward(lambda rollout: rollout.turns[-1].completion.version_spans[0].version, name="version")])


def _near(best: int) -> Callable[[Rollout], float]:
    return lambda rollout: -abs(rollout.turns[-1].completion.version_spans[0].version - best)


class HoldingTrainer(SavingTrainer):
    """Trainer that keeps the two newest versions and the held one readable."""

    def __init__(self, checkpoint: Path | None) -> None:
        super().__init__(checkpoint)
        self.readable: list[int] = []
        self.held: int | None = None

    async def begin_publish(self) -> None:
        await super().begin_publish()
        self.readable = [*self.readable, self.published][-2:]

    async def hold_published(self, version: int | None) -> bool:
        assert version is None or version in self.readable
        self.held = version
        return True


class Generator:
    """Engine that keeps all versions it has loaded while its process lives. Pinned requests get the version they name,
    others the newest."""

    def __init__(self, name: str, rig: Rig) -> None:
        self.name = name
        self.rig = rig
        self.loaded: list[int] = []
        self.answered: list[tuple[str, int]] = []
        self.dead = False
        self.lies = False

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        is_held_out = request.request_id.startswith("validation")
        for _ in range(self.rig.random.randrange(4)):
            await asyncio.sleep(0)
        version = self.loaded[-1] if request.version is None else request.version
        assert version in self.loaded
        if is_held_out:
            await self.rig.before_answer(version)
        if self.dead:
            raise EngineDeadError("it died")
        version = version if request.version is not None else self.loaded[-1]
        self.answered.append((request.request_id, version))
        answer = await count_down(request.prompt_token_ids, request_id=request.request_id, sampling=request.sampling)
        spans = [VersionSpan(version + self.lies, 1)]
        return Completion(request.request_id, answer.token_ids, [-0.5], FinishReason.STOP, spans)

    async def pull(self, version: int) -> int:
        if self.dead:
            raise EngineDeadError("it died")
        self.rig.published.manifest_of(version)
        trainer = self.rig.trainer
        if version not in trainer.readable and version != trainer.held:
            raise StateDictError(f"version {version} is gone")
        if not self.loaded or version > self.loaded[-1]:
            self.loaded.append(version)
        return self.loaded[-1]

    async def pause(self, mode: object) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


class Rig:
    """A run on fakes that starts from the newest checkpoint in its folder.

    Args:
        mode: "held", "pinned", or "waits" for validation that blocks training.
        generators: Number of generators.
        best: Version with the highest reward; by default the newest.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        *,
        seed: int = 0,
        generators: int = 2,
        checkpoint_interval: int = 0,
        trainer_of: Callable[[Path | None], Any] = HoldingTrainer,
        keep: Any = 2,
        best: int | None = None,
    ) -> None:
        self.folder, self.random = folder, random.Random(seed)
        run_dir = self.run_dir = RunDirectory(folder)
        config = RunConfig(
            model=ModelConfig(path="unused", max_context=16),
            tasks=(TaskSource(task=Versions()),),  # pyright: ignore[reportArgumentType]
            sampling=SamplingConfig(max_tokens=1),
            rollout=RolloutConfig(group_size=2),
            scheduling=SchedulingConfig(groups_per_step=2, max_staleness=0),
            training=TrainingConfig(steps=STEPS, row_tokens=16, adapter=AdapterConfig(rank=int(mode == "pinned"))),
            validation=ValidationConfig(
                num_prompts=3, samples_per_prompt=1, interval=INTERVAL, beside_training=mode != "waits"
            ),
            checkpoint=CheckpointConfig(interval=checkpoint_interval, keep=keep),
            generation=GenerationConfig(adapter_swap="pinned" if mode == "pinned" else "hot"),
        )
        rubric = Versions().rubric() if best is None else Rubric([Reward(_near(best), name="near")])
        checkpoint = latest(run_dir.checkpoints)
        start = RunState() if checkpoint is None else RunState.read(checkpoint)
        self.journal = RunJournal(run_dir.journal, start.position)
        run_dir.cut_records(-1 if checkpoint is None else start.step, self.journal.state)
        self.trainer: Any = trainer_of(checkpoint)
        self.published = PublishedWeights()
        self.generators = [Generator(f"generator-{index}", self) for index in range(generators)]
        self.router = GeneratorRouter(self.generators)
        self.messages: list[str] = []
        self.begun: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)  # validations, by version
        self.gates: dict[int, asyncio.Event] = {}  # by version
        with (folder / "progress.txt").open("w") as file:
            progress = Progress(STEPS, file)
        progress.message = progress.warning = self.messages.append  # pyright: ignore
        progress.step = lambda *_: None  # pyright: ignore
        self.controller = Controller(
            config,
            group_runners={config.tasks[0].name: Rollouter(CountDown, rubric, max_context=16)},
            router=self.router,
            trainer=self.trainer,
            stop_token_ids=[],
            published=self.published,
            run_dir=run_dir,
            sinks=JSONLSink(run_dir),
            progress=progress,
            journal=self.journal,
            start=start,
        )

    async def before_answer(self, version: int) -> None:
        self.begun[version].set()
        if version in self.gates:
            await self.gates[version].wait()

    async def run(self) -> None:
        await asyncio.wait_for(self.controller.run(), HANG_S)
        self.journal.close()

    def validations(self) -> list[tuple[int, dict[str, float]]]:
        """The metrics of each validation, without times."""
        records = [record for record in read_jsonl(self.folder / "metrics.jsonl") if "validation/reward_mean" in record]
        return [
            (
                record["step"],
                {
                    name: value
                    for name, value in record.items()
                    if name.startswith("validation/") and not name.endswith(("_s", "seconds"))
                },
            )
            for record in sorted(records, key=lambda record: record["step"])
        ]

    def validated(self) -> dict[int, float]:
        """Reward by version. A version that was validated twice fails the test."""
        counts = Counter(step for step, _ in self.validations())
        assert set(counts.values()) == {1}, counts
        return {step: metrics["validation/reward_mean"] for step, metrics in self.validations()}


MODES = pytest.mark.parametrize("mode", ["held", "pinned"])
EACH = {step: float(step) for step in range(0, STEPS + 1, INTERVAL)}


@MODES
async def test_background_validation_matches_blocking_validation(tmp_path, mode):
    waits = Rig(tmp_path / "waits", "waits")
    await waits.run()
    rig = Rig(tmp_path / "background", mode)
    gate = rig.gates[2] = asyncio.Event()
    run = asyncio.ensure_future(rig.run())
    await rig.begun[2].wait()
    await rig.trainer.until(4)
    assert 2 not in [step for step, _ in rig.validations()]
    gate.set()
    await run
    assert rig.validations() == waits.validations()
    assert rig.validated() == EACH
    assert rig.trainer.weights == waits.trainer.weights
    steps = [record["step"] for record in read_jsonl(rig.folder / "metrics.jsonl")]
    assert steps.index(3) < max(index for index, step in enumerate(steps) if step == 2), "it is logged after step 3"


async def test_held_generator_serves_only_validation_and_then_rejoins(tmp_path):
    rig = Rig(tmp_path, "held")
    gate = rig.gates[2] = asyncio.Event()
    run = asyncio.ensure_future(rig.run())
    await rig.begun[2].wait()
    await rig.trainer.until(4)
    held, other = sorted(rig.generators, key=lambda generator: generator.loaded[-1])
    assert (held.loaded[-1], other.loaded[-1]) == (2, 3)
    num_before = len([1 for name, version in held.answered if name.startswith("train") and version == 2])
    gate.set()
    await run
    assert len([1 for name, version in held.answered if name.startswith("train") and version == 2]) == num_before
    assert held.loaded[-1] == STEPS


@MODES
async def test_checkpoint_waits_for_a_running_validation(tmp_path, mode):
    rig = Rig(tmp_path, mode, checkpoint_interval=3)
    gate = rig.gates[2] = asyncio.Event()
    run = asyncio.ensure_future(rig.run())
    await rig.begun[2].wait()
    await rig.trainer.until(3)
    for _ in range(200):
        await asyncio.sleep(0)
    assert latest(rig.run_dir.checkpoints) is None
    assert rig.trainer.version == 3
    gate.set()
    await run
    assert latest(rig.run_dir.checkpoints) is not None
    assert "step 3 is saved once the validation at step 2 has ended" in rig.messages


@MODES
async def test_stopped_run_finishes_validation_before_saving(tmp_path, mode):
    rig = Rig(tmp_path, mode, checkpoint_interval=0)
    gate = rig.gates[2] = asyncio.Event()
    run = asyncio.ensure_future(rig.controller.run())
    await rig.begun[2].wait()
    await rig.trainer.until(3)
    run.cancel()
    for _ in range(200):
        await asyncio.sleep(0)
    assert not run.done()
    assert latest(rig.run_dir.checkpoints) is None
    gate.set()
    await asyncio.wait([run])
    assert run.cancelled()
    rig.journal.close()
    rig.trainer.kill()
    assert rig.validated() == {0: 0.0, 2: 2.0}
    assert RunState.read(latest(rig.run_dir.checkpoints)).step == rig.trainer.version > 2  # pyright: ignore


@MODES
async def test_second_stop_skips_a_save_that_would_lose_the_validation(tmp_path, mode):
    rig = Rig(tmp_path, mode, checkpoint_interval=2)
    rig.gates[4] = asyncio.Event()
    run = asyncio.ensure_future(rig.controller.run())
    await rig.begun[4].wait()
    await rig.trainer.until(5)
    run.cancel()
    for _ in range(200):
        await asyncio.sleep(0)
    run.cancel()
    await asyncio.wait([run])
    rig.journal.close()
    rig.trainer.kill()
    assert RunState.read(latest(rig.run_dir.checkpoints)).step == 4  # pyright: ignore
    again = Rig(tmp_path, mode, checkpoint_interval=2)
    await again.run()
    assert again.validated() == EACH


@MODES
async def test_end_of_the_run_waits_for_the_last_validation(tmp_path, mode):
    rig = Rig(tmp_path, mode)
    gate = rig.gates[6] = asyncio.Event()
    run = asyncio.ensure_future(rig.run())
    await rig.begun[6].wait()
    await rig.trainer.until(8)
    for _ in range(200):
        await asyncio.sleep(0)
    assert not run.done()
    assert list(rig.validated()) == [0, 2, 4]
    gate.set()
    await run
    assert rig.validated() == EACH


@MODES
async def test_losing_a_generator_does_not_lose_its_validation(tmp_path, mode):
    rig = Rig(tmp_path, mode)
    gate = rig.gates[2] = asyncio.Event()
    run = asyncio.ensure_future(rig.run())
    await rig.begun[2].wait()
    await rig.trainer.until(4)
    dead = min(rig.generators, key=lambda generator: generator.loaded[-1])
    dead.dead = True
    rig.router.remove_replica(dead.name)
    new = Generator(dead.name, rig)
    rig.generators.append(new)
    assert await rig.router.add_replica(new)
    assert new.loaded == ([2] if mode == "held" else [2, new.loaded[-1]])
    gate.set()
    await run
    assert rig.validated() == EACH
    assert new.loaded[-1] == STEPS


@MODES
async def test_validation_rejects_tokens_of_another_version(tmp_path, mode):
    rig = Rig(tmp_path, mode, checkpoint_interval=2)
    gate = rig.gates[4] = asyncio.Event()
    run = asyncio.ensure_future(rig.run())
    await rig.begun[4].wait()
    await rig.trainer.until(5)
    for generator in rig.generators:
        generator.lies = True
    gate.set()
    with pytest.raises(BaseExceptionGroup) as caught:
        await run
    assert caught.group_contains(TrainingError, match="validation of version 4 has tokens of other versions")
    rig.journal.close()
    assert RunState.read(latest(rig.run_dir.checkpoints)).step == 4  # pyright: ignore
    again = Rig(tmp_path, mode, checkpoint_interval=2)
    await again.run()
    assert again.validated() == EACH


async def test_validation_blocks_training_without_a_spare_generator_or_held_version(tmp_path):
    alone = Rig(tmp_path / "alone", "held", generators=1)
    await alone.run()
    assert alone.validated() == EACH
    assert "training waits for the validation at step 2: too few generators serve to dedicate one" in alone.messages

    plain = Rig(tmp_path / "plain", "held", trainer_of=SavingTrainer)
    for generator in plain.generators:
        generator.pull = lambda version, own=generator: _load(own, version)  # pyright: ignore
    await plain.run()
    assert plain.validated() == EACH
    assert any("cannot keep a published version" in message for message in plain.messages)


async def _load(generator: Generator, version: int) -> int:
    generator.loaded.append(version)
    return version


@MODES
async def test_kill_at_any_moment_neither_loses_nor_repeats_a_validation(tmp_path, mode):
    first = Rig(tmp_path / "run", mode, checkpoint_interval=3)
    moments = set(random.Random(7).sample(range(1, 100), 40 if DEEP else 6))
    killed: list[Path] = []

    def copy_disk(number: int) -> None:
        if number in moments:
            first.journal.drain()
            killed.append(tmp_path / f"killed-{number}")
            shutil.copytree(tmp_path / "run", killed[-1])

    at_each_record(first.journal, copy_disk)
    await first.run()
    assert len(killed) > len(moments) / 2
    undisturbed = {step: json.dumps(metrics) for step, metrics in first.validations()}
    for seed, folder in enumerate(killed):
        again = Rig(folder, mode, seed=seed, checkpoint_interval=3)
        await again.run()
        assert again.validated() == EACH
        assert {step: json.dumps(metrics) for step, metrics in again.validations()} == undisturbed
        assert again.trainer.weights == first.trainer.weights


@MODES
async def test_best_checkpoint_is_kept_although_its_validation_ends_later(tmp_path, mode):
    rig = Rig(tmp_path, mode, keep="best", best=4)
    rig.gates[4] = asyncio.Event()
    running = asyncio.ensure_future(rig.run())
    await asyncio.wait_for(rig.begun[4].wait(), HANG_S)
    await rig.trainer.until(5)
    rig.gates[4].set()
    await running
    assert [step_of(path) for path in list_checkpoints(rig.run_dir.checkpoints)] == [4, STEPS]
    assert best_of(rig.run_dir.checkpoints) == (step_directory(rig.run_dir.checkpoints, 4), 0.0)
    assert rig.controller.held_out == {0: -4.0, 2: -2.0, 4: 0.0, 6: -2.0, 8: -4.0}


@MODES
async def test_validation_that_ended_after_its_checkpoint_counts_after_a_resume(tmp_path, mode):
    rig = Rig(tmp_path, mode, keep="best", best=4)
    await rig.run()
    checkpoints = rig.run_dir.checkpoints
    for path in list_checkpoints(checkpoints)[1:]:
        shutil.rmtree(path)  # the state of step 4 was written before its validation ended
    assert 4 not in RunState.read(step_directory(checkpoints, 4)).held_out
    again = Rig(tmp_path, mode, keep="best", best=4)
    assert again.controller.held_out == {0: -4.0, 2: -2.0, 4: 0.0}
    await again.run()
    assert [step_of(path) for path in list_checkpoints(checkpoints)] == [4, STEPS]
