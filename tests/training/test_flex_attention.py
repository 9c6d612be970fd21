"""Flex attention compared with bucketed document attention, and its block mask with the dense mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.attention.attention import layout_documents
from titan_rl.training.attention.documents import Document
from titan_rl.training.attention.flex_attention import BLOCK, layout_blocks
from titan_rl.training.models.torchtitan_families import DocumentAttention

Families = list[tuple[int, list[int]]]
"""(prefix length or 0, lengths of the documents that continue the prefix) of each family."""


def families(longest: int) -> st.SearchStrategy[Families]:
    lengths = st.lists(st.integers(1, longest), min_size=1, max_size=4)
    return st.lists(st.tuples(st.integers(0, longest), lengths), min_size=1, max_size=4)


def documents_of(families: Families) -> list[Document]:
    documents: list[Document] = []
    start = 0
    for prefix_length, lengths in families:
        if prefix_length:
            documents.append(Document(prefix_length))
        documents += [Document(length, start, prefix_length) for length in lengths]
        start += prefix_length + sum(lengths)
    return documents


def random_qkv(documents: list[Document], seed: int, num_rows: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(document.length for document in documents)
    return [
        torch.randn(num_rows, num_tokens // num_rows, heads, 8, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    ]


@settings(max_examples=examples(20), deadline=None)
@given(families(longest=40), st.integers(0, 99))
def test_block_attention_matches_bucket_attention(families: Families, seed: int):
    documents = documents_of([*families, *families])  # the same in each of two rows
    half = sum(document.length for document in documents) // 2
    qkv = random_qkv(documents, seed, num_rows=2)
    upstream = torch.randn(2, half, 4, 8, generator=torch.Generator().manual_seed(seed))
    attention = DocumentAttention.Config().build()
    found, expected = (
        attention(*qkv, attention_masks=lay_out(documents), scale=0.3) for lay_out in (layout_blocks, layout_documents)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    gradients = (torch.autograd.grad(out, qkv, upstream) for out in (found, expected))
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


@settings(max_examples=examples(40), deadline=None)
@given(families(longest=3 * BLOCK))
def test_blocks_are_classified_according_to_the_mask(families: Families):
    documents = documents_of(families)
    found = layout_blocks(documents).block_mask
    num_tokens = sum(document.length for document in documents)
    mask = torch_flex.create_mask(found.mask_mod, 1, 1, num_tokens, num_tokens, device="cpu")[0, 0]
    num_blocks = -(-num_tokens // BLOCK)
    padded = torch.zeros(num_blocks * BLOCK, num_blocks * BLOCK, dtype=torch.bool)
    padded[:num_tokens, :num_tokens] = mask
    tiles = padded.view(num_blocks, BLOCK, num_blocks, BLOCK).transpose(1, 2).flatten(2)
    full = listed(found.full_kv_num_blocks, found.full_kv_indices)
    partial = listed(found.kv_num_blocks, found.kv_indices)
    assert not bool((full & partial).any())
    assert torch.equal(full | partial, tiles.any(-1))
    assert not bool((full & ~tiles.all(-1)).any())


def test_blocks_inside_a_document_and_its_prefix_are_full():
    documents = [Document(2 * BLOCK), Document(3 * BLOCK, 0, 2 * BLOCK), Document(BLOCK, 0, 2 * BLOCK)]
    found = layout_blocks(documents).block_mask
    expected = torch.tensor(
        [
            [0, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 0, 0, 0],
        ],
        dtype=torch.bool,
    )
    assert torch.equal(listed(found.full_kv_num_blocks, found.full_kv_indices), expected)
    diagonal = torch.eye(6, dtype=torch.bool)
    assert torch.equal(listed(found.kv_num_blocks, found.kv_indices), diagonal)


def listed(counts: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
    """Blocks listed by a mask.  # bool [queries, keys]"""
    assert counts is not None
    assert indices is not None
    blocks = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, (count, keys) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
        blocks[row, keys[:count].long()] = True
    return blocks


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(3))
def test_torch_flex_attention_matches_bucket_attention(monkeypatch: pytest.MonkeyPatch, seed: int):
    """The uncompiled GPU operator. Torch rejects gradients on CPUs, though its reference implementation has them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    lengths = torch.randint(1, 200, (3, 4), generator=torch.Generator().manual_seed(seed)).tolist()
    documents = documents_of([(prefix, suffixes) for prefix, *suffixes in lengths])  # several blocks
    qkv = random_qkv(documents, seed)
    q, k, v = (x.transpose(1, 2) for x in qkv)
    block_mask = layout_blocks(documents).block_mask
    with torch._dynamo.config.patch(disable=False):  # an engine in this process may have disabled dynamo
        found = torch_flex.flex_attention(q, k, v, block_mask=block_mask, scale=0.3, enable_gqa=True)
    assert isinstance(found, torch.Tensor)
    found = found.transpose(1, 2)
    expected = layout_documents(documents).attend(*qkv, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed))
    gradients = (torch.autograd.grad(out, qkv, upstream) for out in (found, expected))
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)
