"""Which turn a sequence of tokens goes on from."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Prefixes(Generic[T]):
    """Finds the longest of many sequences that another begins with, in one pass over that.

    Example:

        prefixes = Prefixes[str]()
        prefixes.add([5, 6], "short")
        prefixes.add([5, 6, 7], "long")
        prefixes.longest([5, 6, 7, 8])      # ["long"]
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._found: dict[tuple[int, bytes], list[T]] = {}

    def add(self, token_ids: Sequence[int], value: T) -> None:
        key = len(token_ids), blake2b(_bytes_of(token_ids), digest_size=16).digest()
        if key not in self._found:
            self._found[key] = []
            if len(token_ids) not in self._lengths:
                insort(self._lengths, len(token_ids))
        self._found[key].append(value)

    def longest(self, token_ids: Sequence[int]) -> Sequence[T]:
        """The values of the longest sequence that `token_ids` begins with; none where there is none."""
        running, position = blake2b(digest_size=16), 0
        found: Sequence[T] = ()
        for length in self._lengths:
            if length > len(token_ids):
                break
            running.update(_bytes_of(token_ids[position:length]))
            position = length
            found = self._found.get((length, running.digest()), found)
        return found


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()
