"""Attention of context-parallel ranks compared with one rank that holds all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_ranks import attended_by_all
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.attention.attention import ContextRanks, layout_documents, share_tokens
from titan_rl.training.attention.documents import Document
from titan_rl.training.attention.flex_attention import BLOCK, layout_blocks

Families = list[tuple[int, list[int]]]
"""(prefix length or 0, lengths of the documents that continue the prefix) of each family."""


def documents_of(families: Families) -> list[Document]:
    documents: list[Document] = []
    start = 0
    for prefix_length, lengths in families:
        if prefix_length:
            documents.append(Document(prefix_length))
        documents += [Document(length, start, prefix_length) for length in lengths]
        start += prefix_length + sum(lengths)
    return documents


def families(longest: int) -> st.SearchStrategy[Families]:
    lengths = st.lists(st.integers(1, longest), min_size=1, max_size=4)
    return st.lists(st.tuples(st.integers(0, longest), lengths), min_size=1, max_size=4)


@pytest.mark.parametrize(("lay_out", "longest"), [(layout_documents, 20), (layout_blocks, BLOCK // 2)])
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data(), size=st.integers(2, 5), seed=st.integers(0, 99))
def test_context_parallel_attention_matches_one_rank(
    lay_out: Callable[..., Any], longest: int, data: st.DataObject, size: int, seed: int
) -> None:
    documents = documents_of(data.draw(families(longest)))
    num_tokens = sum(document.length for document in documents)
    generator = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(1, num_tokens, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(1, num_tokens, 4, 8, generator=generator)
    found = attended_by_all(lay_out, documents, size, qkv, scale=0.3)
    expected = layout_documents(documents).attend(*qkv, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    gradients = (torch.autograd.grad(out, qkv, upstream) for out in (found, expected))
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 200), st.integers(2, 9), st.integers(1, 8))
def test_each_token_is_on_one_rank_and_shares_are_equal(num_tokens: int, size: int, multiple_of: int) -> None:
    shares = [share_tokens(num_tokens, ContextRanks(rank, size, None), multiple_of=multiple_of) for rank in range(size)]
    tokens = torch.arange(num_tokens)
    found = [share.find(tokens) for share in shares]
    assert sorted(torch.cat([mine for mine, _ in found]).tolist()) == tokens.tolist()
    for share, (mine, at) in zip(shares, found, strict=True):
        assert torch.equal(share.tokens_P[at], mine)
        assert torch.equal(share.order_T[share.gathered_position_T], torch.arange(share.num_tokens))
        assert len(share.tokens_P) == 2 * len(share.chunks[0])
        assert not len(share.chunks[0]) % multiple_of


def test_attention_work_is_balanced_for_a_long_document() -> None:
    documents = [Document(16 * BLOCK)]
    pairs: list[int] = []
    for rank in range(4):
        mask = layout_blocks(documents, ranks=ContextRanks(rank, 4, None)).block_mask
        assert mask.full_kv_num_blocks is not None
        pairs.append(int(mask.full_kv_num_blocks.sum()))
    assert pairs == [30] * 4
