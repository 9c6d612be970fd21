from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl.cli.main import main
from titan_rl.config.load import dump_config, load_config
from titan_rl.core.errors import ConfigError

ROOT = Path(__file__).parents[2]


def failure(paths: list[str], *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(paths, overrides)
    return str(caught.value)


def test_files_merge_tables_and_the_last_value_wins(project: Path):
    Path("more.toml").write_text('run_dir = "b"\n[training]\nsteps = 6\n[task]\nwords = ["b"]\n[sampling]\n')
    Path("most.toml").write_text("[training]\nsteps = 7\nbetas = [0.5, 0.6]\n")

    config = load_config(["config.toml", "more.toml", "most.toml"], [("training.betas", "[0.7, 0.8]")])

    assert (config.training.steps, config.training.lr, config.training.betas) == (7, 1.0, (0.7, 0.8))
    assert (config.seed, config.run_dir, config.tasks[0].task.train_sample(0, 1)) == (7, "b", "b")
    assert load_config(["most.toml", "more.toml", "config.toml"]).training.steps == 5


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[training]\nstepz = 6", [], "more.toml: training.stepz = 6 is not a setting; nearest: training.steps"),
        ("[training]\nbetas = [0.1, 2.0]", [], "more.toml: training.betas[1] = 2.0 must be less than 1"),
        ('[training]\nlr_decay = "x"', [], "more.toml: training.lr_decay = 'x' must be"),
        ("training = 3", [], "more.toml: training = 3 must be a table"),
        ("[task]\nlenght = 3", [], "more.toml: task.lenght = 3 is not a setting; nearest: task.length"),
        ('[task]\ntype = "echo_task:Eco"', [], "more.toml: task.type = 'echo_task:Eco': echo_task has no Eco"),
        ('[training]\nloss = "grpoo"', [], "more.toml: training.loss = 'grpoo' must be one of grpo, gspo,"),
        ('[model]\npath = "absent"', [], "model.path = 'absent' is not a folder"),
        ("[training]\nsteps = 6", [("training.lr", "x")], "command line: training.lr = 'x'"),
        ("[training]\nwarmup_steps = 6", [], "config.toml and more.toml: training.warmup_steps = 6 is more than"),
        ("seed = 1", [("training.warmup_steps", "6")], "config.toml and more.toml and the command line: training.war"),
        ("seed = [", [], "more.toml: not valid TOML"),
    ],
)
def test_errors_name_the_file_of_the_value(project: Path, text: str, overrides: list, message: str):
    Path("more.toml").write_text(text)
    assert message in failure(["config.toml", "more.toml"], *overrides)
    Path("last.toml").write_text("[rollout]\ngroup_size = 4\n")
    assert message.partition(": ")[2] in failure(["config.toml", "more.toml", "last.toml"], *overrides)


def test_model_folder_is_resolved_next_to_the_file_that_names_it(project: Path):
    for name in ("a", "b"):
        Path(name).mkdir()
        shutil.copytree("policy", f"{name}/own")
    Path("a/a.toml").write_text('[model]\npath = "own"\n')
    Path("b/b.toml").write_text("seed = 9\n")
    assert load_config(["config.toml", "a/a.toml", "b/b.toml"]).model.path == str(project / "a" / "own")
    assert load_config(["config.toml", "b/b.toml"], [("model.path", "own")]).model.path == str(project / "b" / "own")


@pytest.fixture
def other_cwd(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current directory other than the project's."""
    folder = project / "other_cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_task_module_next_to_the_file_is_found_and_recorded_in_pythonpath(other_cwd: Path):
    config = load_config("../config.toml")
    assert config.pythonpath == (str(other_cwd.parent),)

    (other_cwd / "resolved.toml").write_text(dump_config(config))
    script = (
        "from titan_rl.config.load import load_config; import sys\n"
        f"assert load_config({str(other_cwd / 'resolved.toml')!r}).tasks[0].task.length == 3"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_config_file_within_a_package_adds_the_package_root(other_cwd: Path):
    package = other_cwd.parent / "outer_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "inner" / "__init__.py").touch()
    shutil.copy("../echo_task.py", package / "inner" / "task.py")
    (package / "inner" / "run.toml").write_text(
        '[model]\npath = "../../policy"\n[task]\ntype = "outer_package.inner.task:Echo"\n'
    )
    assert load_config(package / "inner" / "run.toml").pythonpath == (str(other_cwd.parent),)


def test_missing_module_error_lists_the_searched_folders(other_cwd: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, "__editable__.a-1.finder.__path_hook__"])
    message = failure(["../config.toml"], ("task.type", "absent_task:Echo"))
    assert "there is no module absent_task; looked in " in message
    assert f"{other_cwd}, {other_cwd.parent}" in message
    assert "__path_hook__" not in message


@pytest.mark.parametrize(
    ("folder", "file", "module"),
    [
        (".", "tokenize.py", "tokenize"),
        (".", "queue/__init__.py", "queue"),
        ("..", "json.py", "json"),
        ("lib", "torch.py", "torch"),
    ],
)
def test_file_that_would_be_imported_in_place_of_an_installed_module_is_an_error(
    other_cwd: Path, folder: str, file: str, module: str
) -> None:
    path = (other_cwd / folder).resolve() / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    message = failure(["../config.toml"], ("pythonpath", '["lib"]'))
    assert message == f"{path} would be imported in place of the installed module {module}; rename or move it"


def test_files_that_hide_no_module_are_no_error(other_cwd: Path) -> None:
    for folder in ("logging", "queue.d", "vllm"):  # the last is a checkout of vLLM
        (other_cwd / folder).mkdir()
    for file in ("test.py", "sys.py", "queue.txt", "logging/notes.py", "vllm/__init__.py"):
        (other_cwd / file).touch()
    load_config(["../config.toml"], [("pythonpath", '["no_such_folder"]')])


def test_pythonpath_is_relative_to_its_file(other_cwd: Path):
    (other_cwd / "lib").mkdir()
    (other_cwd / "lib" / "own_functions.py").write_text("def mine(*args): ...\n")
    (other_cwd / "own.toml").write_text('pythonpath = ["lib"]\n[training]\nloss = "own_functions:mine"\n')
    config = load_config(["../config.toml", "own.toml"])
    assert config.pythonpath == (str(other_cwd / "lib"), str(other_cwd.parent))


@pytest.mark.parametrize("name", ["alphabet_sort", "agent"])
def test_shipped_example_sets_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    assert load_config(ROOT / "examples" / name / "cpu.toml").pythonpath == (str(ROOT),)


def test_train_accepts_several_files(project: Path, capsys: pytest.CaptureFixture[str]):
    Path("more.toml").write_text("[training]\nsteps = 66\n")
    assert main(["train", "config.toml", "more.toml", "--dry-run"]) == 0
    assert "steps = 66" in capsys.readouterr().out


def test_task_tables_are_merged_by_name(project: Path):
    Path("two.toml").write_text(
        '[model]\npath = "policy"\n[[tasks]]\nname = "a"\ntype = "echo_task:Echo"\nlength = 7\n'
        '[[tasks]]\nname = "b"\ntype = "echo_task:Echo"\n'
    )
    Path("more.toml").write_text(
        '[[tasks]]\nname = "a"\nweight = 3.0\n[[tasks]]\nname = "c"\ntype = "echo_task:Echo"\n'
    )
    config = load_config(["two.toml", "more.toml"], [("tasks.b.weight", "2.0")])
    assert [(source.name, source.weight) for source in config.tasks] == [("a", 3.0), ("b", 2.0), ("c", 1.0)]
    assert config.tasks[0].task.length == 7
    Path("wrong.toml").write_text('[[tasks]]\nname = "a"\nlenght = 3\n')
    assert "wrong.toml: tasks.a.lenght = 3 is not a setting; nearest: tasks.a.length" in failure(
        ["two.toml", "wrong.toml"]
    )
