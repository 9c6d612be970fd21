"""Reader of files of rows, used wherever a setting names one: JSON lines, JSON, CSV, TSV and Parquet."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from titan_rl.core.calls.imports import require
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ConfigError, DataError

Row = dict[str, Any]

FORMATS = ".jsonl, .ndjson, .json, .csv, .tsv or .parquet file; all but the last may end with .gz"

LFS_POINTER = "version https://git-lfs"


def read_rows(path: str | Path) -> list[Row]:
    """Read the rows of a file in the format of its suffix: .jsonl or .ndjson (a JSON object in each line), .json (a
    list of objects, or JSON lines), .csv or .tsv (with a header; all values are text) or .parquet. A text file may be
    compressed, with the suffix .gz. A file with another suffix is read like .json if it begins like one.

    Raises:
        ConfigError: the file is missing, has another format, or does not consist of rows. Names the file and the line.
        MissingExtraError: pyarrow, which reads Parquet, is not installed.
    """
    return [row for _, row in rows_with_places(path)]


def rows_with_places(path: str | Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file, each after its place for messages, such as "chats.jsonl:3"; see `read_rows`."""
    path = Path(path)
    is_empty = True
    try:
        for row in _rows(path):
            is_empty = False
            yield row
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    if is_empty:
        raise ConfigError(f"{path} has no rows")


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet(path)
    compressed = suffix == ".gz"
    return _of_text(path, Path(path.stem).suffix.lower() if compressed else suffix, gzip.open if compressed else open)


def _of_text(path: Path, suffix: str, open_file: Any) -> Iterator[tuple[str, Row]]:
    with open_file(path, "rt", encoding="utf-8-sig", newline="" if suffix in (".csv", ".tsv") else None) as file:
        _require_data(start := file.read(len(LFS_POINTER)), path)
        file.seek(0)
        if suffix in (".csv", ".tsv"):
            yield from _csv(file, path, "\t" if suffix == ".tsv" else ",")
        elif suffix in (".jsonl", ".ndjson"):
            yield from _json_lines(file, path)
        elif start.lstrip().startswith("["):
            yield from _json_list(file, path)
        elif suffix == ".json" or start.lstrip().startswith("{"):
            yield from _json_lines(file, path)
        else:
            raise ConfigError(f"{path} has an unsupported format; use a {FORMATS}")


def _json_lines(file: IO[str], path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _row(_parsed(line, place), place, has_surrogates=_has_surrogates(line))


def _json_list(file: IO[str], path: Path) -> Iterator[tuple[str, Row]]:
    text = file.read()
    has_surrogates = _has_surrogates(text)
    for number, row in enumerate(cast("list[Any]", _parsed(text, str(path)))):
        yield f"{path}[{number}]", _row(row, f"{path}[{number}]", has_surrogates=has_surrogates)


def _has_surrogates(text: str) -> bool:
    """Whether a text of JSON may have surrogates, which can only be written as escapes."""
    return "\\ud" in text or "\\uD" in text


def _csv(file: IO[str], path: Path, delimiter: str) -> Iterator[tuple[str, Row]]:
    reader = csv.DictReader(file, delimiter=delimiter)
    before = csv.field_size_limit(sys.maxsize)  # a field may hold a whole document
    try:
        require_different(reader.fieldnames or (), path)
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(f"{path}:{reader.line_num} has a different number of values than the header")
            yield f"{path}:{reader.line_num}", dict(row)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num} is not valid CSV: {error}") from None
    finally:
        csv.field_size_limit(before)


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of a Parquet file, or of a folder of them."""
    parquet: Any = require("pyarrow.parquet", "rows")
    number = 0
    try:
        for part in sorted(path.rglob("*.parquet")) if path.is_dir() else [path]:
            file = parquet.ParquetFile(part)
            require_different(file.schema_arrow.names, part)
            for batch in file.iter_batches(1000):  # not all at once, because a reader may want the first few
                for row in batch.to_pylist():
                    yield f"row {number} of {path}", {name: without_invented_nulls(row[name]) for name in row}
                    number += 1
    except (OSError, ConfigError):
        raise
    except Exception as error:  # an error type of pyarrow
        with path.open("rb") as file:
            _require_data(file.read(len(LFS_POINTER)).decode("latin-1"), path)
        raise ConfigError(f"{path} is not a Parquet file: {error}") from None


def _require_data(start: str, path: Path) -> None:
    if start == LFS_POINTER:
        raise ConfigError(f"{path} is a Git LFS pointer, not the data; run: git lfs pull")


def require_different(columns: Sequence[str], path: object) -> None:
    """Check that no two columns have the same name.

    Raises:
        ConfigError: two have. Names them.
    """
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise ConfigError(f"{path} has more than one {', '.join(map(repr, twice))}; rename or remove all but one")


def without_invented_nulls(value: Any) -> Any:
    """A value of Arrow data without nulls, if it is a chat or a list of tools; anything else unchanged.

    All structs of an Arrow column have the same fields. So a message without tool calls has null for them, and a call
    has null for the arguments of other calls. Other columns keep their nulls, because code may expect their fields.

    >>> without_invented_nulls([{"role": "user", "content": "Hi", "tool_calls": None}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    return _without_nulls(value) if _is_of_chat(value) else value


def _is_of_chat(value: Any) -> bool:
    if not isinstance(value, list) or not value or not isinstance(first := cast("list[Any]", value)[0], dict):
        return False
    return any(name in first for name in ("role", "from", "function", "parameters"))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value).items()
        return {name: _without_nulls(item) for name, item in fields if item is not None}
    return [_without_nulls(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _parsed(text: str, place: str) -> Any:
    try:
        return parse_json(text, object_pairs_hook=_object)
    except DataError as error:
        raise ConfigError(f"{place} {error}") from None
    except ValueError as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> Row:
    if len(made := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"has an object with more than one {twice!r}; keep one of them")
    return made


def _row(value: Any, place: str, *, has_surrogates: bool) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is not a JSON object: {json.dumps(value)[:80]}")
    row = cast("Row", value)
    if has_surrogates:
        for name, item in row.items():
            try:
                json.dumps({name: item}, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(error.object[error.start]):x}"
                raise ConfigError(
                    f"{place}: {name!r} has {half}, half of a surrogate pair, which is no character; the text was "
                    "probably cut in the middle of an emoji: remove the half"
                ) from None
    return row
