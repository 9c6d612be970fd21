"""Which runs are looked at."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_rl.core.errors import ConfigError
from titan_rl.viewer.run_reader import RunReader
from titan_rl.viewer.run_status import describe_run

_MARKS = ("status.json", "metrics.jsonl", "rollouts.jsonl", "results.json")
_DEPTH = 3  # runs/evaluations/<date>-<name>/<policy>


class Runs:
    """The runs in some folders, also those that begin later. Each has an id, its folder's name; of two that are named
    alike, the path.

    Args:
        given: folders of runs, or folders with such in them.

    Raises:
        ConfigError: one of them is no folder.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        for path in given:
            if not path.is_dir():
                raise ConfigError(
                    f"{path} is no folder; name that of a run, as runs/latest, or one that has runs in it"
                )
        self._given = [path.resolve() for path in given]
        self._readers: dict[str, RunReader] = {}

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def folders(self) -> dict[str, Path]:
        """By their ids, the newest first."""
        found = list(dict.fromkeys(folder for path in self._given for folder in find_runs(path)))
        found.sort(key=lambda folder: (folder.name, str(folder)), reverse=True)
        named = Counter(folder.name for folder in found)
        return {
            folder.name if named[folder.name] == 1 else str(folder).strip("/").replace("/", "~"): folder
            for folder in found
        }

    def describe(self) -> list[dict[str, Any]]:
        """The answer to /api/runs."""
        return [
            {"id": run, **describe_run(folder.name, folder), "named": folder in self._given}
            for run, folder in self.folders().items()
        ]

    def reader(self, run: str) -> RunReader | None:
        """None where there is no such run."""
        folder = self.folders().get(run)
        if folder is None:
            return None
        reader = self._readers.get(run)
        if reader is None or reader.folder != folder:
            reader = self._readers[run] = RunReader(folder)
        return reader

    def look(self) -> dict[str, dict[str, int]]:
        """By the ids of runs that somebody has looked at, what `RunReader.look` gives. Under the empty id: "runs"."""
        described = json.dumps([(one["id"], one["state"], one["steps"]) for one in self.describe()])
        found = {run: reader.look() for run, reader in list(self._readers.items())}
        return {"": {"runs": zlib.crc32(described.encode())}, **found}


def is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / mark) for mark in _MARKS)


def find_runs(folder: Path, depth: int = _DEPTH) -> list[Path]:
    """The folder itself, or those of runs in it. Links are left out: `latest` is one of the others."""
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    try:
        inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [found for path in inside for found in find_runs(Path(path), depth - 1)]
