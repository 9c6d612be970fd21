"""Code blocks of the docs are valid: Python parses and its imports exist, settings load, commands exist."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs.pages import PAGES, ROOT, blocks, files

import titan_rl
from titan_rl import load_config
from titan_rl.cli.main import command_line
from titan_rl.config.run import RunConfig
from titan_rl.config.serve import ServeConfig
from titan_rl.config.validation_errors import settings

PLACEHOLDER_MODULES = {"my_engines", "my_losses", "my_server"}  # modules that the reader would write
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_TOML = [page for page in PAGES if blocks(page, "toml")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_parses_and_its_imports_exist(page: Path) -> None:
    for block in blocks(page, "python"):
        tree = compile(block, name(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(module), names=names):
                    assert importlib.util.find_spec(module.split(".")[0]) or module in own(page), module
                    if module.split(".")[0] == "titan_rl":
                        there = names_of(module)
                        absent = [one.name for one in names if one.name not in there]
                        assert not [one for one in absent if importlib.util.find_spec(f"{module}.{one}") is None], (
                            module
                        )
                case ast.Import(names=names):
                    for one in names:
                        top = one.name.split(".")[0]
                        assert importlib.util.find_spec(top) or top in own(page), one.name
                case ast.Attribute(value=ast.Name(id="titan_rl"), attr=attribute):
                    assert attribute in titan_rl.__all__
                case _:
                    pass


def own(page: Path) -> set[str]:
    """Modules that the page has the reader write."""
    return {file.removesuffix(".py") for file in files(page) if file.endswith(".py")} | PLACEHOLDER_MODULES


def names_of(module: str) -> set[str]:
    """Names that can be imported from a module, found without running it, since some modules need torch."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None, module
    found = set[str]()
    stub = Path(spec.origin).with_suffix(".pyi")
    for node in ast.walk(ast.parse((stub if stub.exists() else Path(spec.origin)).read_text())):
        match node:
            case ast.ClassDef(name=one) | ast.FunctionDef(name=one) | ast.AsyncFunctionDef(name=one):
                found.add(one)
            case ast.Assign(targets=targets):
                every = [one for target in targets for one in ast.walk(target)]
                found.update(one.id for one in every if isinstance(one, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=one)):
                found.add(one)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                found.update(alias.asname or alias.name for alias in aliases)
            case _:
                pass
    return found


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_has_no_undefined_names(page: Path) -> None:
    """Every name is defined in the block or an earlier one, or the page says that it stands for the reader's own."""
    code = re.sub(r"^(\s*)await (?=titan_rl)", r"\1", "\n".join(blocks(page, "python")), flags=re.MULTILINE)
    text = page.read_text()
    checked = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F821",
        "--output-format",
        "concise",
        "-",
    ]
    done = subprocess.run(checked, input=code, capture_output=True, text=True, timeout=300)
    undefined = set(re.findall(r"Undefined name `(\w+)`", done.stdout))
    assert not [one for one in undefined if not re.search(rf"`{one}`.*\bstand(s)? for yours\b", text)], done.stdout


@pytest.mark.parametrize("page", WITH_TOML, ids=name)
def test_toml_blocks_load(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without a model or a task is a fragment, completed with the minimum that a run needs."""
    for file, text in files(page).items():
        (tmp_path / file).write_text(text)
        monkeypatch.delitem(sys.modules, Path(file).stem, raising=False)  # a module of that name from another test
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    try:
        for number, block in enumerate(blocks(page, "toml")):
            tables = tomllib.loads(block)
            path = tmp_path / f"block{number}.toml"
            least = "" if "model" in tables else '[model]\npath = "policy"\nmax_context = 128\n'
            if not {"task", "tasks"} & tables.keys():
                least += '[task]\ntype = "examples.arithmetic.task:Arithmetic"\n'
            path.write_text(f"{block}\n{least}")
            load_config(path, check_files=False)
    finally:
        for module in set(sys.modules) - before:
            if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
                del sys.modules[module]


def commands_shown(page: Path) -> Iterator[str]:
    """Commands that begin with titan-rl, in blocks and in the text."""
    text = page.read_text()
    without_code = re.sub(r"^```(python|toml|json).*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"^(?:    |\$ )?(titan-rl [a-z][^\n]*)$", without_code, re.MULTILINE)
    yield from re.findall(r"`(titan-rl [a-z][^`\n]*)`", without_code)


COMMANDS = next(action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)).choices
SETTINGS = {*settings(RunConfig), *settings(ServeConfig)}


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_shown(page))], ids=name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for command in commands_shown(page):
        _, verb, *words = command.partition("#")[0].split()
        assert verb in COMMANDS or not verb.isalpha(), command
        known: Any = COMMANDS.get(verb)
        for option in re.findall(r"(?<![\w-])--([\w.-]+)", " ".join(words)):
            is_setting = "." in option
            if is_setting and option.partition(".")[0] in ("task", "tasks", "table"):
                continue  # settings of the task's class
            assert option in SETTINGS if is_setting else f"--{option}" in known._option_string_actions, command


def test_make_targets_and_extras_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"(?:^    |`)make ([a-z][\w-]*)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (name(page), target)
        for found in re.findall(r"pip install (?:-e )?'[^'\[]*\[([^\]]+)\]", text):
            assert set(found.split(",")) <= extras.keys(), (name(page), found)


TABLES = "|".join(sorted({name.partition(".")[0] for name in SETTINGS if "." in name} - {"tasks"}))
METRICS = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
A_METRIC = [re.compile(re.sub(r"\\?<\w+\\?>", "[^/]+", re.escape(metric))) for metric in METRICS]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "CHANGELOG"], ids=name)
def test_settings_and_metrics_named_in_the_text_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    code = re.findall(r"`([^`\n]+)`", text)
    named = {one for part in code for one in re.findall(rf"^(?:--)?((?:{TABLES})\.\w+)(?: =|[ ,]|$)", part)}
    assert not [one for one in named if one not in SETTINGS and not one.endswith((".py", ".json"))]
    metrics = [
        one for one in code if re.fullmatch(r"(train|rollout|scheduling|sync|time|throughput|validation)/[\w/<>]+", one)
    ]
    there = [one for one in metrics if not (ROOT / "titan_rl" / one).exists() and not one.endswith("/")]
    known = {
        one for one in there for pattern in A_METRIC if pattern.fullmatch(of_training(one)) or pattern.fullmatch(one)
    }
    assert not [one for one in there if one not in known]


def of_training(metric: str) -> str:
    """Name of the training metric that a validation metric corresponds to."""
    return re.sub(r"^validation/", "rollout/", metric)


def test_readme_figures_are_in_the_results() -> None:
    _, _, section = (ROOT / "README.md").read_text().partition("\n## What works")
    figures = re.findall(r"\d+\.\d+", section.partition("\n## ")[0])
    measured = set(re.findall(r"\d+\.\d+", (ROOT / "benchmarks" / "RESULTS.md").read_text()))
    assert len(figures) > 8
    assert not [figure for figure in figures if figure not in measured and f"{figure}0" not in measured]
