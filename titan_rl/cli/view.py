"""`titan-rl view [RUN ...] [--port PORT] [--open]`: a page that shows runs; `--report FILE` writes it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import secrets
import webbrowser
from collections.abc import Generator, Sequence
from pathlib import Path

from titan_rl.cli.options import Parser
from titan_rl.core.errors import ConfigError, MissingExtraError
from titan_rl.core.files import write_output
from titan_rl.run.process.environment import file_modes
from titan_rl.run.terminal.standard_streams import print_result, print_stderr
from titan_rl.viewer.report import make_report
from titan_rl.viewer.runs import Runs
from titan_rl.viewer.timeline import chrome_trace

USUAL = "runs"


def set_up(parser: Parser) -> None:
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.runs and not Path(USUAL).is_dir():
        raise ConfigError(f"there is no folder {USUAL} here; name a run: titan-rl view RUN")
    with contextlib.closing(Runs([Path(name) for name in arguments.runs or [USUAL]])) as runs:
        if arguments.json:
            for one in runs.describe():
                print_result(json.dumps(one) + "\n")
            return 0
        found = runs.folders()
        folders = [found[one["id"]] for one in runs.describe() if one["parent"] is None]
        if arguments.report is not None:
            _write_report(arguments.runs or [USUAL], folders, Path(arguments.report))
            return 0
        if arguments.trace is not None:
            _write_trace(folders, Path(arguments.trace))
            return 0
        return _serve(runs, arguments.port, opens=arguments.open)


@contextlib.contextmanager
def _writing(option: str) -> Generator[None]:
    """Context in which a file is written for this user only."""
    try:
        with file_modes(share=False):
            yield
    except OSError as error:
        raise ConfigError(f"{option}: {error.strerror}; name a file in a folder that you can write to") from None


def _write_report(given: Sequence[str], folders: Sequence[Path], out: Path) -> None:
    if not folders:
        raise ConfigError(f"--report {out}: there is no run in {', '.join(given)}; name the folder of a run")
    with _writing(f"--report {out}"):
        write_output(out, [make_report(folders)])
    print_result(f"{out}\n")


def _write_trace(folders: Sequence[Path], out: Path) -> None:
    if len(folders) != 1:
        raise ConfigError(f"--trace {out}: a trace shows one run, and {len(folders)} runs were given; name one run")
    (folder,) = folders
    if not (folder / "trace").is_dir():
        raise ConfigError(f"--trace {out}: {folder} has no trace; set logging.trace = true to write one")
    with _writing(f"--trace {out}"):
        write_output(out, chrome_trace(folder))
    print_result(f"{out}\n")


def _serve(runs: Runs, port: int | None, *, opens: bool) -> int:
    for module in ("starlette", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(module, "serve")
    from titan_rl.viewer.app import listen, make_viewer, run_viewer

    key = secrets.token_urlsafe(16)
    app = make_viewer(runs, key=key)
    with listen(port) as listener:
        url = f"http://localhost:{listener.getsockname()[1]}/?key={key}"

        def ready() -> None:
            num_runs = len(runs.folders())
            print_result(f"{num_runs} run{'' if num_runs == 1 else 's'} at {url}\n")
            print_stderr("titan-rl: Ctrl-C ends this page")
            if opens:
                webbrowser.open(url)

        return run_viewer(app, listener, ready)
