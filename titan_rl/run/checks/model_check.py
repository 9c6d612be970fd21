"""Check of a model folder, with a tiny model built from its config.json: `titan-rl doctor --model FOLDER`.

The trainer is checked in one process and the engine in another, both with a time limit, so that a crash, a hang or an
engine that does not start is a result like any other. Importing this file imports no torch; running it,
`python -m titan_rl.run.checks.model_check PART FOLDER OUT`, is one of these processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.user_code import reason
from titan_rl.core.errors import ModelError
from titan_rl.training.models.families import choose_implementation
from titan_rl.training.numerical_check import NumericalCheck

LIMIT_S = 300.0
"""Time limit of each process, in seconds. On an idle machine they take half a minute."""

Part = Literal["trainer", "engine"]
PARTS: tuple[Part, ...] = ("trainer", "engine")


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model folder whose config.json can be read.

    Attributes:
        model_type: Value of `model_type` in config.json.
        implementation: Implementation that trains the model with `model.implementation = "auto"`; None if no
            implementation can.
        reason: Reason for the implementation, or reason why there is none.
    """

    folder: Path
    model_type: str
    implementation: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class ModelOutcome:
    """Result of one check, or the reason why a part could not be checked.

    Attributes:
        comparison: Result of the comparison; None if there is a problem.
        problem: Reason why the part could not be checked, in one line.
    """

    part: Part
    comparison: NumericalCheck | None = None
    problem: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether the two computations agree."""
        return self.comparison is not None and self.comparison.holds


def read_model(folder: Path) -> CheckedModel:
    """Read the config.json of a model folder.

    Raises:
        ModelError: The folder has no config.json, or it is not an object with a `model_type`.
    """
    path = folder / "config.json"
    try:
        hf = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ModelError(
            f"--model {folder} {what}; give a folder with the config.json of a Hugging Face model. From the hub: "
            "hf download ORGANIZATION/NAME config.json --local-dir FOLDER"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {folder}: config.json cannot be read: {error}; download it again") from None
    model_type = hf.get("model_type") if isinstance(hf, dict) else None
    if not isinstance(model_type, str):
        raise ModelError(
            f"--model {folder}: config.json has model_type {model_type!r}; it must be the name of a family, such as "
            "'qwen2'"
        )
    try:
        chosen = choose_implementation(hf)
    except ModelError as error:
        return CheckedModel(folder, model_type, None, str(error))
    return CheckedModel(folder, model_type, chosen.name, chosen.reason)


def check_model(model: CheckedModel, *, limit_s: float = LIMIT_S) -> Iterator[ModelOutcome]:
    """Check all parts at the same time.

    Args:
        limit_s: Time limit of each part, in seconds.
    """
    with tempfile.TemporaryDirectory(prefix="titan-rl-doctor-", ignore_cleanup_errors=True) as temporary:
        running = {part: _Process(part, model.folder, Path(temporary), limit_s) for part in PARTS}
        try:
            for process in running.values():
                yield from process.outcomes()
        finally:
            for process in running.values():
                process.end()


class _Process:
    """Process that checks one part. It is killed together with all processes that it has started."""

    def __init__(self, part: Part, folder: Path, temporary: Path, limit_s: float) -> None:
        self._part: Part = part
        self._limit_s = limit_s
        self._found, self._log = temporary / f"{part}.json", temporary / f"{part}.log"
        command = [
            sys.executable, "-P", "-m", "titan_rl.run.checks.model_check", part, str(folder.absolute()),
            str(temporary), str(limit_s),
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def outcomes(self) -> Iterator[ModelOutcome]:
        """Wait until the process has ended, and iterate over its results."""
        problem = None
        try:
            code = self._process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            problem = f"it did not end within {self._limit_s:g} s"
        else:
            if code:
                problem = self._last_line() or f"its process ended with code {code}"
        for line in self._found.read_text().splitlines() if self._found.exists() else ():
            found = parse_json(line)
            if "problem" in found:
                problem = found["problem"]
            else:
                yield ModelOutcome(self._part, NumericalCheck(**found))
        if problem is not None:
            yield ModelOutcome(self._part, problem=problem)

    def end(self) -> None:
        """Kill the process and its children, if they are still running."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(part: Part, folder: Path, temporary: Path, limit_s: float) -> None:
    """Check one part in this process, and write one line for each result."""
    signal.alarm(int(limit_s) + 1)  # in case the process that waits for this one has died
    tiny = temporary / f"tiny-{part}"
    with (temporary / f"{part}.json").open("w") as file:
        try:
            for comparison in _compare(part, folder, tiny):
                file.write(json.dumps(asdict(comparison)) + "\n")
                file.flush()
        except Exception as error:
            file.write(json.dumps({"problem": in_a_line(error, tiny)}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of an engine may never end


def _compare(part: Part, folder: Path, tiny: Path) -> Iterator[NumericalCheck]:
    from titan_rl.training.family_check import check_family
    from titan_rl.training.models.shrunken_models import tiny_of_folder

    tiny_of_folder(folder, tiny)
    if part == "trainer":
        yield from check_family(tiny)
        return
    from titan_rl.run.checks.engine_check import check_engine

    yield from check_engine(tiny)


def in_a_line(error: Exception, tiny: Path) -> str:
    """Describe the reason of a failed check in one line.

    Args:
        tiny: Folder of the tiny model. The description must not name it, because the user does not know it.
    """
    at = ""
    if not str(error):  # an assertion without a message, as in vLLM's models, is identified only by its place
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f" at {Path(*Path(frame.filename).parts[-3:])}:{frame.lineno}: {frame.line}"
    return " ".join((reason(error) + at).replace(str(tiny), "the tiny model").split())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))  # pyright: ignore[reportArgumentType]
