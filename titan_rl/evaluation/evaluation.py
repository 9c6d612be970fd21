"""One policy's results on one or several tasks, and their file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import DataError
from titan_rl.evaluation.results import TaskResult

RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How good a policy is, task by task.

    Attributes:
        policy: what it is, for people: "step 80 of runs/latest".
        version: the steps that a run has trained it; 0 of a model or an endpoint.
        tasks: by the task's name.
        is_complete: False where it was stopped, so that `tasks` has what was done by then.
        folder: that has its transcripts; None where none were kept.

    Example:

        before, after = evaluate(config, "base"), evaluate(config, "runs/latest")
        print(after.reward, table([before, after]))
    """

    policy: str
    version: int
    tasks: Mapping[str, TaskResult]
    seconds: float
    is_complete: bool = True
    folder: Path | None = None

    @property
    def task(self) -> TaskResult:
        """The only one.

        Raises:
            ValueError: there are several.
        """
        if len(self.tasks) != 1:
            raise ValueError(f"there are {len(self.tasks)} tasks: {', '.join(self.tasks)}; name one: .tasks[name]")
        return next(iter(self.tasks.values()))

    @property
    def reward(self) -> float | None:
        """The mean reward of the only task; None where no sample has one."""
        return None if self.task.reward is None else self.task.reward.mean

    def write(self) -> None:
        """Replace `results.json` in the folder, in one step."""
        if self.folder is None:
            return
        fresh = self.folder / f"{RESULTS}.part"
        fresh.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(fresh, self.folder / RESULTS)

    def to_json(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "version": self.version,
            "is_complete": self.is_complete,
            "seconds": self.seconds,
            "folder": None if self.folder is None else str(self.folder),
            "tasks": {name: result.to_json() for name, result in self.tasks.items()},
        }


def read_evaluation(path: str | Path) -> Evaluation:
    """
    Args:
        path: the folder of an evaluation, or its `results.json`; or the folder given as `out`, which has the folder of
            an evaluation for each policy, if that is one.

    Raises:
        DataError: there is none, it cannot be understood, or there are several.
    """
    several = evaluation_folders(path)
    if len(several) > 1:
        raise DataError(f"{path} has {len(several)} evaluations, name one: {', '.join(map(str, several))}")
    file = several[0] / RESULTS if several[0].is_dir() else several[0]
    try:
        told = parse_json(file.read_text(encoding="utf-8"))
        tasks = {name: TaskResult.from_json(result) for name, result in told["tasks"].items()}
        return Evaluation(
            told["policy"], told["version"], tasks, told["seconds"], told["is_complete"], file.absolute().parent
        )
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; name the folder of an evaluation, which has a {RESULTS}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is no evaluation's {RESULTS}: {error!r}") from error


def evaluation_folders(path: str | Path) -> list[Path]:
    """Those of the evaluations in a folder of several, by their names; else what is given."""
    within = [] if (Path(path) / RESULTS).exists() else sorted(Path(path).glob(f"*/{RESULTS}"))
    return [results.parent for results in within] or [Path(path)]
