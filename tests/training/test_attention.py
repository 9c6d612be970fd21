"""Attention inside documents against dense attention under an explicit mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.training.attention.attention import Document, layout_documents
from titan_rl.training.attention.document_attention import DocumentAttention


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Every token attends to itself and the earlier tokens of its document.  # [1, T, N, H]"""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (document[:, None] == document[None, :]).tril()
    q, k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    return out[0].transpose(0, 1)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 99))
def test_equals_dense_masked_attention_with_gradients(lengths: list[int], seed: int):
    lengths += lengths  # the same documents in each of two rows
    generator = torch.Generator().manual_seed(seed)
    row = sum(lengths) // 2
    q, k, v = (torch.randn(2, row, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    upstream = torch.randn(2, row, 4, 8, generator=generator)

    attention = DocumentAttention.Config().build()
    out = attention(
        q, k, v, attention_masks=layout_documents([Document(length) for length in lengths]), scale=0.3, enable_gqa=True
    )
    expected = dense(q, k, v, lengths).view_as(out)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(out, (q, k, v), upstream)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-5)


def test_documents_of_similar_length_share_a_bucket():
    layout = layout_documents([Document(length) for length in (8, 2, 7, 6, 1)])
    assert [(bucket.num_documents, bucket.width) for bucket in layout.buckets] == [(3, 8), (1, 2), (1, 1)]
    assert layout.padded_slots.numel() == 3
    assert torch.equal(layout.token_of_slot[layout.slot_of_token], torch.arange(24))


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=4
    ),
    st.integers(0, 99),
)
def test_suffixes_see_their_prefix_and_themselves(families: list[tuple[int, list[int]]], seed: int):
    """The same as each suffix behind a prefix of its own, with the gradients of a prefix added up."""
    generator = torch.Generator().manual_seed(seed)
    documents: list[Document] = []
    spans: list[tuple[range, range]] = []  # (prefix, own tokens) of each document
    position = 0
    for prefix_length, suffixes in families:
        prefix = range(position, position + prefix_length)
        documents.append(Document(prefix_length))
        spans.append((range(0), prefix))
        position += prefix_length
        for length in suffixes:
            documents.append(Document(length, prefix.start, prefix_length))
            spans.append((prefix, range(position, position + length)))
            position += length
    q, k, v = (torch.randn(1, position, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    upstream = torch.randn(1, position, 4, 8, generator=generator)

    attention = DocumentAttention.Config().build()
    out = attention(q, k, v, attention_masks=layout_documents(documents), scale=0.3, enable_gqa=True)
    parts: list[torch.Tensor] = []
    for prefix, own in spans:
        keys = [*prefix, *own]
        mask = torch.ones(len(own), len(keys), dtype=torch.bool).tril(len(prefix))
        one_q, one_k, one_v = (x[:, at].transpose(1, 2) for x, at in ((q, list(own)), (k, keys), (v, keys)))
        part = F.scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=mask, scale=0.3, enable_gqa=True)
        parts.append(part.transpose(1, 2))
    expected = torch.cat(parts, dim=1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(out, (q, k, v), upstream)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-5)
