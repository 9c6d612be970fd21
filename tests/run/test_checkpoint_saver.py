"""Checkpoint schedule, and checkpoints that are slow or do not fit on the disk."""

from __future__ import annotations

import asyncio
import io
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.run import RunConfig
from titan_rl.config.sections import CheckpointConfig
from titan_rl.core.errors import CheckpointError, ConfigError, NoSpaceError
from titan_rl.run import checkpoint_saver
from titan_rl.run.checkpoint_saver import CheckpointSaver
from titan_rl.run.checks import requirements
from titan_rl.run.checks.requirements import check_room, checkpoint_bytes
from titan_rl.run.observability.progress import Progress
from titan_rl.run.stages.training import TrainerCalls
from titan_rl.training.state.checkpoint import step_directory, write_checksums, write_summed

Usage = namedtuple("Usage", "total used free")
SIZE = 100_000_000


class RecordingProgress(Progress):
    """Progress that records its messages."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def warning(self, text: str) -> None:
        self.messages.append(text)


class Disk:
    """Fake run whose trainer writes checkpoints slowly."""

    def __init__(self, root: Path, *, write_s: float, copy_s: float = 0.0) -> None:
        self.root = root
        self.write_s = write_s
        self.copy_s = copy_s
        self.free = 1 << 40
        self.failure: CheckpointError | None = None
        self.saved: list[tuple[int, float]] = []  # version, time of completion
        self.forgotten: list[int] = []
        self.progress = RecordingProgress(0, io.StringIO())
        self.messages = self.progress.messages
        self.version = 0
        self.held_out: dict[int, float] = {}
        self._copied = 0

    def saver(self, **settings: Any) -> CheckpointSaver:
        run: Any = self
        calls, config = TrainerCalls(run), CheckpointConfig(**settings)
        return CheckpointSaver(run, calls, config, self.root, estimate=SIZE, progress=self.progress)

    async def copy_state(self) -> dict[str, Any]:
        await asyncio.sleep(self.copy_s)
        self._copied = self.version
        return {}

    def forget_before(self, version: int) -> None:
        self.forgotten.append(version)

    async def finish_save(self) -> None:
        await asyncio.sleep(self.write_s)
        if self.failure is not None:
            raise self.failure
        folder = step_directory(self.root, self._copied)
        folder.mkdir(parents=True)
        write_checksums(folder, {"run_state.json": write_summed(folder / "run_state.json", "{}")})
        self.saved.append((self._copied, asyncio.get_running_loop().time()))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(tmp_path, write_s=20.0)
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, made.free))
    return made


async def train(disk: Disk, saver: CheckpointSaver, steps: int, *, step_s: float, first: int = 1) -> None:
    """Train like the controller, which writes checkpoints in the background."""
    async with asyncio.TaskGroup() as background:
        for disk.version in range(first, first + steps):
            await asyncio.sleep(step_s)
            if saver.is_due(disk.version):
                await saver.begin(background)


def saver_at(disk: Disk, version: int) -> CheckpointSaver:
    """Return the saver of a run that has reached a version."""
    saver = disk.saver()
    disk.version = version
    return saver


@pytest.mark.looptime
async def test_default_checkpoint_interval_is_ten_minutes(disk: Disk):
    await train(disk, disk.saver(), 100, step_s=60.0)
    assert disk.saved[0][0] <= 12
    gaps = [later - earlier for (_, earlier), (_, later) in zip(disk.saved, disk.saved[1:], strict=False)]
    assert gaps
    assert max(gaps) <= 600 + 60 + 20


@pytest.mark.looptime
async def test_slow_saves_take_at_most_a_tenth_of_the_time(disk: Disk):
    disk.write_s, disk.copy_s = 280.0, 20.0
    await train(disk, disk.saver(), 1000, step_s=30.0)
    time_s = asyncio.get_running_loop().time()
    assert 5 <= len(disk.saved) <= time_s * 0.1 / 300 + 1


@pytest.mark.looptime
async def test_step_and_time_intervals_can_each_be_disabled(disk: Disk):
    disk.write_s = 0.0
    await train(disk, disk.saver(interval=7, interval_s=0.0), 30, step_s=600.0)
    assert [version for version, _ in disk.saved] == [7, 14, 21, 28]
    disk.saved.clear()
    await train(disk, disk.saver(interval=0, interval_s=0.0), 30, step_s=600.0, first=31)
    assert disk.saved == []


@pytest.mark.looptime
async def test_journal_is_kept_for_every_kept_checkpoint(disk: Disk):
    await train(disk, disk.saver(interval=2, interval_s=0.0, keep=2), 8, step_s=30.0)
    assert [version for version, _ in disk.saved] == [2, 4, 6, 8]
    assert disk.forgotten == [2, 2, 4, 6], "records that the older checkpoint needs are kept"


@pytest.mark.looptime
async def test_full_disk_skips_a_checkpoint_and_training_continues(disk: Disk):
    saver = disk.saver(interval=2, interval_s=0.0)
    await train(disk, saver, 3, step_s=1.0)
    disk.free = SIZE // 2
    (disk.root / "step-000002" / "weights").write_bytes(bytes(1000))  # the size of a checkpoint is known by now
    disk.free = 500
    await train(disk, saver, 2, step_s=1.0, first=4)
    assert [version for version, _ in disk.saved] == [2]
    (skipped,) = disk.messages
    assert "no checkpoint of step 4: no space left in" in skipped
    assert str(disk.root) in skipped
    assert "16.8 MB" in skipped, skipped
    assert "0.0 MB are free" in skipped
    assert "the newest is of step 2" in skipped
    disk.free, disk.failure = 1 << 40, NoSpaceError("[Errno 28]")  # another process fills it
    await train(disk, saver, 2, step_s=1.0, first=6)
    assert f"no checkpoint of step 6: no space left in {disk.root}: a checkpoint takes" in disk.messages[-1]
    assert "are free again, now that what was written is removed" in disk.messages[-1]
    disk.failure = None
    await train(disk, saver, 2, step_s=1.0, first=8)
    assert [version for version, _ in disk.saved] == [2, 8]


@pytest.mark.looptime
async def test_last_save_reports_progress_until_it_ends(disk: Disk):
    disk.write_s = 7200.0
    await saver_at(disk, 5).save_last()
    assert disk.saved == [(5, 7200.0)]
    assert disk.messages[0] == f"saving step 5, 100.0 MB, to {step_directory(disk.root, 5)}"
    assert disk.messages[-1] == "step 5 is saved"
    assert len(disk.messages) == 2 + 7200 / checkpoint_saver.REPORT_EVERY_S - 1


@pytest.mark.looptime
async def test_cancelling_ends_the_last_save_at_once(disk: Disk):
    disk.write_s = 7200.0
    saving = asyncio.create_task(saver_at(disk, 5).save_last())
    await asyncio.sleep(100)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert asyncio.get_running_loop().time() == 100
    assert disk.saved == []


@pytest.mark.looptime
async def test_last_save_raises_when_the_disk_is_full(disk: Disk):
    disk.free = SIZE
    with pytest.raises(NoSpaceError, match="no space left") as caught:
        await saver_at(disk, 5).save_last()
    assert disk.messages == [f"saving step 5, 100.0 MB, to {step_directory(disk.root, 5)}"]
    assert "a checkpoint takes 100.0 MB and leaves 16.8 MB for journal, metrics and logs" in str(caught.value)
    assert str(caught.value).endswith("116.8 MB together; 100.0 MB are free")


@pytest.mark.looptime
async def test_other_save_errors_are_not_treated_as_a_full_disk(disk: Disk):
    disk.failure = CheckpointError("input/output error")
    saver = saver_at(disk, 1)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as background:
            await saver.begin(background)
    assert [str(error) for error in caught.value.exceptions] == ["input/output error"]


def make_config(tmp_path: Path, keep: int) -> RunConfig:
    model = tmp_path / "model"
    model.mkdir()
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "BF16", "shape": [1000, 500], "data_offsets": [0, 10**6]},
    }
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(10**6))
    return RunConfig.model_construct(
        run_dir="runs",
        model=RunConfig.model_fields["model"].annotation(path=str(model)),  # pyright: ignore
        checkpoint=CheckpointConfig(keep=keep),
    )


def test_check_room_uses_the_nearest_existing_parent(tmp_path: Path, disk: Disk):
    disk.free = 50_000_000
    check_room(make_config(tmp_path, keep=2), tmp_path / ("x" * 300) / "runs")


def test_check_room_rejects_a_run_that_cannot_fit(tmp_path: Path, disk: Disk):
    config = make_config(tmp_path, keep=2)
    assert checkpoint_bytes(config) == 500_000 * 12
    disk.free = 50_000_000
    check_room(config, tmp_path)
    disk.free = 30_000_000
    with pytest.raises(
        ConfigError, match=r"run_dir = 'runs': .* has 30\.0 MB free, and this run needs 36\.8 MB"
    ) as caught:
        check_room(config, tmp_path)
    assert "checkpoint.keep = 2 checkpoints of 6.0 MB each, the one that is being written, " in str(caught.value)
    assert "2.0 MB of the exported policy, and 16.8 MB for journal, metrics and logs" in str(caught.value)
    check_room(config, tmp_path / "not" / "yet", held=7_000_000)


async def test_journal_is_kept_for_the_newest_checkpoint_and_not_for_the_best(disk: Disk):
    """The best checkpoint may be thousands of steps old, with a journal that grows ever since."""
    disk.held_out = {1: 0.9, 2: 0.5, 3: 0.5}
    saver = disk.saver(keep="best")
    for version in (1, 2, 3):
        disk.version = version
        await saver.save_last()
    assert [path.name for path in sorted(disk.root.iterdir())] == ["step-000001", "step-000003"]
    assert disk.forgotten == [1, 2, 3]


def test_room_for_the_best_checkpoint_is_checked(tmp_path: Path, disk: Disk):
    config = make_config(tmp_path, keep=2)
    best = config.model_copy(update={"checkpoint": CheckpointConfig(keep="best")})
    disk.free = 30_000_000
    with pytest.raises(
        ConfigError, match=r'this run needs 36\.8 MB: checkpoint.keep = "best": 2 checkpoints of 6\.0 MB'
    ):
        check_room(best, tmp_path)
