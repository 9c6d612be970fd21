"""A server with generators in separate processes. Engines are scripted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.runs import process_writing_to

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

ROOT = Path(__file__).parents[2]

ENGINE = """
from titan_rl.generation.scripted_engine import ScriptedEngine

def make(spec):
    return ScriptedEngine(vocab_size=500, max_context=spec.max_context)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server process and its address."""
    (tmp_path / "own_engine.py").write_text(ENGINE)
    run, example = tmp_path / "run", ROOT / "examples" / "alphabet_sort"
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    shutil.copy(example / "cpu.toml", run / "config.toml")
    shutil.copytree(example / "base", run / "export")
    os.utime(run / "export")
    options = ["--generation.engine", "own_engine:make", "--generation.num_generators", "1", "--server.port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_rl.cli.main", "serve", str(run), *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "TITAN_RL_API_KEY": "sesame"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert "OPENAI_BASE_URL=http://127.0.0.1:" in lines[1], (lines, process.communicate(timeout=240))
        yield process, lines[1].split("=")[1].removesuffix(" OPENAI_API_KEY")
    finally:
        process.kill()
        process.communicate()


def ask(url: str) -> httpx.Response:
    body: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Sort."}], "max_tokens": 5}
    return httpx.post(
        f"{url}/chat/completions", json=body, headers={"authorization": "Bearer sesame"}, timeout=300
    ).raise_for_status()


def test_server_replaces_generator_hides_api_key_and_stops_cleanly(
    server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, url = server
    assert httpx.get(f"{url}/models").status_code == 401
    before = ask(url).json()
    assert before["choices"][0]["weight_versions"] == [{"version": "3", "start": 0, "end": 5}]
    (logs,) = tmp_path.glob("titan_rl-serve-*/logs")
    generator = process_writing_to(logs / "generator-0.log")
    assert b"TITAN_RL_API_KEY" not in Path(f"/proc/{generator}/environ").read_bytes()
    os.kill(generator, signal.SIGKILL)
    after = ask(url).json()
    assert after["choices"][0]["message"] == before["choices"][0]["message"]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "generator-0 died" in errors
    assert not list(tmp_path.glob("titan_rl-*"))
