"""Document attention compared with dense attention under an explicit mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from titan_rl.training.attention import attention as attention_module
from titan_rl.training.attention.attention import Kernel, choose_kernel, layout_documents
from titan_rl.training.attention.documents import Document
from titan_rl.training.models.torchtitan_families import DocumentAttention
from titan_rl.training.policy import choose_attention
from titan_rl.training.settings import TrainingConfig


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Every token attends to itself and the earlier tokens of its document.  # [1, T, N, H]"""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (document[:, None] == document[None, :]).tril()
    q, k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    return out[0].transpose(0, 1)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 99))
def test_document_attention_matches_dense_masked_attention(lengths: list[int], seed: int):
    lengths += lengths  # the same documents in each of two rows
    generator = torch.Generator().manual_seed(seed)
    row = sum(lengths) // 2
    q, k, v = (torch.randn(2, row, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    upstream = torch.randn(2, row, 4, 8, generator=generator)

    attention = DocumentAttention.Config().build()
    out = attention(q, k, v, attention_masks=layout_documents([Document(length) for length in lengths]), scale=0.3)
    expected = dense(q, k, v, lengths).view_as(out)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(out, (q, k, v), upstream)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-5)


def test_masked_attention_on_cuda_avoids_the_math_kernel() -> None:
    efficient, flash = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION
    for dtype, masked in [(torch.bfloat16, True), (torch.float32, True), (torch.float32, False)]:
        assert choose_kernel("cuda", dtype, 128, masked=masked) == Kernel((efficient,), takes_groups=False)
    assert flash in choose_kernel("cuda", torch.bfloat16, 128, masked=False).backends
    assert choose_kernel("cuda", torch.bfloat16, 288, masked=False).backends == (efficient,)
    assert choose_kernel("cuda", torch.bfloat16, 6, masked=True) == Kernel(), "no other kernel takes such heads"
    assert choose_kernel("cpu", torch.bfloat16, 128, masked=True) == Kernel()


def test_auto_attention_chooses_flex_on_cuda() -> None:
    assert TrainingConfig().attention == "auto"
    assert choose_attention("auto", "cuda", 128) == "flex"
    assert choose_attention("auto", "cuda", 8) == "document"
    assert choose_attention("auto", "cpu", 128) == "document"
    assert choose_attention("document", "cuda", 128) == "document"
    assert choose_attention("flex", "cpu", 128) == "flex"


def test_repeating_kv_heads_does_not_change_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(20), Document(9, 0, 20), Document(7, 0, 20), Document(4)]
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 40, heads, 16, generator=generator, requires_grad=True) for heads in (6, 2, 2)]

    def attended() -> tuple[torch.Tensor, ...]:
        out = layout_documents(documents).attend(*qkv)
        return out, *torch.autograd.grad(out.square().sum(), qkv)

    expected = attended()
    monkeypatch.setattr(attention_module, "choose_kernel", lambda *_, **__: Kernel(takes_groups=False))
    for found, reference in zip(attended(), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=0, atol=1e-5)


def test_attention_does_not_save_scores_for_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The math kernel, which torch chooses on CUDA for masked grouped-query attention, saves 12 bytes per score."""
    heads, kv_heads, head_dim, prefix, suffix, siblings = 4, 2, 16, 192, 128, 4
    documents = [Document(prefix), *(Document(suffix, 0, prefix) for _ in range(siblings))]
    tokens = prefix + siblings * suffix
    scores = heads * (prefix**2 + siblings * suffix * (prefix + suffix))

    def saved_bytes(kernel: Kernel) -> int:
        monkeypatch.setattr(attention_module, "choose_kernel", lambda *_, **__: kernel)
        qkv = [torch.randn(1, tokens, count, head_dim, requires_grad=True) for count in (heads, kv_heads, kv_heads)]
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layout_documents(documents).attend(*qkv)
        return sum(found.values())

    vectors = 4 * heads * head_dim * (2 * tokens + 2 * (tokens + siblings * prefix))  # q, out, repeated k and v
    mask = 4 * siblings * suffix * (prefix + suffix)
    fused = saved_bytes(Kernel((SDPBackend.FLASH_ATTENTION,), takes_groups=False))
    assert fused < 1.1 * (vectors + mask)
    assert saved_bytes(Kernel((SDPBackend.MATH,))) > 4 * scores > fused


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
def test_suffixes_attend_to_their_prefix_and_themselves(families: list[tuple[int, list[int]]], seed: int):
    """Equal to attention of each suffix after its own copy of the prefix, with the prefix gradients summed."""
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
    out = attention(q, k, v, attention_masks=layout_documents(documents), scale=0.3)
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
