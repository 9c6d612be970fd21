"""Numbers of tokens: ids, logprobs, versions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

N = TypeVar("N", int, float)

TOKENS, LOGPROBS, VERSIONS = "i", "d", "q"
"""What a token id, a logprob and a version take: 4, 8 and 8 bytes."""

LARGEST_TOKEN_ID = 2**31 - 1


class NumberArray(Sequence[N]):
    """Numbers of one type, which nobody changes. Equal to every list, tuple and array of the same numbers, and in the
    same order.

    NumPy and torch take it through `numpy.asarray`, which cannot be written to.

    Args:
        values: nobody changes them from here on. With a `stop`, they may grow: this is a window on them then, which the
            turns of a rollout share.

    Example: `token_array([5, 9]) == [5, 9]`, and `[7, *token_array([5, 9])[1:]]` is `[7, 9]`.
    """

    __slots__ = ("_is_window", "_start", "_stop", "_values")

    def __init__(self, values: array[N], start: int = 0, stop: int | None = None) -> None:
        self._values = values
        self._start = start
        self._stop = len(values) if stop is None else stop
        self._is_window = stop is not None

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> N: ...
    @overload
    def __getitem__(self, index: slice) -> NumberArray[N]: ...
    def __getitem__(self, index: int | slice) -> N | NumberArray[N]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return NumberArray(self.array()[index])
            return NumberArray(self._values[self._start + start : self._start + max(start, stop)])
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} numbers")
        return self._values[(self._start if index >= 0 else self._stop) + index]

    def __iter__(self) -> Iterator[N]:
        return iter(self.array())

    def __contains__(self, value: object) -> bool:
        return value in self.array()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberArray):
            given = cast("NumberArray[Any]", other)
            if given.typecode == self.typecode and given.tobytes() == self.tobytes():
                return True
            other = given.array()
        if isinstance(other, array):
            return self.array() == cast("array[Any]", other)
        if isinstance(other, list):
            return self.tolist() == other
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __lt__(self, other: Sequence[N]) -> bool:
        return self.tolist() < list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[N]) -> NumberArray[N]:
        return NumberArray(self.array() + array(self.typecode, other))

    def __radd__(self, other: Sequence[N]) -> NumberArray[N]:
        return NumberArray(array(self.typecode, other) + self.array())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        own = self._view()
        return np.array(own, dtype) if copy else own if dtype is None else own.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_window:
            return NumberArray, (self._values, self._start, self._stop)  # what shares an array shares it there, too
        return NumberArray, (self._values,)

    @property
    def typecode(self) -> str:
        """As `array` has it."""
        return self._values.typecode

    @property
    def nbytes(self) -> int:
        return len(self) * self._values.itemsize

    def array(self) -> array[N]:
        """Not to be changed. Of a window a copy: an array cannot grow while its memory is lent."""
        return self._values[self._start : self._stop] if self._is_window else self._values

    def window(self) -> tuple[array[N], int, int] | None:
        """Of an array that it shares: the array, and from where to where; None where it has its own."""
        return (self._values, self._start, self._stop) if self._is_window else None

    def least(self) -> N:
        """
        Raises:
            ValueError: there are none.
        """
        return self._view().min().item()

    def is_finite(self) -> bool:
        """Whether none of them is NaN or infinite."""
        import numpy as np

        return bool(np.isfinite(self._view()).all())

    def tolist(self) -> list[N]:
        return self.array().tolist()

    def tobytes(self) -> bytes:
        return self.array().tobytes()

    def _view(self) -> Any:
        """As NumPy has it, not to be written to."""
        import numpy as np

        view = np.frombuffer(self.array(), self.typecode)
        view.flags.writeable = False
        return view


def token_array(values: Iterable[int]) -> NumberArray[int]:
    """
    Raises:
        TypeError: one of them is no integer.
        OverflowError: one of them does not fit in 32 bits.
    """
    return _packed(TOKENS, values)


def logprob_array(values: Iterable[float]) -> NumberArray[float]:
    """
    Raises:
        TypeError: one of them is no number.
    """
    return _packed(LOGPROBS, values)


def version_array(spans: Iterable[tuple[int, int]]) -> NumberArray[int]:
    """
    Args:
        spans: versions, and of how many tokens each is.
    """
    versions = array(VERSIONS)
    for version, num_tokens in spans:
        versions += array(VERSIONS, (version,)) * num_tokens
    return NumberArray(versions)


def array_from_bytes(typecode: str, data: bytes) -> NumberArray[Any]:
    """What `tobytes` gave.

    Raises:
        ValueError: these are not the bytes of whole numbers.
    """
    return NumberArray(array(typecode, data))


def _packed(typecode: str, values: Iterable[Any]) -> NumberArray[Any]:
    if isinstance(values, NumberArray):
        if values._values.typecode == typecode:  # pyright: ignore[reportPrivateUsage]
            return values
        values = values.array()
    elif not isinstance(values, array) and hasattr(values, "tolist"):
        values = cast(Any, values).tolist()
    return NumberArray[Any](array(typecode, values))


def common_length(one: NumberArray[N], other: NumberArray[N]) -> int:
    """How many numbers both begin with."""
    low, high = 0, min(len(one), len(other))
    if one[:high].tobytes() == other[:high].tobytes():
        return high
    while low < high:  # they agree up to low, and not up to high + 1
        middle = (low + high + 1) // 2
        if one[low:middle].tobytes() == other[low:middle].tobytes():
            low = middle
        else:
            high = middle - 1
    return low
