"""Rows of a local file: JSON lines, JSON, CSV or Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from titan_rl.core.calls.imports import require
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ConfigError

Row = dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file, by the end of its name: .jsonl, .json (a list of objects), .csv (with a header; all values
    are text) or .parquet.

    Raises:
        ConfigError: there is no such file, it is of no such kind, or has something else than rows. Names the file and,
            where it has any, the line.
        MissingExtraError: reading Parquet needs pyarrow.
    """
    path = Path(path)
    read = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"{path} is of no kind that has rows; give a .jsonl, .json, .csv or .parquet file")
    try:
        rows = list(read(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _row(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _json(path: Path) -> Iterator[Row]:
    rows = _parsed(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(rows, list):
        raise ConfigError(f"{path} is no JSON list of objects")
    for number, row in enumerate(cast("list[Any]", rows)):
        yield _row(row, f"{path}[{number}]")


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in (reader := csv.DictReader(file)):
            if None in row or None in row.values():
                raise ConfigError(f"{path}:{reader.line_num} has another number of values than the header")
            yield dict(row)


def _parquet(path: Path) -> Iterator[Row]:
    parquet: Any = require("pyarrow.parquet", "rows")
    try:
        yield from parquet.read_table(path).to_pylist()
    except OSError:
        raise
    except Exception as error:  # pyarrow's own
        raise ConfigError(f"{path} is no Parquet file: {error}") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is no JSON object: {json.dumps(value)[:80]}")
    return cast("Row", value)
