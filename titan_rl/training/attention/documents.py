"""Documents of packed rows, and one sequence for each of them, for layers other than attention that pass a state from
token to token. This file needs only torch.

A sequence begins with the document's prefix, if it has one, so a prefix that documents share is in several sequences.
Sequences of similar length form a batch. They are padded at the end, where no token of a causal layer sees the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

MIN_FILL = 0.75
"""Smallest length of a document in a batch, relative to the longest one there."""


@dataclass(frozen=True, slots=True)
class Document:
    """Consecutive tokens that see each other, and a prefix of other tokens before them if there is one."""

    length: int
    prefix_start: int = 0
    prefix_length: int = 0


class DocumentSequences:
    """Sequences of the documents of a batch. They are computed when a layer needs them, once for all layers.

    Args:
        documents: Documents in token order. Together they cover every token of the batch, padding included.

    Example: a prefix of tokens 0 and 1, continued by tokens 2 and 3 in one document and by token 4 in another, is in
    two sequences, 0 1 2 3 and 0 1 4. A layer computes them as one batch, `[[0, 1, 2, 3], [0, 1, 4, 0]]`, whose last
    token is padding.
    """

    def __init__(self, documents: Sequence[Document], device: torch.device | str = "cpu") -> None:
        self._documents = documents
        self._device = device

    def apply(self, layer: Callable[[torch.Tensor], torch.Tensor], x_BLC: torch.Tensor) -> torch.Tensor:
        """Apply a causal layer to each sequence separately.

        Args:
            layer: Function from inputs [num_sequences, W, C] to outputs [num_sequences, W, C']. It is called once for
                each batch of sequences.
            x_BLC: Inputs for all tokens of the packed rows.

        Returns:
            The outputs of all tokens, [B, L, C'].
        """
        batches, position_of_token = self._sequence_batches
        x_TC = x_BLC.flatten(0, 1)
        outputs = [
            layer(x_TC.index_select(0, tokens_SW.flatten()).unflatten(0, tokens_SW.shape)).flatten(0, 1)
            for tokens_SW in batches
        ]
        out_TC = torch.cat(outputs).index_select(0, position_of_token)
        return out_TC.unflatten(0, x_BLC.shape[:2])

    @cached_property
    def _sequence_batches(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Tokens of the sequences of each batch, padded with token 0, and the position of each token's output among the
        outputs of all batches, laid end to end. The output of a prefix is that of one of its sequences.
        # int64, each [num_sequences, width], and int64 [num_tokens]"""
        batches: list[list[tuple[range, range]]] = []
        for sequence in sorted(_sequences(self._documents), key=_length, reverse=True):
            if batches and _length(sequence) >= MIN_FILL * _length(batches[-1][0]):
                batches[-1].append(sequence)
            else:
                batches.append([sequence])
        position_of_token = np.zeros(sum(document.length for document in self._documents), np.int64)
        tokens_of_batches: list[torch.Tensor] = []
        first = 0
        for batch in batches:
            width = _length(batch[0])
            tokens_SW = np.zeros((len(batch), width), np.int64)
            for row, (prefix, own) in zip(tokens_SW, batch, strict=True):
                row[: len(prefix)], row[len(prefix) : len(prefix) + len(own)] = prefix, own
                position_of_token[prefix.start : prefix.stop] = np.arange(first, first + len(prefix))
                position_of_token[own.start : own.stop] = np.arange(len(prefix), len(prefix) + len(own)) + first
                first += width
            tokens_of_batches.append(torch.from_numpy(tokens_SW).to(self._device))
        return tokens_of_batches, torch.from_numpy(position_of_token).to(self._device)


def _sequences(documents: Sequence[Document]) -> list[tuple[range, range]]:
    """Prefix and own tokens of each document, except documents that are prefixes of others."""
    prefixes = {(document.prefix_start, document.prefix_length) for document in documents}
    found: list[tuple[range, range]] = []
    start = 0
    for document in documents:
        if document.length and (start, document.length) not in prefixes:
            prefix = range(document.prefix_start, document.prefix_start + document.prefix_length)
            found.append((prefix, range(start, start + document.length)))
        start += document.length
    return found


def _length(sequence: tuple[range, range]) -> int:
    return sum(map(len, sequence))
