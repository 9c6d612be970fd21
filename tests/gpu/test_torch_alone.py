"""Tests that need torch and a GPU, but neither torchtitan, Monarch nor vLLM. Skipped without a GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_ranks import attended_by_all
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from titan_rl.training.attention.attention import layout_documents
from titan_rl.training.attention.documents import Document
from titan_rl.training.attention.flex_attention import layout_blocks
from titan_rl.training.selected_logprobs import selected_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the CPU path has its own tests")

TOKENS, WIDTH = 2048, 256


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_chunked_logprobs_match_whole_logits_with_gradients(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((TOKENS, WIDTH), (32_000, WIDTH))
    hidden, weight = (
        (torch.randn(shape, generator=generator, device="cuda") / WIDTH**0.5).to(dtype).requires_grad_()
        for shape in shapes
    )
    targets = torch.randint(32_000, (TOKENS,), generator=generator, device="cuda")
    found, entropies = selected_logprobs(hidden, weight, targets, torch.ones(TOKENS, device="cuda"), chunk_logits=2**22)
    whole = F.linear(hidden, weight).float().log_softmax(-1)
    expected = whole.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropies, -(whole.exp() * whole).sum(-1), rtol=tolerance, atol=tolerance)
    gradients = (torch.autograd.grad(logprobs.sum(), (hidden, weight)) for logprobs in (found, expected))
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=tolerance, atol=tolerance * reference.abs().max().item())


def scoring_peak(vocabulary: int) -> int:
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets, ones = torch.zeros(TOKENS, dtype=torch.long, device="cuda"), torch.ones(TOKENS, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    selected_logprobs(hidden, weight, targets, ones, chunk_logits=2**22)[0].sum().backward()
    gradients = 6 * weight.numel()  # of the head, kept whole: summed in float32, then converted to bfloat16
    return torch.cuda.max_memory_allocated() - before - gradients


def test_scoring_memory_does_not_grow_with_the_vocabulary() -> None:
    small, large = scoring_peak(32_768), scoring_peak(131_072)
    print(f"scoring takes {small / 2**20:.0f} MiB with 32k and {large / 2**20:.0f} MiB with 128k entries")
    assert large < 1.2 * small + 2**20


def test_flex_attention_matches_bucketed_attention() -> None:
    documents = [Document(300), Document(200, 0, 300), Document(150, 0, 300), Document(30)]
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = [
        torch.randn(1, 680, heads, 64, generator=generator, device="cuda", requires_grad=True) for heads in (4, 2, 2)
    ]
    outputs = [lay_out(documents, "cuda").attend(*qkv, scale=0.1) for lay_out in (layout_blocks, layout_documents)]
    torch.testing.assert_close(*outputs, rtol=2e-3, atol=2e-3)
    gradients = (torch.autograd.grad(output.sum(), qkv) for output in outputs)
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("lay_out", [layout_blocks, layout_documents])
def test_context_parallel_attention_matches_one_rank(lay_out: Callable[..., Any]) -> None:
    documents = [Document(300), Document(200, 0, 300), Document(150, 0, 300), Document(30)]
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = [
        torch.randn(1, 680, heads, 64, generator=generator, device="cuda", requires_grad=True) for heads in (4, 2, 2)
    ]
    outputs = [
        attended_by_all(lay_out, documents, 3, qkv, scale=0.1),
        layout_documents(documents, "cuda").attend(*qkv, scale=0.1),
    ]
    torch.testing.assert_close(*outputs, rtol=2e-3, atol=2e-3)
    gradients = (torch.autograd.grad(output.sum(), qkv) for output in outputs)
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=5e-3, atol=5e-3)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    yield
    dist.destroy_process_group()


def test_fsdp_keeps_no_bfloat16_layers_between_forward_and_backward(one_rank: None) -> None:
    layers, width = 16, 2048
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    x = torch.randn(8, width, device="cuda")
    before = torch.cuda.memory_allocated()
    loss = model(x).float().square().mean()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    layer_bytes = layers * width * width * 2
    print(
        f"{kept / 2**20:.1f} MiB are kept between the passes; all layers in bfloat16 are {layer_bytes / 2**20:.0f} MiB"
    )
    assert kept < layer_bytes / 3
