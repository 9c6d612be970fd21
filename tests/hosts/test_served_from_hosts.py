"""`titan-rl serve` and `titan-rl eval` with scripted generators on other hosts. The server and the rollouts are on this
machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from background import HANG_S
from depth import on_more_hosts
from hosts.namespaces import PROJECT, HostProcess, Namespaces
from hosts.scripted import TESTS, processes_of

MODEL = PROJECT / "examples" / "alphabet_sort" / "base"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{PROJECT}"}


def command(hosts: Namespaces, *words: str) -> list[str]:
    addresses = ",".join(host.worker_address for host in hosts)
    engine = ["--generation.engine", "hosts.scripted:make", "--generation.num_generators", str(len(hosts))]
    return [sys.executable, "-m", "titan_rl.cli.main", *words, *engine, "--hosts.addresses", addresses]


def engines_on(hosts: Namespaces) -> list[int]:
    """Number of a run's processes on each host, without its agent."""
    return [max(sum("bootstrap_main" in line for line in processes_of(host)) - 1, 0) for host in hosts]


@on_more_hosts
def test_serve_uses_engines_on_every_host(hosts: Namespaces, workers: list[HostProcess]) -> None:
    serving = subprocess.Popen(
        command(hosts, "serve", str(MODEL), "--server.port", "0"),
        cwd=PROJECT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert serving.stdout is not None
    try:
        lines = [serving.stdout.readline() for _ in range(2)]
        assert "OPENAI_BASE_URL=http://127.0.0.1:" in lines[1], (lines, serving.communicate(timeout=120))
        url = lines[1].split("=")[1].removesuffix(" OPENAI_API_KEY")
        assert engines_on(hosts) == [1, 1, 1]
        answer = httpx.post(f"{url}/completions", json={"model": "policy", "prompt": "Sort.", "max_tokens": 5})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(HANG_S) == 143
    finally:
        serving.kill()
        serving.communicate()
    assert engines_on(hosts) == [0, 0, 0]


@on_more_hosts
def test_eval_uses_engines_on_every_host(hosts: Namespaces, workers: list[HostProcess], tmp_path: Path) -> None:
    few = ["--num-prompts", "3", "--samples", "2", "--out", str(tmp_path / "out"), "--json"]
    words = ["eval", "examples/alphabet_sort/cpu.toml", str(MODEL), *few]
    done = subprocess.run(
        command(hosts, *words), cwd=PROJECT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["evaluations"]
    (task,) = found["tasks"].values()
    assert task["num_samples"] == 6
    logs = {path.name for path in (tmp_path / "out" / "logs").iterdir()}
    assert {"generator-0.log", "generator-1.log", "generator-2.log"} <= logs
    assert engines_on(hosts) == [0, 0, 0]
