"""`titan-rl init`: a new package from a template or an example."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S

from titan_rl.cli.init import TEMPLATES, example_names
from titan_rl.cli.main import main
from titan_rl.config.load import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def work_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_template_package_passes_its_tests_and_loads_its_settings(template: str, capsys: pytest.CaptureFixture[str]):
    name = f"my_{template.replace('-', '_')}"
    assert main(["init", name, "--template", template]) == 0
    streams = capsys.readouterr()
    created = {str(path) for path in Path(name).rglob("*") if path.is_file()}
    assert set(streams.out.splitlines()) == created
    assert f"cd {name} && titan-rl sft config.toml" in streams.err

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(tests, cwd=name, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "warn" not in done.stdout + done.stderr

    checked = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,W,I,UP,B,RUF", "--line-length=120"]
    linted = subprocess.run(checked, cwd=name, capture_output=True, text=True, timeout=300)
    assert linted.returncode == 0, linted.stdout

    config = load_config(Path(name) / "config.toml", check_files=False)
    (source,) = config.tasks
    assert type(source.task).__module__ == f"{name}.task"
    assert source.task.rubric().error_reward == 0.0  # otherwise unparsable answers would go unpunished
    assert config.model.renderer == ("chat_template" if template == "multi-turn" else "auto")
    assert config.pythonpath == (str(Path(name).resolve()),)
    (demonstration,) = source.task.demonstrations(1)  # type: ignore[attr-defined]
    assert [message["role"] for message in demonstration.messages][:2] == ["user", "assistant"]


def test_model_option_uses_a_hugging_face_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    assert main(["init", "deep/own_task", "--model", "models/mine"]) == 0
    assert "cd deep/own_task && titan-rl train config.toml --dry-run" in capsys.readouterr().err
    config = load_config("deep/own_task/config.toml", check_files=False)
    assert config.model.path == str(tmp_path / "models" / "mine")
    assert "titan-rl sft" not in Path("deep/own_task/README.md").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["my-task"], "'my-task' is not a valid name of a Python package; use my_task"),
        (["café"], "'café' is not a valid name of a Python package; use cafe"),
        (["class"], "'class' is not a valid name of a Python package; use my_task"),
        (["a/b/2x"], "'2x' is not a valid name of a Python package; use my_task"),
        (["random"], "'random' is an existing module"),
        (["pytest"], "'pytest' is an existing module"),
        (["tests"], "'tests' is an existing module"),
        (["full"], "full is not empty, and nothing is overwritten"),
        (["a_file"], "a_file is a file; name a new folder"),
        (["mine_alone", "--model", "nowhere"], "--model nowhere: there is no model"),
        (["mine_alone", "--size", "0"], "--size 0 must be a number of parameters"),
    ],
)
def test_invalid_arguments_are_rejected_and_nothing_is_written(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    (tmp_path / "a_file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["init", *argv]) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert streams.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_existing_empty_folder_is_accepted(tmp_path: Path):
    (tmp_path / "another").mkdir()
    assert main(["init", "another"]) == 0
    assert (tmp_path / "another" / "another" / "task.py").is_file()


@pytest.mark.parametrize("example", example_names())
def test_example_is_copied_under_a_new_name(example: str, capsys: pytest.CaptureFixture[str]):
    name = f"own_{example}"
    assert main(["init", f"deep/{name}", "--example", example]) == 0
    streams = capsys.readouterr()
    files = {path for path in Path("deep").rglob("*") if path.is_file()}
    assert {Path(line) for line in streams.out.splitlines()} == files
    texts = [path.read_text() for path in files if path.suffix in (".py", ".toml", ".md")]
    assert not any(f"examples.{example}" in text or f"examples/{example}" in text for text in texts)
    config = load_config(f"deep/{name}/cpu.toml", check_files=False)
    assert all(type(source.task).__module__.split(".")[0] in (name, "titan_rl") for source in config.tasks)
    has_model = (Path("deep") / name / "base").is_dir()
    assert (f"titan-rl train deep/{name}/cpu.toml" in streams.err) == has_model


def test_unknown_example_error_lists_the_examples(capsys: pytest.CaptureFixture[str]):
    assert main(["init", "mine", "--example", "chess"]) == 2
    assert "there is no such example; the examples are agent, alphabet_sort, arithmetic" in capsys.readouterr().err
    assert not Path("mine").exists()


@pytest.mark.parametrize(
    "option", ["--model=somewhere", "--template=tools", "--level=byte", "--size=1000000"], ids=lambda text: text[2:7]
)
def test_option_of_templates_is_rejected_with_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--example", "arithmetic", option]) == 2
    name = option.partition("=")[0]
    assert f"{name} has no effect with --example arithmetic; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_example_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept.txt").write_text("mine")
    assert main(["init", "mine", "--example", "arithmetic"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["kept.txt"]
