"""Where evaluations write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EvaluationFiles:
    """Where an evaluation's processes write."""

    run_id: str
    logs: Path


def folder_name(policy: str, taken: set[str]) -> str:
    """A name for the folder of a policy's evaluation, which no other has.

    >>> folder_name("step 80 of runs/latest", {"base"})
    'step-80-of-runs-latest'
    """
    stem = re.sub(r"[^\w.]+", "-", policy).strip("-")[-100:] or "policy"
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    taken.add(name)
    return name
