"""Stopping a run while its trainer is dead, on fakes: the stop does not wait for another trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from test_trainer_recovery import DyingTrainer, Fate, MortalRig, checkpoints

from titan_rl.training.trainer_protocol import StepResult


async def stopped(running: asyncio.Future[None]) -> bool:
    await asyncio.wait([running], timeout=120)
    return running.cancelled()


async def test_stop_does_not_wait_for_a_trainer_without_a_host(tmp_path: Path) -> None:
    fate = Fate(steps=[4])
    rig = MortalRig(tmp_path, fate, interval=2)
    waits = asyncio.Event()

    async def wait_for_a_host() -> DyingTrainer:
        fate.waits_for = "hosts, 60 s at most: none is left"
        waits.set()
        return await asyncio.Future()

    fate.restart = wait_for_a_host
    running = asyncio.ensure_future(rig.run())
    await waits.wait()
    waited_for = rig.controller.waits_for()
    assert waited_for.endswith("; the trainer waits for hosts, 60 s at most: none is left")
    assert "at work" not in waited_for
    running.cancel()
    assert await stopped(running)
    assert [*checkpoints(tmp_path)] == ["step-000002"]
    assert fate.messages[-1] == "step 3 is not saved: trainer died, and the run ends"


async def test_trainer_that_dies_during_a_stop_is_not_restarted(tmp_path: Path) -> None:
    fate = Fate()
    rig = MortalRig(tmp_path, fate, interval=2)
    at_work, trainer = asyncio.Event(), fate.trainer
    step = trainer.step

    async def step_that_takes_time(samples: Sequence[Any]) -> StepResult:
        if trainer.version < 3:
            return await step(samples)
        at_work.set()
        return await trainer.of("step", asyncio.Event().wait)

    trainer.step = step_that_takes_time
    running = asyncio.ensure_future(rig.run())
    await at_work.wait()
    running.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done(), "it finishes the current step"
    trainer.end("trainer died: its host is gone")
    assert await stopped(running)
    assert len(fate.trainers) == 1
    assert [*checkpoints(tmp_path)] == ["step-000002"]
