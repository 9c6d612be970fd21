"""Commands that are given the folder of a run of several adapters, or of one adapter of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft_files import BASE

from titan_rl.cli.main import main
from titan_rl.config.load import dump_config, load_config

SEVERAL = "examples/alphabet_sort/several.toml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose adapter "grpo" has begun."""
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    run = tmp_path / "run"
    for folder, settings in ((run, config), (run / "adapters" / "grpo", config.experiments["grpo"])):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.toml").write_text(dump_config(settings))
    return run


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "RUN"],
        ["eval", SEVERAL, "RUN"],
        ["play", SEVERAL, "--policy", "RUN"],
        ["export", "RUN", "OUT"],
        ["export", "RUN", "OUT", "--adapter"],
    ],
)
def test_a_run_of_several_adapters_is_no_policy_and_its_adapters_are_named(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"RUN": str(run), "OUT": str(run / "out")}
    assert main([paths.get(word, word) for word in command]) == 2
    told = capsys.readouterr().err
    assert f"{run} is a run of several adapters, each of which is a policy; name one of them: " in told
    assert f"{run}/adapters/grpo, {run}/adapters/gspo, {run}/adapters/rank_8" in told


def test_an_adapter_is_resumed_with_its_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(run / "adapters" / "grpo"), "--training.steps", "99"]) == 2
    told = capsys.readouterr().err
    assert f"continue together: titan-rl train --resume {run}; for more steps" in told
    assert "--adapters.grpo.training.steps N" in told
