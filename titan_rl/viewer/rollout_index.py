"""In-memory index of `rollouts.jsonl` for filtering, sorting and search, and its queries."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import count, islice
from statistics import median_low
from typing import Any, TypeVar, cast

import msgspec

from titan_rl.core.files import as_table, read_json
from titan_rl.core.plain_data import printable
from titan_rl.rollout.types import RolloutStatus

MAX_LIMIT = 1000
SORTABLE = ("index", "step", "reward", "advantage", "num_completion_tokens", "turns", "status", "task", "group_id")


class QueryError(ValueError):
    """Error for a wrong parameter of a query.

    Attributes:
        field: Name of the parameter.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {str(value)[:100]!r}: it must be {allowed}")
        self.field = field


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Query for one page of the rollouts that match every given filter.

    Args:
        group: Complete id of the group.
        dropped: True selects only rollouts of dropped groups, False excludes them.
        text: Part of the error, or of the first or last `KEPT_TEXT` characters of the messages, ignoring case.
        sort: Column, one of `SORTABLE`. Ties are in the order of the file. Rows without a value are last.
        offset: Number of rows to skip.
        limit: Maximum number of rows, at most `MAX_LIMIT`.
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
        """Parse the parameters of a URL. Empty parameters are ignored.

        Raises:
            QueryError: A parameter is unknown or has a wrong value.
        """
        given = {name: text for name, text in parameters.items() if text}
        kinds = {one.name: cast(str, one.type) for one in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in given.items():
            if name not in kinds:
                raise QueryError(name, text, f"left out; the parameters are {', '.join(kinds)}")
            if kinds[name].startswith("float"):
                values[name] = number(name, text)
            elif kinds[name].startswith("bool"):
                if text not in ("true", "false"):
                    raise QueryError(name, text, "true or false")
                values[name] = text == "true"
            elif kinds[name].startswith("int"):
                values[name] = integer(name, text, least=0, most=MAX_LIMIT if name == "limit" else 1 << 53)
            else:
                values[name] = text
        if values.get("sort", "index") not in SORTABLE:
            raise QueryError("sort", values["sort"], f"one of {', '.join(SORTABLE)}")
        return cls(**values)


def number(name: str, text: str) -> float:
    """Parse a finite number.

    Raises:
        QueryError: The text is not a finite number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise QueryError(name, text, "a number")
    return value


def integer(name: str, text: str, *, least: int, most: int) -> int:
    """Parse an integer.

    Raises:
        QueryError: The text is not an integer from `least` to `most`.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise QueryError(name, text, f"a whole number from {least} to {most}")
    return int(text)


T = TypeVar("T")

KEPT_TEXT = 1000
"""Number of searchable characters at the beginning of a transcript, and at its end."""

PREVIEW = 160
MAX_PROMPTS = 200
MAX_PROMPT_STEPS = 12
_FACETS = ("status", "task", "phase")
_RANGES = ("step", "reward", "advantage", "num_completion_tokens", "turns")
_SHOWN = (
    "rollout_id", "group_id", "sibling", "seat", "step", "phase", "task", "status", "reward", "advantage",
    "num_completion_tokens", "turns", "dropped", "prompt",
)  # fmt: skip

_TABLES = f"""
CREATE TABLE rollouts ("index" INTEGER PRIMARY KEY, {", ".join(_SHOWN)}, offset INTEGER, length INTEGER);
CREATE INDEX by_group ON rollouts (group_id);
CREATE INDEX by_prompt ON rollouts (phase, prompt, step, reward);
CREATE INDEX by_facets ON rollouts (status, task, phase, step, reward, dropped);
CREATE TABLE previews ("index" INTEGER PRIMARY KEY, preview);
"""
_NAMES = ("index", *_SHOWN, "preview")
_ROWS = f'SELECT rollouts."index", {", ".join(_SHOWN)}, preview FROM rollouts JOIN previews USING ("index")'
_INSERT = f"INSERT INTO rollouts VALUES ({', '.join('?' * (len(_SHOWN) + 3))})"


class _Line(msgspec.Struct, gc=False):
    """Indexed fields of a line. Skipping the other fields takes hardly any time."""

    step: float | None = None
    phase: str = ""
    task: str = ""
    dropped: str | None = None
    rollout_id: str = ""
    group_id: str = ""
    sibling: int | None = None
    seat: str | None = None
    status: str = ""
    error: str | None = None
    reward: float | None = None
    advantage: float | None = None
    num_completion_tokens: int | None = None
    messages: list[Any] = msgspec.field(default_factory=list[Any])
    turns: list[msgspec.Raw] = msgspec.field(default_factory=list[msgspec.Raw])


class RolloutIndex:
    """Rollouts by their index among the readable lines of the file, from 0.

    Args:
        keeps_text: Whether texts can be searched. This takes up to 2 KB of memory per rollout.

    Attributes:
        num_broken: Number of lines that are not transcripts, or are too long to be read.
    """

    def __init__(self, *, keeps_text: bool = True) -> None:
        self._keeps_text = keeps_text
        self._lines = msgspec.json.Decoder(_Line)
        where = ":memory:" if keeps_text else ""  # a report uses a temporary file, so its memory is bounded
        self._database = sqlite3.connect(where, check_same_thread=False)  # used only by the holder of the run's lock
        self._hits = bytearray()  # by index of the rollout: 1 if its text contains `_searched`
        self._database.create_function("is_hit", 1, self._hits.__getitem__, deterministic=True)
        self._forget()

    def close(self) -> None:
        self._database.close()

    def clear(self) -> None:
        self._database.executescript("DROP TABLE rollouts; DROP TABLE previews;")
        self._forget()

    def _forget(self) -> None:
        self._database.executescript(_TABLES)
        self._size = 0
        self._texts: list[bytes] = []  # searchable texts, by index of the rollout
        self._searched: str = ""
        self._hits.clear()
        self._ranges: dict[str, list[float]] = {}
        self._num_held_out = 0
        self._found_prompts: tuple[int, dict[str, Any]] | None = None  # with the number of held-out rollouts then
        self.num_broken = 0

    def __len__(self) -> int:
        return self._size

    def add(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Add lines of the file with their offsets."""
        rows: list[tuple[Any, ...]] = []
        previews: list[tuple[int, str]] = []
        indices = count(self._size)
        for offset, line in lines:
            record = self._read(line)
            if record is None:
                self.num_broken += bool(line.strip())
                continue
            index = next(indices)
            shown = (getattr(record, name) for name in _SHOWN if name not in ("turns", "prompt"))
            *head, dropped = (printable(value) if isinstance(value, str) else value for value in shown)
            rows.append((index, *head, len(record.turns), dropped, _prompt(record), offset, len(line)))
            searched, preview = _texts(record)
            previews.append((index, preview))
            if self._keeps_text:
                self._texts.append(searched.encode())
            self._widen(record)
            self._num_held_out += record.phase == "validation"
        self._size += len(rows)
        with self._database:
            self._database.executemany(_INSERT, rows)
            self._database.executemany("INSERT INTO previews VALUES (?, ?)", previews)

    def _read(self, line: bytes) -> _Line | None:
        try:
            return self._lines.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        record = read_json(line)
        if record is None:
            return None
        try:
            turns = [msgspec.Raw()] * len(record.get("turns", ()))
            return msgspec.convert({**record, "turns": turns}, _Line)
        except (ValueError, TypeError):
            return None

    def _widen(self, record: _Line) -> None:
        for name in _RANGES:
            value = len(record.turns) if name == "turns" else getattr(record, name)
            if value is not None:
                low, high = self._ranges.setdefault(name, [value, value])
                self._ranges[name] = [min(low, value), max(high, value)]

    def byte_range(self, index: int) -> tuple[int, int] | None:
        """Return (offset, length) of a rollout's line; None if there is no such rollout."""
        found = self._database.execute('SELECT offset, length FROM rollouts WHERE "index" = ?', [index])
        return cast("tuple[int, int] | None", found.fetchone())

    def count_groups(self) -> dict[str, int]:
        """Number the groups of each phase for `group`, until rollouts are added. Returns the number of groups by
        phase."""
        self._database.executescript(
            "DROP TABLE IF EXISTS groups; "
            "CREATE TABLE groups AS SELECT phase, group_id, first, last, "
            "row_number() OVER (PARTITION BY phase ORDER BY step, first) - 1 AS place "
            'FROM (SELECT phase, step, group_id, min("index") AS first, max("index") AS last FROM rollouts '
            "GROUP BY phase, step, group_id); "
            "CREATE UNIQUE INDEX by_place ON groups (phase, place);"
        )
        return dict(self._database.execute("SELECT phase, count(*) FROM groups GROUP BY phase ORDER BY phase"))

    def group(self, phase: str, group_index: int) -> list[int]:
        """Return the indices of a group's rollouts. The groups of a phase are ordered by step."""
        found = self._database.execute(
            'SELECT "index" FROM groups JOIN rollouts ON rollouts.group_id = groups.group_id '
            'AND "index" BETWEEN first AND last WHERE groups.phase = ? AND place = ? ORDER BY "index"',
            [phase, group_index],
        )
        return [index for (index,) in found]

    def prompts(self) -> dict[str, Any]:
        """Find prompts that occur at several steps, each with its rollout of median reward. Held-out ones are
        preferred.

        Returns:
            same: Whether each line has one prompt. If no prompt occurs twice, there is one line with different prompts.
            prompts: At most `MAX_PROMPTS` lines, [{"prompt", "task", "seat", "group_id", "steps": [...]}], with at most
                `MAX_PROMPT_STEPS` steps each, including the first and the last: {"step", "index", "reward", "lowest",
                "highest", "count"}, where index and reward are those of the median rollout. Faults have no reward.
            median: Index of the prompt whose last reward is the median of all prompts; None if there are no prompts.
        """
        if self._found_prompts is None or self._found_prompts[0] != self._num_held_out or not self._num_held_out:
            self._found_prompts = self._num_held_out, self._find_prompts()
        return self._found_prompts[1]

    def _find_prompts(self) -> dict[str, Any]:
        for phase in ("validation", "train"):
            for by in (_KEY, "NULL"):
                found = self._prompts(phase, by)
                lines = [line for line in found if len(line["steps"]) > 1]
                if lines:
                    last = max(line["steps"][-1]["step"] for line in lines)
                    scored = [
                        (line["steps"][-1]["reward"], index)
                        for index, line in enumerate(lines)
                        if line["steps"][-1]["step"] == last and line["steps"][-1]["reward"] is not None
                    ]
                    return {"same": by == _KEY, "prompts": lines, "median": median_low(scored)[1] if scored else 0}
        return {"same": False, "prompts": [], "median": None}

    def _prompts(self, phase: str, by: str) -> list[dict[str, Any]]:
        """Collect the lines of one phase, grouped by these columns."""
        found = self._database.execute(
            'SELECT prompt, task, seat, group_id, step, "index", judged, lowest, highest, size FROM ('
            "SELECT *, row_number() OVER siblings AS place, count(*) OVER alike AS size, count(judged) OVER alike AS "
            "scored, min(judged) OVER alike AS lowest, max(judged) OVER alike AS highest FROM ("
            f"SELECT *, CASE WHEN status NOT IN ({_FAULTS}) THEN reward END AS judged FROM rollouts) "
            f"WHERE phase = ? AND dropped IS NULL AND step IS NOT NULL "
            f"WINDOW alike AS (PARTITION BY {by}, step), siblings AS (PARTITION BY {by}, step ORDER BY judged IS NULL, "
            'judged, "index")) WHERE place = max(1, (scored + 1) / 2) ORDER BY step, "index"',
            [phase],
        )
        lines: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for prompt, task, seat, group, *at in found:
            key = (prompt, task, seat) if by == _KEY else None
            line = lines[key]
            if not line:
                if len(lines) > MAX_PROMPTS:
                    del lines[key]
                    continue
                line.update({"prompt": prompt, "task": task, "seat": seat, "group_id": group, "steps": []})
            line["steps"].append(dict(zip(("step", "index", "reward", "lowest", "highest", "count"), at, strict=True)))
        for line in lines.values():
            line["steps"] = _spread(line["steps"], MAX_PROMPT_STEPS)
        return list(lines.values())

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of these rollouts in the form of `find`, ordered by index."""
        wanted = ", ".join(str(int(index)) for index in indices)
        found = self._database.execute(f'{_ROWS} WHERE "index" IN ({wanted}) ORDER BY "index"')
        return [dict(zip(_NAMES, row, strict=True)) for row in found]

    def find(self, query: RolloutQuery) -> dict[str, Any]:
        """Find one page of the matching rollouts.

        Returns:
            total: Number of matching rollouts.
            rows: Rows of the page.
            facets: For each of `status`, `task` and `phase`, the number of rollouts with each value that match the
                other filters.
            ranges: Lowest and highest value of each number, over all rollouts.
        """
        if query.text is not None:
            self._search(query.text)
        where, values = _where(query, _FILTERS)
        direction = "DESC" if query.descending else "ASC"
        order = f'"{query.sort}" {direction} NULLS LAST, "index" {direction}'
        rows = self._database.execute(
            f'{_ROWS} WHERE "index" IN (SELECT "index" FROM rollouts WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?) '
            f"ORDER BY {order}",
            [*values, query.limit, query.offset],
        ).fetchall()
        total, facets = self._count(query)
        return {
            "total": total,
            "rows": [dict(zip(_NAMES, row, strict=True)) for row in rows],
            "facets": facets,
            "ranges": self._ranges,
        }

    def _count(self, query: RolloutQuery) -> tuple[int, dict[str, dict[str, int]]]:
        """Count the matching rollouts, and make the facets. All facets together have few values."""
        where, values = _where(query, {name: sql for name, sql in _FILTERS.items() if name not in _FACETS})
        names = ", ".join(_FACETS)
        counted = self._database.execute(
            f"SELECT count(*), {names} FROM rollouts WHERE {where} GROUP BY {names} ORDER BY {names}", values
        )
        total = 0
        facets: dict[str, dict[str, int]] = {name: {} for name in _FACETS}
        for count_of, *found in counted:
            differing = [
                name
                for name, value in zip(_FACETS, found, strict=True)
                if (wanted := getattr(query, name)) is not None and value != wanted
            ]
            total += count_of if not differing else 0
            for name, value in zip(_FACETS, found, strict=True):
                if differing in ([], [name]):
                    facets[name][value] = facets[name].get(value, 0) + count_of
        return total, facets

    def _search(self, text: str) -> None:
        """Update which rollouts contain a text. If the text is the same as before, only new rollouts are searched; if
        it extends the text before, only earlier hits and new rollouts are."""
        sought = printable(text.casefold()).encode()
        if not (self._searched and self._searched in text):
            self._hits.clear()
        elif self._searched != text:
            self._hits[:] = bytes(hit and sought in self._texts[index] for index, hit in enumerate(self._hits))
        self._hits += bytes(sought in found for found in islice(self._texts, len(self._hits), None))
        self._searched = text


_FILTERS = {
    "phase": "phase = ?",
    "task": "task = ?",
    "status": "status = ?",
    "group": "group_id = ?",
    "step_min": "step >= ?",
    "step_max": "step <= ?",
    "reward_min": "reward >= ?",
    "reward_max": "reward <= ?",
    "dropped": "(dropped IS NOT NULL) = ?",
}


_KEY = "prompt, task, seat"
_FAULTS = ", ".join(f"'{status}'" for status in RolloutStatus if status.is_fault)


def _prompt(record: _Line) -> str:
    """Digest of the messages before the first answer; the group's id for a rollout without messages."""
    opening: list[Any] = []
    for message in record.messages:
        if as_table(message).get("role") == "assistant" and not as_table(message).get("prefix"):
            break  # a message with "prefix" is the beginning of the answer, and part of the prompt
        opening.append(message)
    if not opening:
        return printable(record.group_id)
    return blake2b(json.dumps(opening).encode(), digest_size=8).hexdigest()  # ASCII, even for a lone surrogate


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Choose at most `most` items evenly, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _where(query: RolloutQuery, filters: Mapping[str, str]) -> tuple[str, Sequence[Any]]:
    given = {sql: value for name, sql in filters.items() if (value := getattr(query, name)) is not None}
    clauses = [*given, *(['is_hit("index")'] if query.text is not None else [])]
    return " AND ".join(clauses) or "1", list(given.values())


def _texts(record: _Line) -> tuple[str, str]:
    """Text to search, and the preview in a row: the end of the last reply, or the error."""
    messages = [(message.get("role"), _text(message)) for message in map(as_table, record.messages) if message]
    transcript = "\n".join(text for _, text in messages)
    kept = transcript if len(transcript) <= 2 * KEPT_TEXT else f"{transcript[:KEPT_TEXT]}\n{transcript[-KEPT_TEXT:]}"
    searched = f"{record.error or ''}\n{kept}".casefold()
    answers = [text for role, text in messages if role == "assistant" and text.strip()]
    preview = answers[-1] if answers else record.error or transcript
    return printable(searched), printable(" ".join(preview[: 4 * PREVIEW].split())[:PREVIEW])


def _text(message: Mapping[str, Any]) -> str:
    parts = [message.get("reasoning_content"), message.get("content"), message.get("tool_calls")]
    return "\n".join(_as_text(part) for part in parts if part)


def _as_text(part: object) -> str:
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str)
