"""Files of rows as people have them: formats, compression, and rows that cannot be meant."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from titan_rl.core.errors import ConfigError
from titan_rl.tasks import read_rows

ROWS = [{"question": f"What is {a} + 1?", "answer": str(a + 1)} for a in range(100)]
LINES = "\n".join(map(json.dumps, ROWS))
TABLE = "question,answer\n" + "".join(f'"{row["question"]}",{row["answer"]}\n' for row in ROWS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", LINES),
        ("rows.ndjson", LINES),
        ("rows.json", json.dumps(ROWS)),
        ("rows.json", json.dumps(ROWS, indent=1)),
        ("rows.json", LINES),
        ("rows.JSON", LINES),
        ("rows.txt", LINES),
        ("rows", f"\n {json.dumps(ROWS)}"),
        ("rows.csv", TABLE),
        ("rows.tsv", TABLE.replace(",", "\t")),
    ],
)
def test_text_formats_give_the_same_rows_also_compressed_or_with_a_byte_order_mark(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_rows(tmp_path / name) == ROWS
    (tmp_path / name).write_text(f"\ufeff{text}", encoding="utf-8")
    assert read_rows(tmp_path / name) == ROWS
    with gzip.open(tmp_path / f"{name}.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    assert read_rows(tmp_path / f"{name}.gz") == ROWS


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    assert read_rows(parquet(tmp_path / "rows.parquet", ROWS * 30)) == ROWS * 30


def test_parquet_invents_no_nulls_in_chats(tmp_path: Path) -> None:
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}

    prompt = [{"role": "user", "content": "Hi"}, call("find", names=["Ada"]), call("add", a=1, b=2)]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    tools[0]["function"]["parameters"]["properties"] = {"a": {"type": "number"}, "b": {"description": "the second"}}
    rows = [{"prompt": prompt, "tools": tools, "info": {"a": 1}}, {"prompt": prompt[:1], "info": {"b": 2}}]
    first, second = read_rows(parquet(tmp_path / "rows.parquet", rows))
    assert first == {"prompt": prompt, "tools": tools, "info": {"a": 1, "b": None}}
    assert second == {"prompt": prompt[:1], "tools": None, "info": {"a": None, "b": 2}}


def test_csv_field_may_hold_a_document(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"a,b\n1,{'x' * 200_000}\n")
    assert read_rows(tmp_path / "rows.csv") == [{"a": "1", "b": "x" * 200_000}]


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([[1], [2]], names=["a", "a"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows.parquet has more than one 'a'; rename or remove all but one"):
        read_rows(tmp_path / "rows.parquet")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", "x", "has an unsupported format; use a .jsonl"),
        ("a.jsonl", '{"a": 1}\n\n{"a": \n', "a.jsonl:3 is not valid JSON"),
        ("a.jsonl", "[1]", r"a.jsonl:1 is not a JSON object: \[1\]"),
        ("a.jsonl", '{"a": 1}\n{"a": [{"b": 1, "b": 2}]}', r"a.jsonl:2 has an object with more than one 'b'; keep one"),
        ("a.jsonl", '{"a": 1}\n{"b": {"c": "\\ud83d"}}', r"a.jsonl:2: 'b' has \\ud83d, half of a surrogate pair"),
        ("a.jsonl", "\n", "has no rows"),
        ("a.jsonl", POINTER, "a.jsonl is a Git LFS pointer, not the data; run: git lfs pull"),
        ("a.json", '[{"a": "\\uDE00"}]', r"a.json\[0\]: 'a' has \\ude00, half of a surrogate pair"),
        ("a.json", '[{"a": 1}, 2]', r"a.json\[1\] is not a JSON object: 2"),
        ("a.json", "x", "a.json:1 is not valid JSON"),
        ("a.json.gz", "[]", "a.json.gz cannot be read: Not a gzipped file"),
        ("a.csv", "a,b\n1\n", "a.csv:2 has a different number of values than the header"),
        ("a.csv", "a,b,a\n1,2,3\n", "a.csv has more than one 'a'; rename or remove all but one"),
        ("a.parquet", "x", "is not a Parquet file"),
        ("a.parquet", POINTER, "a.parquet is a Git LFS pointer, not the data; run: git lfs pull"),
    ],
)
def test_unreadable_file_error_gives_the_location(tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_rows(tmp_path / name)
    with pytest.raises(ConfigError, match=r"nowhere.jsonl cannot be read: No such file"):
        read_rows(tmp_path / "nowhere.jsonl")


def test_truncated_compressed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode())[:-100])
    with pytest.raises(ConfigError, match=r"a.jsonl.gz cannot be read: Compressed file ended before"):
        read_rows(tmp_path / "a.jsonl.gz")


def test_emoji_that_is_written_as_escapes_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": "\U0001f600"}))
    assert read_rows(tmp_path / "a.jsonl") == [{"a": "\U0001f600"}]
