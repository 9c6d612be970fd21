"""Generators on hosts other than the controller's."""

from __future__ import annotations

from pathlib import Path

from depth import on_more_hosts
from hosts.namespaces import HostProcess, Namespaces
from hosts.scripted import run_controller

ASK = """
async def main():
    async with generators(config(sys.argv[2:]), Path(sys.argv[1])) as (processes, router):
        answers = await ask(router, 12)
        assert all(len(answer) == 16 for answer in answers)
        print("answered", *[replica.name for replica in router.replicas])
asyncio.run(main())
"""


def addresses_of(hosts: Namespaces) -> list[str]:
    return [host.worker_address for host in hosts]


@on_more_hosts
def test_consecutive_runs_use_every_host_and_leave_nothing(
    hosts: Namespaces, workers: list[HostProcess], tmp_path: Path
) -> None:
    before = [host.files("/dev/shm") for host in hosts]
    for number in range(2):
        run = tmp_path / f"run-{number}"
        output = run_controller(ASK, str(run), *addresses_of(hosts))
        assert "answered generator-0 generator-1 generator-2" in output
        assert "this run listens on" in output
        logs = {path.name for path in (run / "logs").iterdir()}
        assert {f"generator-{index}.log" for index in range(3)} <= logs
    for host in hosts:
        assert [line for line in host.processes() if "bootstrap_main" in line] == []
    assert [host.files("/dev/shm") for host in hosts] == before
