"""The spans of a trace as columns: a long run has a million of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

IDLE = "idle"
"""Among a span's categories: its lane waits for others."""

Spans = NDArray[np.void]
"""Of `SPAN`."""

SPAN = np.dtype(
    [
        ("start", "i8"),
        ("end", "i8"),
        ("offset", "i8"),
        ("length", "i4"),
        ("name", "i4"),
        ("kind", "i4"),
        ("step", "i4"),
        ("version", "i4"),
        ("depth", "i4"),
        ("goes_on", "?"),
    ]
)
"""A span: microseconds since 1970, the place of its line in its file, the places of its name and its kind among
`Names`, the step and the version among its args or -1, in how many other spans of its lane it lies, and whether it is
a part of one, of which the next is not written yet."""

_LANES = ("steps", "sync", "train", "publish", "save", "engine", "checkpoint", "slot", "rollout", "reward", "request")


class _Line(msgspec.Struct, gc=False):
    args: dict[str, Any] = {}


_LINE = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One stretch of a lane; times in seconds since 1970."""

    start: float
    end: float
    name: str
    kind: str
    args: dict[str, Any]


class Names:
    """Each name once, by its place."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._names: list[str] = []

    def __getitem__(self, place: int) -> str:
        return self._names[place]

    def places(self, names: Iterable[str]) -> list[int]:
        return [place if (place := self._places.get(name)) is not None else self._add(name) for name in names]

    def idle(self) -> NDArray[np.bool_]:
        """By the places of kinds, whether a span of it waits."""
        return np.array([name.endswith(IDLE) for name in self._names], bool)

    def _add(self, name: str) -> int:
        self._names.append(name)
        return self._places.setdefault(name, len(self._names) - 1)


class Lane:
    """The spans of one lane, of the file of its process."""

    def __init__(self, path: Path, names: Names) -> None:
        self._path = path
        self._names = names
        self._spans = np.empty(0, SPAN)
        self._fresh: list[Spans] = []

    def add(self, spans: Spans) -> None:
        self._fresh.append(spans)

    @property
    def spans(self) -> Spans:
        """By their beginnings, of two that begin together the longer first."""
        if self._fresh:
            spans = np.concatenate([self._spans, *self._fresh])
            self._fresh.clear()
            spans = _whole(spans)
            self._spans = spans = spans[np.lexsort((-spans["end"], spans["start"]))]
            # Clocks are read twice between two spans of which none lies in the other: a microsecond is no overlap.
            ends = np.sort(np.maximum(spans["end"], spans["start"] + 2))
            spans["depth"] = np.arange(len(spans)) - np.searchsorted(ends, spans["start"] + 1, "right")
        return self._spans

    def __iter__(self) -> Iterator[TraceSpan]:
        spans = self.spans
        for span, args in zip(spans, self.args(spans), strict=True):
            name, kind = self._names[span["name"]], self._names[span["kind"]]
            yield TraceSpan(float(span["start"] / 1e6), float(span["end"] / 1e6), name, kind, args)

    def args(self, spans: Spans) -> list[dict[str, Any]]:
        """Of some of the spans, read from the file; none where that has been cut in the meantime."""
        if not len(spans):
            return []
        try:
            with self._path.open("rb") as file:
                fd = file.fileno()
                lines = [
                    os.pread(fd, length, offset)
                    for offset, length in zip(spans["offset"].tolist(), spans["length"].tolist(), strict=True)
                ]
        except OSError:
            lines = [b""] * len(spans)
        return [_args(line) for line in lines]


@dataclass(slots=True)
class ProcessTrace:
    """What one process has written: spans by the names of their lanes, and counters by theirs.

    Attributes:
        host: on which it runs, or ran last; "" where the trace does not say.
    """

    host: str = ""
    lanes: dict[str, Lane] = field(default_factory=dict[str, Lane])
    counters: dict[str, Lane] = field(default_factory=dict[str, Lane])


def plane_of(kind: str) -> str:
    """The part of the run that a span of this kind belongs to."""
    return kind.removeprefix("fine,").removesuffix(f",{IDLE}")


def sorted_lanes(lanes: Iterable[str]) -> list[str]:
    """As they are shown: "rollout 2" before "rollout 10"."""
    return sorted(lanes, key=lambda lane: place_of(lane, _LANES))


def place_of(name: str, order: Sequence[str]) -> tuple[int, str, int]:
    """A key to sort by: the first of `order` that the name begins with, and the number that it ends with."""
    matched = re.fullmatch(r"(.*?)[ -]?(\d*)", name, re.DOTALL)
    assert matched is not None
    kind, number = matched[1], int(matched[2] or 0)
    return next((i for i, one in enumerate(order) if kind.startswith(one)), len(order)), kind, number


def _whole(spans: Spans) -> Spans:
    """Parts of one span joined, with the line of the last."""
    if not spans["goes_on"].any():
        return spans
    spans = spans[np.lexsort((spans["start"], spans["kind"], spans["name"]))]
    same = (spans["name"][1:] == spans["name"][:-1]) & (spans["kind"][1:] == spans["kind"][:-1])
    follows = same & spans["goes_on"][:-1] & (spans["start"][1:] == spans["end"][:-1])
    firsts = np.concatenate([[True], ~follows])
    whole = spans[np.concatenate([~follows, [True]])]
    whole["start"] = spans["start"][firsts]
    return whole


def _args(line: bytes) -> dict[str, Any]:
    try:
        args = _LINE.decode(line).args
        args.pop("goes_on", None)
        return args
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
