"""Which tokens count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast, overload


class MaskArray(Sequence[bool]):
    """Booleans in a byte each, which nobody changes."""

    __slots__ = ("_bytes",)

    def __init__(self, values: bytes | bytearray) -> None:
        self._bytes = bytes(values)

    def __len__(self) -> int:
        return len(self._bytes)

    @overload
    def __getitem__(self, index: int) -> bool: ...
    @overload
    def __getitem__(self, index: slice) -> MaskArray: ...
    def __getitem__(self, index: int | slice) -> bool | MaskArray:
        found = self._bytes[index]
        return MaskArray(found) if isinstance(found, bytes) else bool(found)

    def __iter__(self) -> Iterator[bool]:
        return map(bool, self._bytes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MaskArray):
            return self._bytes == other._bytes
        return list(self) == list(cast("Sequence[Any]", other)) if isinstance(other, list | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.frombuffer(self._bytes, np.bool_).astype(dtype or np.bool_)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskArray, (self._bytes,)

    def count(self, value: Any) -> int:
        return self._bytes.count(bool(value))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        return self._bytes.index(bool(value), start, len(self) if stop is None else stop)

    def tolist(self) -> list[bool]:
        return list(self)
