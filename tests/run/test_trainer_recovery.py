"""Recovery of a trainer that dies at any moment, on fakes: results are bitwise those of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from depth import DEEP
from hypothesis import given, settings
from hypothesis import strategies as st
from test_killed_run import Rig, SavingTrainer, steps_reported

from titan_rl.config.sections import ValidationConfig
from titan_rl.core.errors import ActorDiedError, CheckpointError, DamagedCheckpointError, UnavailableWeightsError
from titan_rl.run.directory import read_jsonl
from titan_rl.run.journal.state import RunState
from titan_rl.run.trainer_recovery import JournaledSteps, RecoveringTrainer, TrainerGroup, recovering
from titan_rl.training.state.checkpoint import list_checkpoints
from titan_rl.training.trainer_protocol import StepResult
from titan_rl.weights.types import Manifest, PublishedWeights, Shard

STEPS = 5
VALIDATION = ValidationConfig(num_prompts=1, samples_per_prompt=1, interval=2)


DOING: ContextVar[str] = ContextVar("doing")


class Fate:
    """Moments at which the processes of a run's trainer die.

    Attributes:
        moments: Call that was being executed at each moment.
        trained: Samples of every step that produced a version, in full, by version.
    """

    def __init__(self, deaths: Collection[int] = (), steps: Collection[int] = ()) -> None:
        self.deaths = set(deaths)
        self.deadly_steps = set(steps)
        self.moments: list[str] = []
        self.trainers: list[DyingTrainer] = []
        self.trained: defaultdict[int, list[str]] = defaultdict(list)
        self.messages: list[str] = []
        self.is_back = asyncio.Event()
        self.damaged: set[str] = set()  # names of checkpoints
        self.before_leaving: Callable[[], Awaitable[object]]
        self.waits_for = ""

    def note(self, text: str) -> None:
        self.messages.append(text)
        if "is running again" in text:
            self.is_back.set()

    def start(self) -> DyingTrainer:
        self.trainers.append(DyingTrainer(self))
        return self.trainers[-1]

    @property
    def trainer(self) -> DyingTrainer:
        return self.trainers[-1]

    async def restart(self) -> DyingTrainer:
        trainer = self.start()
        await trainer.starts()
        return trainer


class DyingTrainer(SavingTrainer):
    """Trainer processes whose calls fail once they are dead, including a call that has just finished."""

    excused = False

    def __init__(self, fate: Fate) -> None:
        super().__init__(None)
        self.fate = fate
        self.reason = ""
        self.is_dead = asyncio.Event()
        self.at_moment = self.tick

    def tick(self, moment: int) -> None:
        if len(self.fate.moments) in self.fate.deaths:
            self.end(f"trainer died: killed at moment {len(self.fate.moments)}")
        self.fate.moments.append(DOING.get())

    async def starts(self) -> None:
        await self.of("start", self.take_time)

    async def ended(self) -> str:
        await self.is_dead.wait()
        return self.reason

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.is_dead.set()
        self.kill()

    async def of(self, doing: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        DOING.set(doing)
        work, death = asyncio.ensure_future(call()), asyncio.ensure_future(self.is_dead.wait())
        await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if self.is_dead.is_set():
            work.cancel()
            await asyncio.wait([work])
            raise ActorDiedError(self.reason)
        return work.result()

    async def step(self, samples: Sequence[Any]) -> StepResult:
        if self.version + 1 in self.fate.deadly_steps:
            self.end("trainer died: out of memory")
        result: StepResult = await self.of("step", partial(super().step, samples))
        self.fate.trained[result.version].append(repr(samples))
        return result

    async def begin_publish(self) -> None:
        await self.of("begin_publish", super().begin_publish)

    async def finish_publish(self) -> Manifest:
        manifest: Manifest = await self.of("finish_publish", super().finish_publish)
        return Manifest(manifest.version, (Shard(f"trainer-{self.fate.trainers.index(self)}", 0, 0, ()),))

    async def begin_save(self, root: Path, run_state: dict[str, Any]) -> int:
        return await self.of("begin_save", partial(super().begin_save, root, run_state))

    async def finish_save(self) -> None:
        await self.of("finish_save", super().finish_save)

    async def load(self, checkpoint: Path) -> int:
        await self.of("load", self.take_time)
        if checkpoint.name in self.fate.damaged:
            raise DamagedCheckpointError(f"{checkpoint} is damaged")
        self.weights = json.loads((checkpoint / "weights.json").read_text())
        self.version = len(self.weights)
        return self.version

    async def measure(self, samples: Sequence[Any]) -> float:
        raise NotImplementedError

    async def export(self, path: Path) -> None:
        await self.of("export", self.take_time)
        path.write_text(json.dumps(self.weights))  # noqa: ASYNC240  a small file


class MortalRig(Rig):
    """Run whose trainer dies at the moments of a fate.

    Args:
        group: Processes of the trainer; by default its own.
    """

    recovering: RecoveringTrainer
    published: PublishedWeights

    def __init__(
        self, folder: Path, fate: Fate, *, group: TrainerGroup | None = None, max_respawns: int = 100, **settings: Any
    ) -> None:
        self.fate = fate
        self.folder = folder

        if group is None:
            fate.start()

        def trainer_of(config, journal, published, progress) -> RecoveringTrainer:
            progress.warning = fate.note
            self.published = published
            self.recovering = RecoveringTrainer(
                group or fate,
                steps=JournaledSteps(config, journal, folder),
                checkpoints=folder / "checkpoints",
                published=published,
                max_respawns=max_respawns,
                progress=progress,
            )
            return self.recovering

        folder.mkdir(parents=True, exist_ok=True)
        RunState().write(folder)
        settings = {"steps": STEPS, "validation": VALIDATION, "max_staleness": 0} | settings
        super().__init__(folder, 0, trainer_of=trainer_of, **settings)
        # The rig's own trainer is not used; the trainer with the fate counts the moments.
        self.trainer.at_moment = lambda moment: None

    async def run(self) -> None:
        async with recovering(self.recovering):
            await super().run()

    @property
    def weights(self) -> list[list[str]]:
        return json.loads((self.folder / "export").read_text())


def trained_on(fate: Fate) -> dict[int, str]:
    return {version: given[0] for version, given in fate.trained.items()}


def validated(folder: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(folder / "metrics.jsonl") if "validation/reward_mean" in record]


def checkpoints(folder: Path) -> dict[str, Any]:
    """Return the weights of each checkpoint, by name."""
    found = list_checkpoints(folder / "checkpoints")
    return {path.name: json.loads((path / "weights.json").read_text()) for path in found}


async def undisturbed(folder: Path, **settings: Any) -> MortalRig:
    rig = MortalRig(folder / "undisturbed", Fate(), **settings)
    await rig.run()
    return rig


async def disturbed(folder: Path, fate: Fate, whole: MortalRig, **settings: Any) -> MortalRig:
    """Run with deaths, and compare the results with those of `whole`."""
    rig = MortalRig(folder / "disturbed", fate, **settings)
    await rig.run()
    assert len(rig.weights) == STEPS
    assert sorted(chain(*rig.weights)) == sorted(chain(*whole.weights)), "each group is trained once"
    assert [len(set(given)) for given in fate.trained.values()] == [1] * STEPS, "a repeated step gets the same samples"
    assert rig.replica.pulled == sorted(set(rig.replica.pulled)), "loaded versions never decrease"
    assert steps_reported(rig.folder) == list(range(1, STEPS + 1)), "each step is reported once"
    assert validated(rig.folder) == validated(whole.folder)
    assert checkpoints(rig.folder) == checkpoints(whole.folder)
    requests = sorted(rig.replica.asked)
    assert requests == sorted(whole.replica.asked), "nothing is generated again"
    return rig


@pytest.mark.parametrize("staleness", [0, 1])
async def test_trainer_death_in_any_call_does_not_change_the_results(tmp_path: Path, staleness: int) -> None:
    """The trainer dies at the first and at the last moment of each kind of call."""
    whole = await undisturbed(tmp_path, max_staleness=staleness)
    moments = whole.fate.moments
    kinds = set(moments)
    assert kinds == {"step", "begin_publish", "finish_publish", "begin_save", "finish_save", "export"}
    chosen = {moments.index(kind) for kind in kinds} | {len(moments) - 1 - moments[::-1].index(kind) for kind in kinds}
    for moment in range(len(moments)) if DEEP else sorted(chosen):
        fate = Fate([moment])
        rig = await disturbed(tmp_path / str(moment), fate, whole, max_staleness=staleness)
        assert len(fate.trainers) == 2
        if not staleness:
            assert rig.weights == whole.weights
            assert trained_on(fate) == trained_on(whole.fate)


@settings(deadline=None, max_examples=200 if DEEP else 8)
@given(st.sets(st.integers(0, 80), max_size=6), st.sampled_from([1, 2, 4, 10]))
def test_repeated_trainer_deaths_train_each_group_once(deaths: set[int], interval: int) -> None:
    async def run(folder: Path) -> None:
        whole = await undisturbed(folder, interval=interval)
        rig = await disturbed(folder, Fate(deaths), whole, interval=interval)
        assert rig.weights == whole.weights

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


def times_trained(fate: Fate) -> list[int]:
    """Return how often each step was trained, from the first."""
    return [len(fate.trained[version]) for version in sorted(fate.trained)]


async def death_at_the_end(folder: Path, fate: Fate, **settings: Any) -> MortalRig:
    """Run with a death in the export, the last call."""
    whole = await undisturbed(folder, **settings)
    fate.deaths.add(whole.fate.moments.index("export"))
    return await disturbed(folder, fate, whole, **settings)


async def test_steps_since_the_newest_whole_checkpoint_are_repeated(tmp_path: Path) -> None:
    fate = Fate()
    rig = await death_at_the_end(tmp_path / "whole", fate, interval=3)
    assert times_trained(fate) == [1] * STEPS, "the last checkpoint has them all"

    fate = Fate()
    fate.damaged = {"step-000005"}
    rig = await death_at_the_end(tmp_path / "damaged", fate, interval=3)
    assert times_trained(fate) == [1, 1, 1, 2, 2]
    (death, damage, recovered) = fate.messages
    assert death.startswith("trainer died: killed at moment")
    assert death.endswith("; starting another trainer (1 of hosts.max_respawns = 100)")
    assert damage.endswith("step-000005 is damaged; an older checkpoint takes its place")
    assert f"at version 5: 2 steps were trained again from {rig.folder}/checkpoints/step-000003" in recovered


async def test_recovery_cost_is_in_the_step_metrics(tmp_path: Path) -> None:
    whole = await undisturbed(tmp_path)
    moments = [moment for moment, doing in enumerate(whole.fate.moments) if doing == "step"]
    rig = await disturbed(tmp_path, Fate([moments[4]]), whole)
    records = {r["step"]: r for r in read_jsonl(rig.folder / "metrics.jsonl") if "train/loss" in r}
    assert [step for step, record in records.items() if "train/respawns" in record] == [3]
    assert records[3]["train/respawns"] == 1
    assert records[3]["train/recovery_s"] > 0


async def test_host_loss_while_the_trainer_starts_is_not_a_trainer_death(tmp_path: Path) -> None:
    whole = await undisturbed(tmp_path)
    fate = Fate([whole.fate.moments.index("step")])
    restart, losses = fate.restart, ["b", "c", "d"]

    async def restart_on_hosts_that_go() -> DyingTrainer:
        if losses:
            raise ActorDiedError(f"trainer died: host {losses.pop(0)} is lost: nothing is heard of it", excused=True)
        return await restart()

    fate.restart = restart_on_hosts_that_go
    await disturbed(tmp_path, fate, whole, max_respawns=1)
    assert [text.partition(";")[2] for text in fate.messages[:4]] == [
        " it was at step 1; starting another trainer (1 of hosts.max_respawns = 1)",
        *[" starting another trainer"] * 3,
    ]


async def test_recovery_republishes_the_version_of_the_generators(tmp_path: Path) -> None:
    rig = await death_at_the_end(tmp_path, Fate())
    (shard,) = rig.published.manifest_of(STEPS).shards
    assert shard.location == "trainer-1", "a generator that starts now can load it"


async def test_pull_interrupted_by_a_trainer_death_is_repeated(tmp_path: Path) -> None:
    whole = await undisturbed(tmp_path)
    fate = Fate()
    rig = MortalRig(tmp_path / "disturbed", fate)
    pull = rig.replica.pull

    async def pull_from_its_memory(version: int) -> None:
        trainer = fate.trainer
        if version == 3 and len(fate.trainers) == 1:
            trainer.end("trainer died: its host is gone")
        (shard,) = rig.published.manifest_of(version).shards
        if trainer.is_dead.is_set():
            raise UnavailableWeightsError(f"{shard.location} does not answer")
        await pull(version)

    rig.replica.pull = pull_from_its_memory
    await rig.run()
    assert len(fate.trainers) == 2
    assert rig.replica.pulled == list(range(STEPS + 1))
    assert rig.weights == whole.weights


async def test_death_of_an_idle_trainer_is_recovered_at_once(tmp_path: Path) -> None:
    fate = Fate()
    rig = MortalRig(tmp_path, fate)
    rig.replica.hold = asyncio.Event()
    pull = rig.replica.pull

    async def pull_and_die(version: int) -> None:
        await pull(version)
        if version == 0:
            fate.trainers[0].end("trainer died: killed while generators are at work")

    rig.replica.pull = pull_and_die
    running = asyncio.ensure_future(rig.run())
    await fate.is_back.wait()
    rig.replica.hold.set()
    await running
    assert len(fate.trainers) == 2
    assert len(rig.weights) == STEPS


async def test_step_that_always_kills_the_trainer_ends_the_run(tmp_path: Path) -> None:
    fate = Fate(steps=[4])
    rig = MortalRig(tmp_path, fate, max_respawns=2, interval=2)
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(
        ActorDiedError,
        match=r"out of memory; it was at step 4 at 3 of its deaths, .*: train-9, train-10, train-11, and is not "
        r"replaced: hosts.max_respawns = 2, and 2 were replaced before",
    )
    assert times_trained(fate) == [1, 1, 3], "from the checkpoint of step 2 on"
    assert list(checkpoints(tmp_path)) == ["step-000002"]
    resumed = Rig(tmp_path, 1, steps=STEPS, interval=2, validation=VALIDATION, max_staleness=0)
    await resumed.run()
    assert len(resumed.trainer.weights) == STEPS, "the run can be resumed where the step does not kill"


async def test_recovery_names_a_step_missing_from_the_journal(tmp_path: Path) -> None:
    fate = Fate()
    rig = MortalRig(tmp_path, fate, interval=0)
    pull = rig.replica.pull

    async def pull_and_lose(version: int) -> None:
        await pull(version)
        if version == 2:
            rig.journal.drain()
            (segment,) = (tmp_path / "journal").iterdir()
            segment.write_bytes(b"")
            fate.trainers[0].end("trainer died: with its disk")

    rig.replica.pull = pull_and_lose
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(CheckpointError, match="journal lacks the batch of step 1")
