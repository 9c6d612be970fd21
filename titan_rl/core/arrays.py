"""Packed per-token arrays: ids, logprobs, versions, masks and routed experts.

Lists of the same values take five times the memory, and more time for every operation. Functions that need NumPy import
it when they are called.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

N = TypeVar("N", int, float)

TOKENS, LOGPROBS, VERSIONS = "i", "d", "q"
"""Type codes of token ids, logprobs and versions: 4, 8 and 8 bytes each."""

LARGEST_TOKEN_ID = 2**31 - 1


class NumberArray(Sequence[N]):
    """Immutable sequence of numbers of one type, equal to a list, tuple or array of the same numbers.

    `numpy.asarray` gives a read-only array of it, for NumPy and torch.

    Args:
        values: Must not be changed afterwards. With `stop`, the sequence is a window on `values`, which may grow and
            which the turns of a rollout share.

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
            return NumberArray, (self._values, self._start, self._stop)  # windows share their array after unpickling
        return NumberArray, (self._values,)

    @property
    def typecode(self) -> str:
        """Type code of the underlying `array`."""
        return self._values.typecode

    @property
    def nbytes(self) -> int:
        return len(self) * self._values.itemsize

    def array(self) -> array[N]:
        """The underlying array, which must not be changed; for a window a copy, because an array cannot grow while
        its memory is lent."""
        return self._values[self._start : self._stop] if self._is_window else self._values

    def window(self) -> tuple[array[N], int, int] | None:
        """The shared array, with the start and end of the window in it; None if the sequence is not a window."""
        return (self._values, self._start, self._stop) if self._is_window else None

    def least(self) -> N:
        """The smallest number; NaN if any number is.

        Raises:
            ValueError: the sequence is empty.
        """
        import numpy as np

        return np.minimum.reduce(self.array()).item()

    def most(self) -> N:
        """The largest number; NaN if any number is.

        Raises:
            ValueError: the sequence is empty.
        """
        import numpy as np

        return np.maximum.reduce(self.array()).item()

    def tolist(self) -> list[N]:
        return self.array().tolist()

    def tobytes(self) -> bytes:
        return self.array().tobytes()

    def _view(self) -> Any:
        """Read-only NumPy view."""
        import numpy as np

        view = np.frombuffer(self.array(), self.typecode)
        view.flags.writeable = False
        return view


def token_array(values: Iterable[int]) -> NumberArray[int]:
    """Pack token ids.

    Raises:
        TypeError: a value is not an integer.
        OverflowError: a value does not fit in 32 bits.
    """
    return _packed(TOKENS, values)


def logprob_array(values: Iterable[float]) -> NumberArray[float]:
    """Pack logprobs.

    Raises:
        TypeError: a value is not a number.
    """
    return _packed(LOGPROBS, values)


def version_array(spans: Iterable[tuple[int, int]]) -> NumberArray[int]:
    """Pack the version of each token.

    Args:
        spans: (version, number of tokens) of consecutive tokens.
    """
    versions = array(VERSIONS)
    for version, num_tokens in spans:
        versions += array(VERSIONS, (version,)) * num_tokens
    return NumberArray(versions)


def array_from_bytes(typecode: str, data: bytes) -> NumberArray[Any]:
    """The array whose bytes `tobytes` returned.

    Raises:
        ValueError: the number of bytes is not a multiple of the size of a number.
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
    """Length of the common prefix of two arrays."""
    low, high = 0, min(len(one), len(other))
    if one[:high].tobytes() == other[:high].tobytes():
        return high
    while low < high:  # the arrays agree up to low, and not up to high + 1
        middle = (low + high + 1) // 2
        if one[low:middle].tobytes() == other[low:middle].tobytes():
            low = middle
        else:
            high = middle - 1
    return low


class MaskArray(Sequence[bool]):
    """Immutable sequence of booleans, one byte each."""

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


FREE_ROW = 2**16 - 1
"""Value of all experts of a token whose router chooses freely. Also the largest supported number of experts."""


class ExpertRows(Sequence["list[list[int]] | None"]):
    """Immutable rows of routed experts of each token, two bytes each; a row is None if the router chooses freely.

    Example: two tokens, two layers, and one expert in each layer: `expert_rows([[[3], [1]], [[0], [1]]])`.
    """

    __slots__ = ("_values", "num_layers", "top_k")

    def __init__(self, values: array[int], num_layers: int, top_k: int) -> None:
        self._values = values
        self.num_layers = num_layers
        self.top_k = top_k

    def __len__(self) -> int:
        return len(self._values) // (self.num_layers * self.top_k)

    @overload
    def __getitem__(self, index: int) -> list[list[int]] | None: ...
    @overload
    def __getitem__(self, index: slice) -> ExpertRows: ...
    def __getitem__(self, index: int | slice) -> list[list[int]] | ExpertRows | None:
        width = self.num_layers * self.top_k
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"a step of {step}; rows of experts are cut in steps of 1")
            return ExpertRows(self._values[start * width : max(start, stop) * width], self.num_layers, self.top_k)
        position = range(len(self))[index] * width
        row = self._values[position : position + width].tolist()
        if row[0] == FREE_ROW:
            return None
        return [row[layer : layer + self.top_k] for layer in range(0, width, self.top_k)]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(cast("Sequence[Any]", other)) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.num_layers, self.top_k, self.tobytes()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """[num_tokens, num_layers, top_k], with `FREE_ROW` where a row is None."""
        import numpy as np

        own = np.frombuffer(self._values, np.uint16).reshape(-1, self.num_layers, self.top_k)
        return own.astype(dtype or np.uint16)

    def __repr__(self) -> str:
        return f"<experts of {len(self)} tokens, {self.top_k} in each of {self.num_layers} layers>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ExpertRows, (self._values, self.num_layers, self.top_k)

    def tobytes(self) -> bytes:
        return self._values.tobytes()

    def tolist(self) -> list[list[list[int]] | None]:
        return list(self)


def expert_rows(rows: Any) -> ExpertRows:
    """Pack routed experts.

    Args:
        rows: [num_tokens, num_layers, top_k]; None for tokens whose router chooses freely, but not for all.

    Raises:
        TypeError: the values are not numbers of experts, or the rows have different shapes.
    """
    if isinstance(rows, ExpertRows):
        return rows
    import numpy as np

    free: list[int] = []
    if not hasattr(rows, "dtype"):
        rows = list(rows)
        if free := [index for index, row in enumerate(rows) if row is None]:
            some = next((row for row in rows if row is not None), None)
            rows = [some if row is None else row for row in rows]
    try:
        given_TRK = np.asarray(rows)
    except ValueError as error:
        raise TypeError(f"rows of routed experts differ in shape: {error}") from error
    if given_TRK.ndim != 3 or given_TRK.dtype.kind not in "iu":
        raise TypeError(
            f"routed experts are of shape {given_TRK.shape} and type {given_TRK.dtype}; they must be integers of shape "
            "[num_tokens, num_layers, top_k]"
        )
    if given_TRK.size and not 0 <= given_TRK.min() <= given_TRK.max() < FREE_ROW:
        raise TypeError(f"a routed expert is {given_TRK.min()} or {given_TRK.max()}; they are from 0 to {FREE_ROW - 1}")
    packed_TRK = given_TRK.astype(np.uint16)
    packed_TRK[free] = FREE_ROW
    values = array("H")
    values.frombytes(packed_TRK.tobytes())
    return ExpertRows(values, given_TRK.shape[1], given_TRK.shape[2])


def free_rows(num_tokens: int, like: ExpertRows) -> ExpertRows:
    """Rows of tokens whose router chooses freely."""
    width = like.num_layers * like.top_k
    return ExpertRows(array("H", (FREE_ROW,)) * (num_tokens * width), like.num_layers, like.top_k)


def joined_rows(parts: Iterable[ExpertRows]) -> ExpertRows | None:
    """Concatenated rows; None if there are no parts.

    Raises:
        TypeError: the parts have different numbers of layers or experts.
    """
    values, first = array("H"), None
    for part in parts:
        first = first or part
        if (part.num_layers, part.top_k) != (first.num_layers, first.top_k):
            raise TypeError(f"{part!r} do not continue {first!r}")
        values.frombytes(part.tobytes())
    return None if first is None else ExpertRows(values, first.num_layers, first.top_k)
