"""What a checkpoint says of the run beside its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import CheckpointError

FILE = "run_state.json"


@dataclass(frozen=True, slots=True)
class DataPosition:
    """What of the data the weights of a version have seen: all before `next_index` but what is unsettled."""

    version: int = 0
    next_index: int = 0
    unsettled: tuple[int, ...] = ()  # before next_index, ascending, neither trained nor dropped
    run: str = ""  # which run's, so that another's journal is not taken for this one's

    def is_settled(self, index: int) -> bool:
        """Whether the group at a position in the data is in the weights, or was dropped before."""
        return index < self.next_index and index not in self.unsettled


@dataclass(frozen=True, slots=True)
class RunState:
    """`run_state.json` of a checkpoint, and of the run's folder for the model as loaded, which is version 0.

    Example:
        {"step": 40, "tokens": 181204, "reward_before": 0.44, "next_index": 164, "unsettled": [158, 160, 161, 162, 163],
         "tasks": {"taken": {"sums": 82, "sort": 82}, ...}, "settings": {"scheduling.groups_per_step": 4, ...},
         "run": "5d0c...", "model": {"weights": "9b1e...", "config": "07aa...", "tokenizer": "c41d...", ...}}
    """

    step: int = 0  # also the policy version
    tokens: int = 0  # completion tokens trained on
    reward_before: float | None = None  # of the first validation; None where there was none yet
    next_index: int = 0
    unsettled: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # by dotted name, that the run was made with
    run: str = ""  # drawn when the run began
    tasks: Mapping[str, Any] = field(default_factory=dict[str, Any])  # where their mix stands, see `TaskMix.state`
    model: Mapping[str, str] = field(default_factory=dict[str, str])  # that the run began with, see `model_identity`

    @property
    def position(self) -> DataPosition:
        return DataPosition(self.step, self.next_index, self.unsettled, self.run)

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """
        Raises:
            CheckpointError: the file is missing or is not one of these.
        """
        path = folder / FILE
        try:
            values = parse_json(path.read_text())
            return cls(
                step=int(values["step"]),
                tokens=int(values["tokens"]),
                reward_before=values["reward_before"],
                next_index=int(values["next_index"]),
                unsettled=tuple(map(int, values["unsettled"])),
                tasks=dict(values["tasks"]),
                settings=dict(values["settings"]),
                run=str(values["run"]),
                model=dict(values.get("model", {})),  # not of a run that is older than this
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} does not say where its run stood: {error!r}; put back what was written, or go on with the "
                "version of titan_rl that wrote it"
            ) from error

    def write(self, folder: Path) -> None:
        """Flushed to disk."""
        with (folder / FILE).open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
