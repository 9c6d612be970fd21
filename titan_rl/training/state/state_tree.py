"""A training state taken apart into what a checkpoint holds: tensors by name, and plain values by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

PLAIN = (type(None), bool, int, float, str)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the plain values of nested mappings and lists, each by its path.

    Raises:
        TypeError: there is something else in it, which a checkpoint cannot hold.

    Example:
        flatten({"optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}})
        # {}, {"optimizer/param_groups/0/lr": 0.1, "optimizer/param_groups/0/betas": (0.9, 0.99)}
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            tensors[path] = value
        elif (inner := _children(value)) is not None:
            deeper = flatten(inner, f"{path}/")
            tensors |= deeper[0]
            values |= deeper[1]
        elif _is_plain(value):
            values[path] = value
        else:
            raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")
    return tensors, values


def fill(tree: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """The tree with these values in place of its own. Tensors stay, and tuples are tuples again.

    Raises:
        KeyError: a value is missing.
    """
    if isinstance(tree, torch.Tensor):
        return tree
    if (inner := _children(tree)) is not None:
        filled = {key: fill(value, values, f"{prefix}/{key}" if prefix else str(key)) for key, value in inner.items()}
        return filled if isinstance(tree, Mapping) else list(filled.values())
    value = values[prefix]
    return tuple(value) if isinstance(tree, tuple) else value


def _children(value: Any) -> Mapping[Any, Any] | None:
    """Of a mapping, or of a list that has more than plain values."""
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Any]", value)
    if isinstance(value, list) and not _is_plain(cast("object", value)):
        return dict(enumerate(cast("list[Any]", value)))
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast("list[object]", value)))
    return isinstance(value, PLAIN)
