"""Which rollouts are asked for, checked as it comes from a URL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

MAX_LIMIT = 1000
SORTABLE = ("index", "step", "reward", "advantage", "num_completion_tokens", "turns", "status", "task", "group_id")


class QueryError(ValueError):
    """A parameter is wrong.

    Attributes:
        field: its name.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {str(value)[:100]!r}: it must be {allowed}")
        self.field = field


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Rollouts that are as every given filter says, a page of them.

    Args:
        group: the group's whole id.
        dropped: True leaves those of dropped groups alone, False leaves these out.
        text: part of the error, or of the first or last `rollout_index.KEPT_TEXT` characters of the messages; case does
            not matter.
        sort: one of `SORTABLE`; where it says the same of two, their order in the file decides. What lacks the value
            comes last.
        offset: rows to leave out before the first.
        limit: most rows, at most `MAX_LIMIT`.
    """

    phase: str | None = None
    task: str | None = None
    status: str | None = None
    group: str | None = None
    step_min: float | None = None
    step_max: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    dropped: bool | None = None
    text: str | None = None
    sort: str = "index"
    descending: bool = False
    offset: int = 0
    limit: int = 100

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> RolloutQuery:
        """An empty parameter is as good as none.

        Raises:
            QueryError: one is unknown, or its value is no right one.
        """
        given = {name: text for name, text in parameters.items() if text}
        kinds = {one.name: cast(str, one.type) for one in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in given.items():
            if name not in kinds:
                raise QueryError(name, text, f"left out; what may be given is {', '.join(kinds)}")
            if kinds[name].startswith("float"):
                values[name] = number(name, text)
            elif kinds[name].startswith("bool"):
                if text not in ("true", "false"):
                    raise QueryError(name, text, "true or false")
                values[name] = text == "true"
            elif kinds[name].startswith("int"):
                values[name] = whole(name, text, least=0, most=MAX_LIMIT if name == "limit" else 1 << 53)
            else:
                values[name] = text
        if values.get("sort", "index") not in SORTABLE:
            raise QueryError("sort", values["sort"], f"one of {', '.join(SORTABLE)}")
        return cls(**values)


def number(name: str, text: str) -> float:
    """
    Raises:
        QueryError: the text is no finite number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise QueryError(name, text, "a number")
    return value


def whole(name: str, text: str, *, least: int, most: int) -> int:
    """
    Raises:
        QueryError: the text is no whole number from `least` to `most`.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise QueryError(name, text, f"a whole number from {least} to {most}")
    return int(text)
