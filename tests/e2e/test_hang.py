"""Real processes of scripted generators here: one that is stopped is replaced, and what it was at goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from hosts.scripted import run_controller

STOP_ONE = """
import signal
from titan_rl.config.sections import GenerationConfig, StateDictConfig

async def main():
    settings = config(
        [],
        generation=GenerationConfig(engine="hosts.scripted:make", num_generators=2),
        statedict=StateDictConfig(),
    )
    async with generators(settings, Path(sys.argv[1])) as (processes, router):
        watching = asyncio.ensure_future(processes.watch(router))
        stopped = {replica.name: replica.remote for replica in processes.replicas}["generator-0"]
        (pid,) = stopped.pids
        asking = asyncio.ensure_future(ask(router, 8, tokens=200))
        while not router.tokens_so_far():
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        answers = await asking
        assert all(len(answer) == 200 for answer in answers)
        print(stopped.reason)
        async with asyncio.timeout(30):
            while len(router.replicas) < 2:
                await asyncio.sleep(0.05)
        print("serving", *[replica.name for replica in router.replicas if replica.serving])
        watching.cancel()
asyncio.run(main())
"""


def test_a_stopped_generator_is_as_dead_as_a_killed_one(tmp_path: Path) -> None:
    said = run_controller(STOP_ONE, str(tmp_path / "run"))
    assert "it has been stopped by a signal for 3 s" in said
    assert "serving generator-1 generator-0" in said
