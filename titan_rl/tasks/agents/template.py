"""Texts with fields of a sample in them: "--question={question}"."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

_PART = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}|[{}]")


def fields_of(sample: Any, *, file: Path, started_in: Path) -> dict[str, Any]:
    """What the texts of a rollout may name.

    Args:
        sample: as plain JSON.
        file: that it is in.
        started_in: the current folder when the run began.
    """
    own = dict(cast("Mapping[str, Any]", sample)) if isinstance(sample, Mapping) else {}
    return {**own, "python": sys.executable, "cwd": str(started_in), "sample": str(file)}


def filled_in(text: str, fields: Mapping[str, Any]) -> str:
    """`{name}` is the field of that name: a text as it is, other values as JSON. `{{` and `}}` are braces.

    Raises:
        ValueError: there is no field of a name, or a brace stands alone.
    """

    def part(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        name = match[1]
        if name is None:
            raise ValueError(f"{text!r} has a brace that stands alone; write {{{{ or }}}} for one")
        if name not in fields:
            raise ValueError(f"{text!r} names {name!r}; the sample has {', '.join(map(str, fields))}")
        value = fields[name]
        return value if isinstance(value, str) else json.dumps(value)

    return _PART.sub(part, text)
