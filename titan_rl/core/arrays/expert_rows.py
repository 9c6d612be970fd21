"""The experts of a mixture that each token took."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, cast, overload

FREE_ROW = 2**16 - 1
"""Each expert of a token whose router chooses for itself. The most experts that there may be."""


class ExpertRows(Sequence["list[list[int]] | None"]):
    """The experts that each token took, two bytes each; a row is None where the router is to choose. Nobody changes it.

    Example: of two tokens, two layers, and one expert in each: `expert_rows([[[3], [1]], [[0], [1]]])`.
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
    """
    Args:
        rows: [num_tokens, num_layers, top_k]; None for tokens whose router is to choose, but not for all.

    Raises:
        TypeError: these are not the numbers of experts, or their rows are unlike each other.
    """
    if isinstance(rows, ExpertRows):
        return rows
    import numpy as np

    free: list[int] = []
    if not hasattr(rows, "dtype"):
        rows = list(rows)
        if free := [place for place, row in enumerate(rows) if row is None]:
            some = next((row for row in rows if row is not None), None)
            rows = [some if row is None else row for row in rows]
    try:
        given_TRK = np.asarray(rows)
    except ValueError as error:
        raise TypeError(f"rows of routed experts are unlike each other: {error}") from error
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
    """Of tokens whose router is to choose."""
    width = like.num_layers * like.top_k
    return ExpertRows(array("H", (FREE_ROW,)) * (num_tokens * width), like.num_layers, like.top_k)


def joined_rows(parts: Iterable[ExpertRows]) -> ExpertRows | None:
    """Behind each other; None of none.

    Raises:
        TypeError: they are of models unlike each other.
    """
    values, first = array("H"), None
    for part in parts:
        first = first or part
        if (part.num_layers, part.top_k) != (first.num_layers, first.top_k):
            raise TypeError(f"{part!r} do not continue {first!r}")
        values.frombytes(part.tobytes())
    return None if first is None else ExpertRows(values, first.num_layers, first.top_k)
