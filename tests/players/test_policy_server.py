"""`serving`: the server of a policy is restarted only with the model with which the run began."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from user_project import write_tensors

from titan_rl.core.console import Console
from titan_rl.core.errors import ModelError
from titan_rl.core.model_identity import model_identity
from titan_rl.tasks import policy_servers
from titan_rl.tasks.policy_servers import serving

SERVER = """#!/bin/sh
echo started >> {folder}/starts
echo OPENAI_BASE_URL=http://127.0.0.1:1234/v1
while [ ! -e {folder}/die ]; do sleep 0.02; done
rm {folder}/die
"""


class Lines(Console):
    """Console that keeps its warnings."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def message(self, text: str) -> None: ...

    def warning(self, text: str) -> None:
        self.lines.put_nowait(text)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose server runs until the file `die` exists."""
    program = tmp_path / "server"
    program.write_text(SERVER.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setattr(policy_servers, "sys", SimpleNamespace(executable=str(program)))
    monkeypatch.setattr(policy_servers, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(policy_servers, "_LONGEST_PAUSE_S", 0.02)
    assert sys.executable != str(program)
    model = tmp_path / "model"
    model.mkdir()
    write_tensors(model / "model.safetensors", "a")
    return model


def served(model: Path, console: Lines):
    return serving(
        str(model),
        model.parent / "log",
        max_context=16,
        settings={},
        start_s=30,
        timeout_s=1,
        run=model.parent,
        console=console,
    )


def num_starts(model: Path) -> int:
    return (model.parent / "starts").read_text().count("started")


async def starts(model: Path, count: int) -> None:
    async with asyncio.timeout(30):
        while num_starts(model) < count:  # noqa: ASYNC110  the process only writes a file
            await asyncio.sleep(0.02)


async def test_server_that_died_is_not_restarted_with_another_model(model: Path) -> None:
    console = Lines()
    async with served(model, console):
        (model.parent / "die").touch()
        await starts(model, 2)
        write_tensors(model / "model.safetensors", "b")
        (model.parent / "die").touch()
        async with asyncio.timeout(30):
            warning = await console.lines.get()
        assert warning == f"{model} is not served: weights changed since the run began; put that model back"
        assert num_starts(model) == 2
        write_tensors(model / "model.safetensors", "a")
        await starts(model, 3)


async def test_server_of_a_replaced_worker_is_compared_with_the_beginning_of_the_run(model: Path) -> None:
    identity = {"folder": str(model), **model_identity(model)}
    state = {"inputs": {"models": {"tasks.a.seats.b.policy": identity}}}
    (model.parent / "run_state.json").write_text(json.dumps(state))
    async with served(model, Lines()):
        pass
    write_tensors(model / "model.safetensors", "b")
    with pytest.raises(ModelError, match="weights changed since the run began"):
        async with served(model, Lines()):
            pytest.fail("served")
