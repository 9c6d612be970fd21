"""The environment variables that a run sets for its processes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from titan_rl.run.process.environment import run_environment

PROBE = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['TOKENIZERS_PARALLELISM'])"


def seen_by_a_child() -> list[str]:
    return subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True).stdout.split()


def test_user_environment_variables_reach_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with run_environment():
        assert seen_by_a_child() == ["3", "true"]
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_unset_variables_are_set_only_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    scratch = tempfile.gettempdir()
    with run_environment():
        assert seen_by_a_child() == ["1", "false"]
        assert tempfile.gettempdir() != scratch
    assert "OMP_NUM_THREADS" not in os.environ
    assert tempfile.gettempdir() == scratch


def test_child_processes_get_the_module_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = [sys.executable, "-P", "-c", "import sys; print(*sys.path)"]
    for before, path in (("/of/the/user", ["/here", "/there", "/of/the/user"]), (None, ["/here", "/there"])):
        if before is None:
            monkeypatch.delenv("PYTHONPATH")
        else:
            monkeypatch.setenv("PYTHONPATH", before)
        with run_environment(["/here", "/there"]):
            shown = subprocess.run(probe, check=True, capture_output=True, text=True).stdout.split()
        assert shown[: len(path)] == path
        assert os.environ.get("PYTHONPATH") == before


HOLDING = """
import os, sys, tempfile
from titan_rl.run.process.environment import process_scratch, run_environment

with run_environment():
    first = tempfile.gettempdir()
    open(os.path.join(first, "file"), "w").close()
kept = process_scratch()
with run_environment():
    assert tempfile.gettempdir() != first and not os.path.exists(first)
    assert process_scratch() == kept and os.listdir(kept) == [os.path.basename(tempfile.gettempdir())]
print(kept, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_scratch_folder_is_shared_by_runs_and_removed_with_the_process(killed: bool) -> None:
    holding = subprocess.Popen(
        [sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holding.stdout is not None
    kept = Path(holding.stdout.readline().strip())
    assert kept.is_dir()
    if killed:
        holding.kill()
    # The guard also has standard output open, and closes it once it is done.
    holding.communicate("\n" if not killed else None, timeout=300)
    assert not kept.exists()
