"""Puts a taught model where others look for it, whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from titan_rl.config.run import RunConfig
from titan_rl.training.settings import MADE_BY_SFT
from titan_rl.training.state.checkpoint import atomic_directory


def install(config: RunConfig, export: Path, run: Path, before: float | None, after: float | None) -> Path:
    """Copy an exported model to `sft.out`, with a note of what it was made of.

    Args:
        run: the folder of the run that has taught it.
        before: held-out loss.
        after: of the model as it is.

    Returns:
        the folder.

    Raises:
        NoSpaceError: the disk is full.
        CheckpointError: it could not be written; what was there is unchanged.
    """
    out = Path(config.sft.out)
    note = {
        "steps": config.training.steps,
        "held_out_loss": {"before": before, "after": after},
        "run": run.name,
        "seed": config.seed,
        "settings": config.sft.model_dump(mode="json", exclude={"start", "out", "data"}),
    }
    with atomic_directory(out) as folder:
        for file in export.iterdir():
            shutil.copyfile(file, folder / file.name)
        (folder / MADE_BY_SFT).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    return out
