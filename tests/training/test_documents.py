"""Recurrent layers over packed documents."""

from __future__ import annotations

import torch
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.attention.documents import Document, DocumentSequences

DECAY = 0.5


def recurrence(x_SWC: torch.Tensor) -> torch.Tensor:
    """A state that decays by half with each token."""
    state, states = torch.zeros_like(x_SWC[:, 0]), []
    for x_SC in x_SWC.unbind(1):
        state = DECAY * state + x_SC
        states.append(state)
    return torch.stack(states, 1)


def test_state_is_reset_at_document_boundaries() -> None:
    ones = torch.ones(1, 5, 1)
    found = DocumentSequences([Document(3), Document(2)]).apply(recurrence, ones)
    assert found.flatten().tolist() == [1.0, 1.5, 1.75, 1.0, 1.5]


def test_documents_continue_the_state_of_a_shared_prefix() -> None:
    ones = torch.ones(1, 5, 1)
    found = DocumentSequences([Document(2), Document(2, 0, 2), Document(1, 0, 2)]).apply(recurrence, ones)
    assert found.flatten().tolist() == [1.0, 1.5, 1.75, 1.875, 1.75]


families = st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(1, 20), min_size=1, max_size=4)), min_size=1)


@settings(max_examples=examples(30), deadline=None)
@given(families.filter(lambda found: len(found) <= 5), st.integers(0, 99))
def test_packed_documents_match_separate_documents(drawn: list[tuple[int, list[int]]], seed: int) -> None:
    documents: list[Document] = []
    places: list[list[int]] = []  # token positions of each document, including its prefix
    end = 0
    for prefix, lengths in drawn:
        start = end
        if prefix:
            documents.append(Document(prefix))
            end += prefix
        for length in lengths:
            documents.append(Document(length, start, prefix))
            places.append([*range(start, start + prefix), *range(end, end + length)])
            end += length
    x = torch.randn(1, end, 2, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    found = DocumentSequences(documents).apply(recurrence, x)
    expected = torch.zeros_like(found)
    for own in places:
        expected[:, own] = recurrence(x[:, own])
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed + 1))
    gradients = (torch.autograd.grad((each * upstream).sum(), x)[0] for each in (found, expected))
    torch.testing.assert_close(*gradients)
