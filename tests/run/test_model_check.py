"""Check of a model folder: it reports the results, errors, crashes and hangs of its processes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan_rl.cli.main import main
from titan_rl.core.errors import ModelError
from titan_rl.run.checks import model_check
from titan_rl.run.checks.model_check import CheckedModel, ModelOutcome, check_model, in_a_line, read_model
from titan_rl.training.numerical_check import NumericalCheck

RIGHT = NumericalCheck("logprobs", "A against B", 1e-6, 2e-5, "nats")
WRONG = NumericalCheck("hot swaps", "A against B", 0.5, 2e-5, "nats")


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Any], Path]:
    def make(config: Any) -> Path:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return tmp_path

    return make


def model(folder: Path) -> CheckedModel:
    return CheckedModel(folder, "qwen2", "transformers", "torchtitan lacks it")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json cannot be read: .*; download it again"),
        ({"hidden_size": 3}, "config.json has model_type None; it must be the name of a family, such as 'qwen2'"),
        ([1], "config.json has model_type None"),
    ],
)
def test_unusable_config_json_is_rejected_with_the_reason(
    config: Any, message: str, make: Callable[[Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(config)
    with pytest.raises(ModelError, match=message):
        read_model(folder)
    assert main(["doctor", "--model", str(folder)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "rwkv"},
            "no, this model cannot be trained: model_type 'rwkv' is refused: its blocks pass",
        ),
        ({"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}}, "quantized (awq)"),
    ],
)
def test_untrainable_model_is_reported_in_one_line(
    config: Any, message: str, make: Callable[[Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", str(make(config))]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.endswith("docs/reference/models.md lists the families that can")


def test_model_option_requires_a_folder_with_config_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert f"--model {tmp_path} has no config.json; give a folder" in capsys.readouterr().err
    assert main(["doctor", "--model", "Qwen/Qwen2.5-0.5B"]) == 2
    assert "--model Qwen/Qwen2.5-0.5B is not a folder; give a folder" in capsys.readouterr().err


def test_read_model_resolves_the_auto_implementation(make: Callable[[Any], Path]) -> None:
    found = read_model(make({"model_type": "qwen2"}))
    assert (found.model_type, found.implementation) == ("qwen2", "transformers")
    assert read_model(make({"model_type": "qwen3"})).implementation == "torchtitan"


def test_process_errors_crashes_and_hangs_are_reported(
    make: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[int] = []
    popen = model_check.subprocess.Popen

    def start(code: str) -> None:
        def instead(command: list[str], **kwargs: Any) -> Any:
            process = popen([command[0], "-c", code, *command[3:]], **kwargs)
            started.append(process.pid)
            return process

        monkeypatch.setattr("titan_rl.run.checks.model_check.subprocess.Popen", instead)

    def problems(limit_s: float = 60.0) -> set[str | None]:
        return {outcome.problem for outcome in check_model(model(make({})), limit_s=limit_s)}

    start("raise SystemExit('no such device')")
    assert problems() == {"no such device"}
    start("import os; os.abort()")
    assert problems() == {"its process ended with code -6"}
    start("while True: pass")
    assert problems(0.2) == {"it did not end within 0.2 s"}
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_error_without_a_message_is_shown_by_its_line(tmp_path: Path) -> None:
    def load() -> None:
        assert tmp_path is None

    with pytest.raises(AssertionError) as raised:
        load()
    error = raised.value
    error.args = ()
    assert re.search(
        r"AssertionError at .*test_model_check.py:\d+: assert tmp_path is None", in_a_line(error, tmp_path)
    )


def test_unchecked_trainer_has_no_next_command(
    make: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = ModelOutcome("trainer", problem="transformers cannot build a tiny qwen2")
    monkeypatch.setattr("titan_rl.cli.doctor.check_model", lambda _: iter([outcome]))
    assert main(["doctor", "--model", str(make({"model_type": "qwen2"}))]) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("titan-rl: not known whether a run can train 'qwen2'")
    assert message.endswith("the trainer could not be checked here, as the line above says")


@pytest.mark.parametrize(
    ("outcomes", "code", "verdict", "following"),
    [
        (
            [ModelOutcome("trainer", RIGHT), ModelOutcome("engine", RIGHT)],
            0, "yes, a run can train 'qwen2'", "train CONFIG",
        ),
        (
            [ModelOutcome("trainer", WRONG), ModelOutcome("engine", RIGHT)],
            1, "no, a run cannot train 'qwen2'", "doctor",
        ),
        (
            [ModelOutcome("trainer", RIGHT), ModelOutcome("engine", WRONG)],
            1, "no, a run cannot sample 'qwen2'", "sft CONFIG",
        ),
        (
            [ModelOutcome("trainer", RIGHT), ModelOutcome("engine", problem="vLLM does not have it")],
            1, "not known whether a run can sample 'qwen2', with the transformers implementation", "train CONFIG",
        ),
        (
            [ModelOutcome("trainer", WRONG), ModelOutcome("engine", problem="it did not end within 300 s")],
            1, "no, a run cannot train 'qwen2'", "doctor",
        ),
        (
            [ModelOutcome("trainer", problem="killed"), ModelOutcome("engine", WRONG)],
            1, "no, a run cannot sample 'qwen2'", "sft CONFIG",
        ),
    ],
)  # fmt: skip
def test_verdict_names_the_difference_and_the_next_command(
    outcomes: list[ModelOutcome],
    code: int,
    verdict: str,
    following: str,
    make: Callable[[Any], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("titan_rl.cli.doctor.check_model", lambda _: iter(outcomes))
    folder = make({"model_type": "qwen2"})
    assert main(["doctor", "--model", str(folder)]) == code
    printed = capsys.readouterr()
    message, then = printed.err.splitlines()
    assert verdict in message
    assert f"next: titan-rl {following}" in then
    assert len(printed.out.splitlines()) == len(outcomes)
    for outcome in outcomes:
        label = "ok" if outcome.is_right else "unknown" if outcome.comparison is None else "wrong"
        assert any(line.startswith(f"{label} ") for line in printed.out.splitlines())
    main(["doctor", "--model", str(folder), "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["is_right"] for line in lines] == [outcome.is_right for outcome in outcomes]


def test_nan_difference_is_too_large() -> None:
    assert not NumericalCheck("logprobs", "A against B", float("nan"), 2e-5, "nats").holds
