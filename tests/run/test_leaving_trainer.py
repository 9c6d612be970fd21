"""Trainer that leaves a draining host, on fakes: it is saved, restarts elsewhere, and the results are unchanged."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path

import pytest
from background import HANG_S
from depth import DEEP
from test_trainer_recovery import STEPS, Fate, MortalRig, checkpoints, times_trained, trained_on, undisturbed

from titan_rl.core.errors import NoSpaceError
from titan_rl.run import checkpoint_saver
from titan_rl.training.state.checkpoint import list_checkpoints


class LeavingRig(MortalRig):
    """Rig whose trainer is asked to leave at a given moment."""

    def __init__(self, folder: Path, moment: int, fate: Fate) -> None:
        super().__init__(folder, fate, max_respawns=0, interval=0)
        self.saved: list[tuple[int, list[int]]] = []  # version at the request, and the versions saved after it
        self.leaving: asyncio.Task[None] | None = None
        trainer = fate.trainer

        def tick(now: int) -> None:
            if len(fate.moments) == moment and self.leaving is None:
                self.leaving = asyncio.ensure_future(self.leave())
            trainer.tick(now)

        trainer.at_moment = tick

    async def leave(self) -> None:
        version = self.controller.version
        await self.controller.save_soon()
        self.saved.append((version, [int(name.removeprefix("step-")) for name in checkpoints(self.folder)]))
        self.fate.trainer.excused = True
        self.fate.trainer.end("trainer leaves its host: host a is drained: it is to go")


async def test_leaving_trainer_is_saved_first_at_any_moment(tmp_path: Path) -> None:
    whole = await undisturbed(tmp_path, interval=0)
    before_the_end = whole.fate.moments.index("export")
    for moment in range(0, before_the_end, 1 if DEEP else before_the_end // 6):
        fate = Fate()
        rig = LeavingRig(tmp_path / str(moment), moment, fate)
        await rig.run()
        assert rig.leaving is not None
        await asyncio.wait_for(rig.leaving, HANG_S)
        assert rig.weights == whole.weights
        assert trained_on(fate) == trained_on(whole.fate)
        assert len(set(chain(*rig.weights))) == len(list(chain(*rig.weights)))
        ((asked_at, saved),) = rig.saved
        assert not asked_at or saved[-1] >= asked_at
        if len(fate.trainers) == 2:  # otherwise it left when all work was done
            leaves, *_ = fate.messages
            assert leaves == "trainer leaves its host: host a is drained: it is to go; starting another trainer"
        repeated = [times for version, times in enumerate(times_trained(fate), 1) if saved and version <= saved[-1]]
        assert set(repeated) <= {1}, "saved steps are not trained again"


async def test_save_soon_saves_while_the_run_waits_for_rollouts(tmp_path: Path) -> None:
    rig = MortalRig(tmp_path, Fate(), interval=0)
    pull = rig.replica.pull
    waits = asyncio.Event()

    async def pull_and_wait(version: int) -> None:
        await pull(version)
        if version == 1:
            rig.replica.hold = asyncio.Event()
            waits.set()

    rig.replica.pull = pull_and_wait
    running = asyncio.ensure_future(rig.run())
    await waits.wait()
    async with asyncio.timeout(HANG_S):
        await rig.controller.save_soon()
        assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000001"]
        await rig.controller.save_soon()
    assert not running.done()
    assert rig.replica.hold is not None
    rig.replica.hold.set()
    await running
    assert len(rig.weights) == STEPS


@pytest.mark.parametrize("full", ["before it is copied", "while it is written"])
async def test_save_soon_gives_up_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    rig = MortalRig(tmp_path, Fate(), interval=0)
    pull = rig.replica.pull
    waits = asyncio.Event()

    async def pull_and_wait(version: int) -> None:
        await pull(version)
        if version == 1:
            rig.replica.hold = asyncio.Event()
            waits.set()

    def refuse(*_: object) -> None:
        raise NoSpaceError("no space left")

    rig.replica.pull = pull_and_wait
    running = asyncio.ensure_future(rig.run())
    await waits.wait()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_saver, "require_room" if full == "before it is copied" else "is_complete", refuse)
        async with asyncio.timeout(HANG_S):
            await rig.controller.save_soon()
    assert not running.done()
    async with asyncio.timeout(HANG_S):
        await rig.controller.save_soon()  # there is room again
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000001"]
    assert rig.replica.hold is not None
    rig.replica.hold.set()
    await running
    assert len(rig.weights) == STEPS


async def test_save_soon_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    rig = MortalRig(tmp_path, Fate(), interval=0)
    await rig.controller.save_soon()
    assert not checkpoints(tmp_path)
