"""Reading of JSON lines written by Python, with NaN and infinity as null."""

from __future__ import annotations

import json
from typing import Any

import pytest

from titan_rl.core.files import read_json, strict_json


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"a": NaN, "b": [Infinity, -Infinity, 0.5]}', {"a": None, "b": [None, None, 0.5]}),
        (b'{"a": 1e999}', {"a": None}),
        (b'{"a": "\\ud83d NaN"}', {"a": "\ud83d NaN"}),
        (b'{"a": 1}', {"a": 1}),
        (b"[1]", None),
        (b"{", None),
        (b"\xff", None),
        (b"[" * 10_000, None),
        (b'{"a": "\xff"}', None),
    ],
)
def test_read_json_maps_non_finite_numbers_and_invalid_lines_to_none(line: bytes, value: Any) -> None:
    assert read_json(line) == value


@pytest.mark.parametrize(
    "line",
    [b'{"a": NaN, "b": [Infinity, 0.5]}', b'{"a": "\\ud83d", "b": NaN}', b'{"a": "\xff", "b": 1}', b'{"a": 1e999}'],
)
def test_strict_json_is_valid_json(line: bytes) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    strict = strict_json(line)
    parsed = json.loads(strict.decode(), parse_constant=refuse)
    json.dumps(parsed, allow_nan=False)
    assert set(parsed) == {"a"} | ({"b"} if b'"b"' in line else set())


def test_strict_json_returns_valid_lines_unchanged() -> None:
    line = b'{"b":1,  "a": "\xc3\xa9"}'
    assert strict_json(line) is line
