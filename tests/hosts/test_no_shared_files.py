"""A host that shares no file system with the controller: the run copies model and code there, and collects the logs of
its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from depth import on_more_hosts
from hosts.namespaces import namespaces
from hosts.scripted import TESTS, run_controller

PROGRAM = """
from titan_rl.config.hosts import HostsConfig
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.settings import RolloutConfig

folder, run, sync, *addresses = sys.argv[1:]

async def main():
    settings = config(
        addresses,
        hosts=HostsConfig(addresses=addresses, sync=sync == "sync"),
        model={"path": f"{folder}/model", "max_context": 256},
        generation=GenerationConfig(engine="brought:make", num_generators=1),
        pythonpath=(f"{folder}/code",),
    )
    async with generators(settings, Path(run)) as (processes, router):
        print("answered", len(await ask(router, 4)))

try:
    asyncio.run(main())
except ConfigError as error:
    print(error)
"""

ENGINE = """
import logging, os
from hosts.scripted import make as scripted

def make(spec):
    logging.info("the model here is %s", open(f"{spec.model_path}/config.json").read())
    return scripted(spec)
"""


@on_more_hosts
def test_sync_copies_model_and_code_and_returns_logs(needs_namespaces: None, tmp_path: Path) -> None:
    folder, runs = tmp_path / "mine", tmp_path / "runs"
    for name in ("model", "code"):
        (folder / name).mkdir(parents=True)
    runs.mkdir()
    (folder / "model" / "config.json").write_text("of this machine")
    (folder / "model" / "model.safetensors").write_bytes(b"0" * 5_000_000)
    (folder / "code" / "brought.py").write_text(ENGINE)
    with namespaces(1, private=[folder, runs]) as hosts:
        (host,) = hosts
        host.start_worker(tmp_path / "worker.txt", env={"PYTHONPATH": f"{TESTS}:{TESTS.parent}"})
        refused = run_controller(PROGRAM, str(folder), str(runs / "first"), "alone", host.worker_address)
        lines = {line.split()[1]: line for line in refused.splitlines() if line.startswith(f"{host.name} ")}
        assert lines.keys() == {"model", "module"}
        assert "no such module" in lines["module"] or "ModuleNotFoundError" in lines["module"]
        run = runs / "second"
        output = run_controller(PROGRAM, str(folder), str(run), "sync", host.worker_address)
        assert "answered 4" in output, output
        assert "the model here is of this machine" in (run / "logs" / "generator-0.log").read_text()
        assert "this host has HostFacts" in (run / "logs" / f"host-{host.name}.log").read_text()
        assert [line for line in host.processes() if "bootstrap_main" in line] == []
        assert host.files(str(folder)) == host.files(str(runs)) == []


@pytest.mark.parametrize(
    ("listen", "error"),
    [
        ("nonsense:", "--listen 'nonsense:' must be HOST or HOST:PORT"),
        ("203.0.113.7:22222", "--listen 203.0.113.7:22222: Cannot assign requested address; name a free port of an"),
    ],
)
def test_invalid_listen_address_error_names_the_problem(listen: str, error: str) -> None:
    command = [sys.executable, "-m", "titan_rl.cli.main", "worker", "--listen", listen]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, timeout=300)
    assert done.returncode == 2
    assert error in done.stderr
