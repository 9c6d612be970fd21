"""Generators that hang, fail or die while starting are replaced. Processes are real; engines are scripted, so that they
start in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from background import HANG_S
from hosts.scripted import run_controller

REPLACED = """
import signal
from e2e.runs import process_writing_to
from titan_rl.config.sections import GenerationConfig, StateDictConfig
from titan_rl.core.errors import EngineDeadError

folder, gate = Path(sys.argv[1]), Path(sys.argv[2])
os.environ[GATE] = str(gate)
log = folder / "logs" / "generator-1.log"

async def serving(processes, router):
    async with asyncio.timeout(HANG_S):
        while [replica.serving for replica in router.replicas] != [True, True]:
            await asyncio.sleep(0.05)
    print("serving", *sorted(replica.name for replica in router.replicas))

async def another_process(than):
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(ProcessLookupError):
                if (pid := process_writing_to(log)) != than:
                    return pid
            await asyncio.sleep(0.05)

async def main():
    settings = config(
        [],
        generation=GenerationConfig(engine="hosts.scripted:make_at_gate", num_generators=2),
        statedict=StateDictConfig(),
    )
    async with generators(settings, folder) as (processes, router), in_background(processes.watch()):
        stopped = {replica.name: replica.remote for replica in processes.replicas}["generator-0"]
        (pid,) = stopped.pids
        asking = asyncio.ensure_future(ask(router, 8, tokens=200))
        while not router.tokens_so_far():
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        answers = await asking
        assert all(len(answer) == 200 for answer in answers)
        print(stopped.reason)
        await serving(processes, router)

        (gate / "open").unlink()
        (ended,) = [replica for replica in processes.replicas if replica.name == "generator-1"]
        first = process_writing_to(log)
        processes.on_replica_failed(ended, EngineDeadError("the engine failed"))
        starting = await another_process(first)
        assert len(router.replicas) == 1
        os.kill(starting, signal.SIGKILL)
        assert await another_process(starting) != first
        (gate / "open").touch()
        await serving(processes, router)
asyncio.run(main())
"""


def test_stopped_failed_or_dying_generators_are_replaced(
    tmp_path: Path,
) -> None:
    (gate := tmp_path / "gate").mkdir()
    (gate / "open").touch()
    program = f"from background import HANG_S, in_background\n{REPLACED}"
    output = run_controller(program, str(tmp_path / "run"), str(gate), timeout_s=HANG_S)
    assert "it has been stopped by a signal for 3 s" in output
    assert output.count("serving generator-0 generator-1") == 2
