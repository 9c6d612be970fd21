"""Conventions of all commands: results on standard output, messages on standard error, the exit codes of README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titan_rl.cli.main import main

README = Path(__file__).parents[2] / "README.md"


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code: object = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    streams = capsys.readouterr()
    return code, streams.out, streams.err


@pytest.fixture(scope="module")
def commands() -> list[str]:
    """Names of the commands, as listed in the help."""
    capture = pytest.MonkeyPatch()
    printed: list[str] = []
    with capture.context() as patch:
        patch.setattr("titan_rl.cli.options.print_result", printed.append)
        with pytest.raises(SystemExit):
            main(["--help"])
    return re.findall(r"^    (\w+)(?: |$)", "".join(printed).partition("COMMAND\n")[2], re.MULTILINE)


def test_help_goes_to_standard_output(commands: list[str], capsys: pytest.CaptureFixture[str]):
    assert {"train", "serve", "doctor", "settings", "init", "completion"} <= set(commands)
    for command in commands:
        code, out, err = run([command, "--help"], capsys)
        assert (code, err) == (0, ""), command
        assert out.startswith(f"usage: titan-rl {command}"), command
        assert len(out.splitlines()) > 4, f"{command} lacks a description"


def test_invalid_arguments_go_to_standard_error_and_exit_with_2(
    commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for command in commands:
        for argv in ([command, "--no.such.setting", "3"], [command, "a", "--no.such.setting=3"]):
            code, out, err = run(argv, capsys)
            assert (code, out) == (2, ""), argv
            assert err, argv
            assert "Traceback" not in err, argv
    assert not list(tmp_path.iterdir()), "invalid arguments create no files"


def test_unrecognized_arguments_show_the_usage_of_the_command(capsys: pytest.CaptureFixture[str]):
    for argv in (["hosts", "runs/latest", "list", "extra"], ["doctor", "extra"]):
        code, out, err = run(argv, capsys)
        assert (code, out) == (2, "")
        assert err.startswith(f"usage: titan-rl {argv[0]} "), err
        assert err.endswith("error: unrecognized arguments: extra\n"), err
    assert "list: error" in run(["hosts", "runs/latest", "list", "extra"], capsys)[2]


def test_missing_and_unknown_commands_exit_with_2(capsys: pytest.CaptureFixture[str]):
    for argv in ([], ["tarin"]):
        code, out, err = run(argv, capsys)
        assert (code, out) == (2, "")
        assert err.startswith("usage: titan-rl")


@pytest.mark.skipif(not README.exists(), reason="an installed package has no README")
def test_readme_names_every_command(commands: list[str]):
    section = README.read_text().partition("\n## Command line\n")[2].partition("\n## ")[0]
    assert [command for command in commands if f"titan-rl {command}" not in section] == []
