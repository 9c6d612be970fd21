"""Corrections of vLLM's CPU kernels for speculative decoding. Importing this module imports vLLM and torch."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.sample import rejection_sampler


def keep_kernels() -> None:
    """Prevent further engines of this process from installing the kernels again.

    vLLM installs them for each engine. For this it searches all modules, which fails once the modules are loaded that
    compile an ngram search (llvmlite, with vLLM 0.32).
    """
    if dispatcher._registry:
        platform: Any = type(current_platform)
        platform.register_triton_kernel_overrides = classmethod(lambda _: None)


def repair_sampler() -> None:
    """Make vLLM divide the logits of guessed tokens by the temperature of their request on a CPU.

    vLLM's CPU replacement of the kernel that copies temperature, top_p and top_k to these tokens writes to a temporary
    copy (vLLM 0.32). The values are then uninitialized memory, and logprobs are wrong by several nats.
    """
    rejection_sampler.expand_batch_to_tokens = spread


def spread(
    values_R: torch.Tensor, token_ends_R: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat the value of each request for each of its tokens, and replace one value by another.

    Args:
        values_R: Value of each request.
        token_ends_R: Cumulative number of tokens up to and including each request.
        num_tokens: Total number of tokens.
        replace_from: Value to replace.
        replace_to: Value that replaces it.

    Returns:
        [num_tokens]

    Example: [0.0, 0.7] with ends [2, 3], 0 replaced by 1: [1.0, 1.0, 0.7]
    """
    counts_R = token_ends_R.diff(prepend=token_ends_R.new_zeros(1)).long()
    replaced_R = torch.where(values_R == replace_from, torch.full_like(values_R, replace_to), values_R)
    return replaced_R.repeat_interleave(counts_R, output_size=num_tokens)
