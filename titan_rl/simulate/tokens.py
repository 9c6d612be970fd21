"""Tokens without memory: a long answer of a simulation is its length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Repeated(Sequence[T], Generic[T]):
    """One value, `length` times.

    >>> list(Repeated(0.5, 3)[1:])
    [0.5, 0.5]
    """

    __slots__ = ("_length", "_value")

    def __init__(self, value: T, length: int) -> None:
        self._value, self._length = value, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return repeat(self._value, self._length)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Repeated[T]: ...
    def __getitem__(self, index: int | slice) -> T | Repeated[T]:
        if isinstance(index, slice):
            return Repeated(self._value, len(range(*index.indices(self._length))))
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._value
