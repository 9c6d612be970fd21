"""Figures of RESULTS.md are stale once the code that they measure has changed."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import start
from benchmarks.all import COMMANDS, differences
from benchmarks.figures import Measured, figures, with_measured, with_missed

ROOT = Path(__file__).parents[1]
HEAD = "| figure | value | quartiles | target | command | date | commit |\n|---|---|---|---|---|---|---|\n"
SCRIPT = ROOT / "scripts" / "stale_figures.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT), run_name="stale_figures")


class Repository:
    """Git repository with a package, two benchmarks, and their figures."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        self.write("titan_rl/__init__.py", "")
        self.write("titan_rl/router/__init__.py", "")
        self.write("titan_rl/router/choice.py", "1")
        self.write("titan_rl/trainer.py", "1")
        self.write("benchmarks/paired.py", "")
        self.write("benchmarks/router.py", "from benchmarks.paired import x\nfrom titan_rl.router import choose")
        self.write("benchmarks/trainer.py", "import titan_rl.trainer")
        self.write("benchmarks/run.py", 'SUBJECT = ("titan_rl",)')
        self.commit = self.save()
        self.write(
            "benchmarks/RESULTS.md",
            f"{HEAD}"
            f"| `choice_8`, `_64` (of two) | 2.6, 10.1 | | | `python benchmarks/router.py` | today | {self.commit} |\n"
            f"| `choice_time` | 1,300 | 1,200–1,400 | ≤ 2,000 | same | today | {self.commit} |\n"
            f"| `step` | 1.0 | | | `python -m benchmarks.trainer --rounds 3` | today | {self.commit} |\n"
            f"| `whole` | 1.0 | | | `python -m benchmarks.run` | today | {self.commit} |\n",
        )

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
        command = ["git", "-C", str(self.root), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def save(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", "change")
        return self.git("rev-parse", "--short=10", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def stale(script: dict[str, Any], repository: Repository) -> dict[str, tuple[str, ...]]:
    return {stale.figure.names[0]: stale.changed for stale in script["stale_figures"](repository.root)}


def test_figure_is_fresh_until_its_subject_changes(script: dict[str, Any], repository: Repository):
    assert stale(script, repository) == {}
    repository.write("titan_rl/router/choice.py", "2")
    changed = ("titan_rl/router/choice.py",)
    assert stale(script, repository) == {"choice_8": changed, "choice_time": changed, "whole": changed}


def test_change_of_a_benchmark_or_its_helpers_makes_its_figures_stale(script: dict[str, Any], repository: Repository):
    repository.write("benchmarks/paired.py", "x = 1")
    repository.write("benchmarks/trainer.py", "import titan_rl.trainer as trainer")
    repository.save()
    assert stale(script, repository) == {
        "choice_8": ("benchmarks/paired.py",),
        "choice_time": ("benchmarks/paired.py",),
        "step": ("benchmarks/trainer.py",),
    }


@pytest.mark.parametrize(
    ("after", "is_stale"),
    [
        ("def step(size: int):\n    return ('a', size)  # in rows\n", False),
        ('"""Steps."""\n\n\ndef step(\n    size: int,\n):\n    """Take a step."""\n    return "a", size\n', False),
        ('@dataclass\nclass Step:\n    """A step."""\n\n    size: int\n    """In rows."""\n', True),
        ('def step(size: int):\n    return "b", size\n', True),
        ('def step(size: int):\n    return "a # b", size\n', True),
        ('def step(size: int):\n    return "a", (size', True),
    ],
    ids=["comment", "docstring", "class", "string", "comment_sign", "syntax"],
)
def test_figure_is_stale_only_if_code_has_changed(
    script: dict[str, Any], repository: Repository, after: str, is_stale: bool
):
    results, path = repository.root / "benchmarks" / "RESULTS.md", "titan_rl/trainer.py"
    repository.write(path, 'def step(size: int):\n    return "a", size\n')
    results.write_text(results.read_text().replace(repository.commit, repository.save()))
    repository.write(path, after)
    assert ("step" in stale(script, repository)) is is_stale


def test_deleted_and_renamed_files_make_a_figure_stale(script: dict[str, Any], repository: Repository):
    repository.git("mv", "titan_rl/router/choice.py", "titan_rl/router/choices.py")
    renamed = ("titan_rl/router/choice.py", "titan_rl/router/choices.py")
    assert stale(script, repository)["choice_8"] == renamed


def test_unknown_commit_makes_a_figure_stale(script: dict[str, Any], repository: Repository):
    results = repository.root / "benchmarks" / "RESULTS.md"
    results.write_text(results.read_text().replace(repository.commit, "0123456789"))
    assert {stale.reason for stale in script["stale_figures"](repository.root)} == {
        "git does not know commit 0123456789"
    }


def command_on(root: Path, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(root), *arguments]
    return subprocess.run(command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_command_fails_on_request(repository: Repository):
    assert command_on(repository.root, "--fail").returncode == 0
    repository.write("titan_rl/trainer.py", "2")
    done = command_on(repository.root, "--fail")
    assert done.returncode == 1
    assert f"step: stale since {repository.commit}: 1 file changed: titan_rl/trainer.py" in done.stdout


def test_row_without_a_commit_is_reported(repository: Repository):
    results = repository.root / "benchmarks" / "RESULTS.md"
    results.write_text(results.read_text().replace(f"today | {repository.commit} |", "today | v1.2 |"))
    done = command_on(repository.root)
    assert "step: its row has no commit of 7 to 40 hexadecimal digits\n" in done.stdout


@pytest.mark.parametrize("made", [(), ("benchmarks/RESULTS.md",)])
def test_root_that_cannot_be_compared_is_refused(made: tuple[str, ...], tmp_path: Path):
    for name in made:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(HEAD)
    done = command_on(tmp_path)
    assert done.returncode == 2
    assert ("not a git repository" if made else f"{tmp_path} has no benchmarks/RESULTS.md") in done.stderr
    assert "Traceback" not in done.stderr


def test_command_says_that_its_output_is_full(repository: Repository):
    repository.write("titan_rl/trainer.py", "2")
    with Path("/dev/full").open("w") as full:
        done = command_on(repository.root, stdout=full.fileno())
    assert (done.returncode, done.stderr) == (
        1,
        "cannot write the stale figures: [Errno 28] No space left on device\n",
    )


def test_command_ends_without_a_word_once_nobody_reads(repository: Repository):
    repository.write("titan_rl/trainer.py", "2")
    reader, writer = os.pipe()
    os.close(reader)
    done = command_on(repository.root, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_rows_have_names_values_and_quartiles(script: dict[str, Any], repository: Repository):
    rows = list(script["figures"]((repository.root / "benchmarks" / "RESULTS.md").read_text()))
    assert [(row.names, row.values, row.quartiles, row.module) for row in rows] == [
        (("choice_8", "choice_64"), (2.6, 10.1), None, "router"),
        (("choice_time",), (1300.0,), (1200.0, 1400.0), "router"),
        (("step",), (1.0,), None, "trainer"),
        (("whole",), (1.0,), None, "run"),
    ]


def test_name_of_a_figure_may_contain_a_dot():
    row = "| `a_0.25_short`, `_0.5_short` | 1, 2 | | | `python -m benchmarks.a` | old | 1234567 |\n"
    assert [figure.names for figure in figures(row)] == [("a_0.25_short", "a_0.5_short")]


def test_every_figure_of_the_results_is_read():
    rows = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    written = [line.split("|")[1].partition("(")[0].count("`") // 2 for line in rows if line.count("|") == 8]
    assert sum(written) == sum(len(figure.names) for figure in figures("\n".join(rows)))


def test_differences_outside_the_quartiles_are_judged_by_the_target(repository: Repository):
    results = (repository.root / "benchmarks" / "RESULTS.md").read_text()
    measured = {"choice_8": 2.7, "choice_64": 12.0, "choice_time": 1500.0, "unknown": 1.0}
    assert [str(each) for each in differences(measured, results)] == [
        "choice_64 is 12, different than 9.09 to 11.11",
        "choice_time is 1500, worse than 1200 to 1400",
    ]
    assert [each.is_worse for each in differences({"choice_time": 1100.0}, results)] == [False]


def test_benchmarks_named_in_the_results_exist(script: dict[str, Any]):
    named = {row.module for row in script["figures"]((ROOT / "benchmarks" / "RESULTS.md").read_text()) if row.module}
    assert named
    named |= {command.split()[0] for command in COMMANDS}
    assert [name for name in named if not (ROOT / "benchmarks" / f"{name}.py").is_file()] == []


def test_new_figures_replace_their_rows():
    before = (
        "# Figures\n\n"
        + HEAD
        + "| `a_8`, `_64` (of two) | 2.6, 10.1 | | ≥ 2 | `python -m benchmarks.a --rounds 9` | old | 1234567 |\n"
        "| `a_time` (s) | 1,300 | 1,200–1,400 | ≤ 2,000 | same | old | 1234567 |\n"
        "| `b` | 0.5 | | **≥ 1** | `python -m benchmarks.b` | old | 1234567 |\n"
        "| `c` | 3 | | | same | old | 1234567 |\n"
    )
    measured = {
        "a_8": Measured(1.5, None, "a"),
        "a_64": Measured(11.25, None, "a"),
        "b": Measured(1.25, (1.2, 1.3), "b --rounds 2"),
        "unknown": Measured(1.0, None, "a"),
    }
    after = with_measured(before, measured, date="2030-01-02", commit="abcdef0")
    assert after == (
        "# Figures\n\n"
        + HEAD
        + "| `a_8`, `_64` (of two) | 1.5, 11.2 | | **≥ 2** | `python -m benchmarks.a` | 2030-01-02 | abcdef0 |\n"
        "| `a_time` (s) | 1,300 | 1,200–1,400 | ≤ 2,000 | `python -m benchmarks.a --rounds 9` | old | 1234567 |\n"
        "| `b` | 1.25 | 1.2–1.3 | ≥ 1 | `python -m benchmarks.b --rounds 2` | 2030-01-02 | abcdef0 |\n"
        "| `c` | 3 | | | `python -m benchmarks.b` | old | 1234567 |\n"
    )


def test_same_refers_to_the_command_of_the_previous_row():
    row = "| `{}` | 1 | | | {} | old | 1234567 |\n"
    first, second = row.format("a", "`python -m benchmarks.a`"), row.format("b", "same")
    text = f"## One\n\n{HEAD}{first}{second}\n## Two\n\n{HEAD}{second}"
    assert [figure.module for figure in figures(text)] == ["a", "a", None]
    after = with_measured(text, {"b": Measured(2, None, "b")}, date="2030-01-02", commit="abcdef0")
    assert [figure.module for figure in figures(after)] == ["a", "b", "b"]


def test_start_measures_the_commands_in_the_results(script: dict[str, Any]):
    rows = script["figures"]((ROOT / "benchmarks" / "RESULTS.md").read_text())
    named = {name for row in rows for name in row.names if name.startswith("command_")}
    assert named
    assert named <= {f"command_{time}_{name}" for time in ("s", "cpu_s") for name in start.COMMANDS}


def test_every_results_table_begins_with_a_command():
    lines = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    heads = [place for place, line in enumerate(lines) if line == HEAD.splitlines()[0]]
    assert heads
    assert not [lines[place + 2] for place in heads if "| same |" in lines[place + 2]]


def test_each_target_of_a_row_belongs_to_one_value():
    row = "| `a_x`, `_y` | 3, 1.6 | | {} | `python -m benchmarks.a` | {} |\n"
    measured = {"a_x": Measured(3.0, None, "a"), "a_y": Measured(1.6, None, "a")}
    after = with_measured(row.format("≤ 3, ≤ 1", "old | 1234567"), measured, date="2030-01-02", commit="abcdef0")
    assert after == row.format("≤ 3, **≤ 1**", "2030-01-02 | abcdef0")


def test_missed_targets_are_listed_by_section():
    list_head = "| section | figure | value | target |\n|---|---|---|---|\n"
    text = (
        f"# Figures\n\n## Missed targets\n\nIn bold.\n\n{list_head}| [Old](#old) | `gone` | 1 | **≥ 2** |\n"
        f"\n## Tasks and more\n\n{HEAD}"
        "| `a` (s) | 3 | | ≤ 5 | `python -m benchmarks.a` | old | 1234567 |\n"
        "| `b` | 0.5 | | **≥ 1** | same | old | 1234567 |\n"
    )
    after = with_measured(text, {"a": Measured(6, None, "a")}, date="2030-01-02", commit="abcdef0")
    listed = after.partition(list_head)[2].partition("\n## ")[0]
    assert listed == (
        "| [Tasks and more](#tasks-and-more) | `a` | 6 | **≤ 5** |\n"
        "| [Tasks and more](#tasks-and-more) | `b` | 0.5 | **≥ 1** |\n"
    )


def test_results_list_their_missed_targets():
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert text == with_missed(text)
