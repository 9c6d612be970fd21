"""Corrections of vLLM's CPU kernels for speculative decoding. Importing this imports vLLM and torch."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.sample import rejection_sampler


def keep_kernels() -> None:
    """Have the next engine of this process leave the kernels as the first one has put them.

    vLLM puts them again with each engine, for which it looks through all modules, and fails once there are those that
    compiling a search for ngrams brings (llvmlite's, with vLLM 0.32).
    """
    if dispatcher._registry:
        platform: Any = type(current_platform)
        platform.register_triton_kernel_overrides = classmethod(lambda _: None)


def repair_sampler() -> None:
    """Have vLLM divide the logits of guessed tokens by the temperature of their request on a CPU.

    Its own replacement of the kernel that spreads temperature, top_p and top_k over those tokens works on a copy that
    it throws away (vLLM 0.32), so that they are whatever was in memory: logprobs are off by nats.
    """
    rejection_sampler.expand_batch_to_tokens = spread


def spread(
    values_R: torch.Tensor, token_ends_R: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """The value of each request at each of its tokens, with one value replaced by another.

    Args:
        token_ends_R: number of tokens of the requests up to each, itself included.

    Example: [0.0, 0.7] with ends [2, 3], 0 replaced by 1: [1.0, 1.0, 0.7]
    """
    counts_R = token_ends_R.diff(prepend=token_ends_R.new_zeros(1)).long()
    replaced_R = torch.where(values_R == replace_from, torch.full_like(values_R, replace_to), values_R)
    return replaced_R.repeat_interleave(counts_R, output_size=num_tokens)
