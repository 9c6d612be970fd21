"""`titan-rl eval` against an HTTP endpoint, which needs no engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from titan_rl.cli.main import main
from titan_rl.core.errors import ConfigError
from titan_rl.evaluation.evaluate import EvaluationFolder
from titan_rl.run.directory import RunDirectory

TASK = """
from titan_rl import MessageObservation, MessageStep, MessageTokenEnv, RolloutStatus, Rubric, env_reward
from titan_rl.core.settings import Section

class Env:
    def __init__(self, sample): self.sample = sample
    async def reset(self): return MessageObservation([{"role": "user", "content": f"{self.sample} + 1"}])
    async def step(self, message):
        right = message["content"] == str(self.sample + 1)
        return MessageStep(status=RolloutStatus.COMPLETED, rewards={"right": float(right)})
    async def close(self): ...

class Sums(Section):
    tokens: bool = False
    def train_sample(self, seed, index): return index
    def validation_samples(self, count): return list(range(count))
    def make_env(self, sample, renderer): return None if self.tokens else MessageTokenEnv(Env(sample), renderer)
    def rubric(self): return Rubric([env_reward("right")])
"""

CONFIG = """
run_dir = "{runs}"
[model]
path = "there-is-none"
max_context = 64
[sampling]
max_tokens = 8
[scheduling]
max_failed_groups = 3
[validation]
num_prompts = 4
samples_per_prompt = 2
[task]
type = "own_sums:Sums"
"""


class Adder(ThreadingHTTPServer):
    """Endpoint that adds 1 to a number, except to 2, and returns errors for the numbers in `fails_at`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.fails_at: set[str] = set()
        self.interrupts_at: str | None = None
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Adder  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "adder"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.server.keys.add(self.headers["authorization"])
        question = body["messages"][0]["content"].split()[0]
        if question == self.server.interrupts_at:
            os.kill(os.getpid(), signal.SIGINT)
            self.server.interrupts_at = None
            self.server.released.wait(20)
        if question in self.server.fails_at:
            self._answer(400, {"error": {"message": "no sums today"}})
            return
        text = "?" if question == "2" else str(int(question) + 1)
        message = {"role": "assistant", "content": text}
        self._answer(
            200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        )

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        with contextlib.suppress(ConnectionError):  # the command was interrupted while it waited
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def adder() -> Iterator[Adder]:
    server = Adder()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_sums.py").write_text(TASK)
    (tmp_path / "sums.toml").write_text(CONFIG.format(runs=tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    yield tmp_path / "sums.toml"
    sys.modules.pop("own_sums", None)


def evaluate(config: Path, *arguments: str) -> int:
    return main(["eval", str(config), *arguments])


def test_unknown_task_is_reported_before_anything_starts(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(config, "http://127.0.0.1:1/v1", "--tasks", "subtractions") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "--tasks subtractions: the config has no such task; it has sums" in err
    assert not (config.parent / "runs").exists()


def test_evaluates_an_endpoint_and_prints_and_stores_results(
    adder: Adder, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(config, adder.url, "--temperature", "0.5", "--max-tokens", "4", "--body", "{top_k = 3}") == 0
    out, err = capfd.readouterr()
    assert "task sums: 4 prompts, 2 samples each" in out
    assert re.search(r"reward +0\.750 ± 0\.250\n", out)
    assert re.search(r"pass@2 +0\.750", out)
    assert re.search(r"completed +8 of 8", out)
    assert re.search(r"tokens +1\.0", out)
    assert len(adder.asked) == 8
    assert {(body["model"], body["temperature"], body["max_tokens"], body["top_k"]) for body in adder.asked} == {
        ("adder", 0.5, 4, 3)
    }
    assert adder.keys == {"Bearer sesame"}
    assert err.count("titan-rl: next: titan-rl view ") == 1
    folder = Path(err.split("are in ")[1].strip())
    (results,) = folder.glob("*/results.json")
    lines = [json.loads(line) for line in (results.parent / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    questions = {line["messages"][0]["content"] for line in lines}
    assert questions == {"0 + 1", "1 + 1", "2 + 1", "3 + 1"}
    assert json.loads(results.read_text())["tasks"]["sums"]["reward"]["mean"] == 0.75


def test_resumes_an_evaluation_and_compares_two(adder: Adder, config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adder.fails_at = {"1"}
    assert evaluate(config, adder.url, "--out", "first", "--samples", "1", "--json") == 0
    output = json.loads(capfd.readouterr().out)
    (before,) = output["evaluations"]
    assert before["tasks"]["sums"]["statuses"] == {"completed": 3, "error_generate": 1}
    assert before["tasks"]["sums"]["num_unscored"] == 1
    assert "no sums today" in before["tasks"]["sums"]["errors"][0][0]
    adder.fails_at.clear()
    adder.asked.clear()
    assert evaluate(config, adder.url, "--out", "first", "--samples", "1") == 0
    assert [body["messages"][0]["content"] for body in adder.asked] == ["1 + 1"]
    assert evaluate(config, adder.url, "--out", "first", "--samples", "1", "--temperature", "0") == 2
    assert "has an evaluation with other settings" in capfd.readouterr().err

    assert (
        evaluate(config, adder.url, "--out", "second", "--model", "other", "--num-prompts", "3", "--samples", "1") == 0
    )
    first, second = (next(Path(out).glob("*/results.json")).parent for out in ("first", "second"))
    capfd.readouterr()
    assert main(["eval", "--compare", str(first), str(second)]) == 0
    compared = capfd.readouterr().out
    assert "A: adder at" in compared
    assert re.search(r"reward +0\.750 ± 0\.250 +0\.667 ± 0\.333 +\+0\.000 ± 0\.000 \(3 same prompts\)", compared)
    assert main(["eval", "--compare", "--json", str(first), str(second)]) == 0
    output = capfd.readouterr().out
    assert json.loads(output)["differences"][0]["num_paired"] == 3
    assert main(["eval", "--compare", "--json", "first", "second"]) == 0
    assert capfd.readouterr().out == output


def test_compare_rejects_a_missing_folder(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--compare", "nope"]) == 2
    assert "--compare nope: there is no such folder" in capfd.readouterr().err


def test_ctrl_c_prints_partial_results_and_rerun_plays_the_rest(
    adder: Adder, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adder.interrupts_at = "2"
    options = (adder.url, "--out", "out", "--samples", "1", "--in-flight", "1")
    assert evaluate(config, *options) == 130
    adder.released.set()
    out, err = capfd.readouterr()
    assert re.search(r"reward +1\.000 ± 0\.000\n", out)
    assert "stopped early; only the finished prompts are shown" in out
    assert "SIGINT: stopping: the results so far are shown" in err
    assert "stopped; the same command continues with --out out" in err
    adder.asked.clear()
    assert evaluate(config, *options) == 0
    assert sorted(body["messages"][0]["content"] for body in adder.asked) == ["2 + 1", "3 + 1"]
    assert "2 samples are already" in capfd.readouterr().err


def test_repeated_endpoint_errors_end_the_command_with_the_message(
    adder: Adder, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adder.fails_at = {"0", "1", "2", "3"}
    assert evaluate(config, adder.url, "--in-flight", "1") == 1
    out, err = capfd.readouterr()
    assert "3 prompts in a row gave no result for the policy" in err
    assert "no sums today" in err
    assert re.search(r"error_generate +6 of 6", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["http://127.0.0.1:1/v1"],
            "http://127.0.0.1:1/v1/models cannot be reached: ConnectError: All connection attempts",
        ),
        (["http://127.0.0.1:1/v1"], "start a server there, or correct the URL"),
        (
            ["http://127.0.0.1:1", "--model", "m", "--samples", "none"],
            "--samples none: input should be",
        ),
        (["http://127.0.0.1:1", "--model", "m", "--temperature", "0", "--samples", "2"], "would be the same"),
        (["http://127.0.0.1:1", "--model", "m", "--tasks", "Sum"], "has no such task; it has sums"),
        (["nowhere"], "nowhere: there is no such folder"),
        ([], "name a policy after CONFIG.toml"),
    ],
)
def test_invalid_arguments_are_explained(
    config: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(config, *arguments) in (1, 2)
    assert message in capfd.readouterr().err


def as_file(path: Path) -> Path:
    path.write_text("kept")
    return path


def as_broken_link(path: Path) -> Path:
    path.symlink_to(path / "gone")
    return path


def as_evaluation_with_a_folder_as_log(path: Path) -> Path:
    (path / "logs" / "evaluation.log").mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    "make",
    [as_file, lambda path: as_file(path) / "below", as_broken_link, as_evaluation_with_a_folder_as_log],
    ids=["file", "below a file", "broken link", "folder as log"],
)
def test_unusable_out_folder_is_rejected(
    adder: Adder, config: Path, make: Callable[[Path], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    out = make(config.parent / "out")
    assert evaluate(config, adder.url, "--out", str(out)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"titan-rl: --out {out}: the results cannot be written there: ")
    assert line.endswith("; name a folder that you can write to")
    assert not adder.asked


def test_file_in_place_of_a_policys_folder_is_rejected(tmp_path: Path) -> None:
    path = as_file(tmp_path / "policy")
    with pytest.raises(ConfigError, match=f"--out {path}: the results cannot be written there: File exists"):
        EvaluationFolder(path).begin({}, [])


def test_folder_of_a_run_is_rejected_as_out_folder(
    adder: Adder, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(config.parent / "run")
    run.config.write_text("")
    before = sorted(run.path.rglob("*"))
    assert evaluate(config, adder.url, "--out", "run") == 2
    assert capfd.readouterr().err == (
        "titan-rl: --out run: this is the folder of a run; name another folder, such as run/evaluation\n"
    )
    assert sorted(run.path.rglob("*")) == before
    assert not adder.asked


def test_token_task_rejects_a_message_policy(adder: Adder, config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(config, adder.url, "--task.tokens", "true") == 1
    assert "uses tokens, but this policy answers with messages" in capfd.readouterr().err
