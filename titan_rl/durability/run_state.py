"""What a checkpoint says of the run beside its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from titan_rl.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RunState:
    """`run_state.json` of a checkpoint: `{"step": 40, "tokens": 181204, "reward_before": 0.44}`."""

    step: int  # also the policy version
    tokens: int  # completion tokens trained on
    reward_before: float | None  # of the first validation; None where there was none yet

    @classmethod
    def read(cls, checkpoint: Path) -> RunState:
        """
        Raises:
            CheckpointError: the file is missing or is not one of these.
        """
        path = checkpoint / "run_state.json"
        try:
            values = json.loads(path.read_text())
            return cls(values["step"], values["tokens"], values["reward_before"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} does not say where its run stood: {error!r}") from error
