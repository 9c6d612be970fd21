"""vLLM on CPUs: preparation of a process, and corrections of vLLM's kernels. Importing this module imports vLLM."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch._dynamo.config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.sample import rejection_sampler

from titan_rl.core.errors import ModelError
from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.vllm_held_weights import note_packing

_rotate: Any = RotaryEmbedding.forward_cpu
_normalize: Any = RMSNorm.forward_cpu


def prepare_cpu(spec: EngineSpec) -> None:
    """Adapt vLLM to CPUs in this process, and check that it supports the specification on CPUs.

    Raises:
        ModelError: vLLM does not support the specification on CPUs.
    """
    if spec.routed_experts:  # vLLM's model runner for them needs a Triton that compiles for CPUs
        raise ModelError(
            "vLLM does not return routed experts on CPU; set generation.return_routed_experts = false or use a GPU"
        )
    if spec.sleeps:
        raise ModelError(
            "vLLM cannot sleep on CPU; set scheduling.on_batch_ready to 'continue', 'keep' or 'abort', or use a GPU"
        )
    # Compiling takes 20 s or more at start and at the first step, and gains nothing for models that fit a CPU.
    torch._dynamo.config.disable = True
    if dispatcher._registry:
        # vLLM installs its kernels for each engine. For this it searches all modules, which fails once the modules are
        # loaded that compile an ngram search (llvmlite, with vLLM 0.32). Once in a process is enough.
        platform: Any = type(current_platform)
        platform.register_triton_kernel_overrides = classmethod(lambda _: None)
    RotaryEmbedding.forward_cpu = rotate_heads  # pyright: ignore[reportAttributeAccessIssue]
    RMSNorm.forward_cpu = normalize  # pyright: ignore[reportAttributeAccessIssue]
    note_packing()
    if spec.speculative is not None:
        rejection_sampler.expand_batch_to_tokens = spread
        # vLLM's first search of n-grams makes numba set the number of OpenMP threads, by default that of the cores.
        # The number must not change: vLLM caches oneDNN's kernels by the shape of a weight alone, but oneDNN packs a
        # weight by the number of threads too. A weight packed later is then multiplied in another's layout (vLLM 0.32).
        os.environ["NUMBA_NUM_THREADS"] = str(torch.get_num_threads())
    if spec.adapters:
        from titan_rl.generation.vllm_adapters import prepare_cpu_adapters

        prepare_cpu_adapters()


def rotate_heads(
    rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys of shape [T, N * H] or [T, N, H] in place.

    vLLM's CPU kernel infers the number of heads from the last dimension, so it rotates only the first head of
    [T, N, H], as in LFM2 (vLLM 0.32).
    """
    flat = [None if each is None else each.flatten(1) for each in (query, key)]
    turned_query, turned_key = _rotate(rotary, positions, *flat)
    return turned_query.view_as(query), None if key is None else turned_key.view_as(key)


_ROW_MULTIPLE = 16
"""Length of which the rows of vLLM's CPU kernels for RMSNorm must be a multiple."""


def normalize(
    norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm of 32-bit floats with vLLM's CPU kernels, which change `x` and `residual` if both are given.

    vLLM itself uses its kernels only on GPUs. On CPUs it runs six PyTorch operations, which take seven times as long
    (vLLM 0.32).

    Args:
        x: Values to normalize.  # [..., D]
        residual: Added to `x` first.  # [..., D]

    Returns:
        Normalized values, and the sum of `x` and `residual` if there is a residual.
    """
    is_supported = norm.has_weight and norm.variance_size_override is None and x.shape[-1] % _ROW_MULTIPLE == 0
    if not (is_supported and x.dtype == norm.weight.dtype == torch.float32):
        return _normalize(norm, x, residual)
    kernels: Any = torch.ops._C
    x = x.contiguous()  # the kernels ignore strides
    if residual is None:
        normalized = torch.empty_like(x)
        kernels.rms_norm(normalized, x, norm.weight, norm.variance_epsilon)
        return normalized
    residual = residual.contiguous()
    kernels.fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    return x, residual


def spread(
    values_R: torch.Tensor, token_ends_R: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat the value of each request for each of its tokens, and replace one value by another.

    vLLM's CPU replacement of the kernel that copies temperature, top_p and top_k to draft tokens writes to a
    temporary copy (vLLM 0.32). The values are then uninitialized memory, and logprobs are wrong by several nats.

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


def cache_no_states(arguments: EngineArgs) -> None:
    """Switch the prefix cache off for a model with recurrent layers. vLLM caches their states only with split prompts,
    which are off on a CPU.

    Raises:
        ValueError: vLLM does not know the model.
    """
    if arguments.enable_prefix_caching and arguments.create_model_config().has_inner_state:
        arguments.enable_prefix_caching = False


def keep_transformers_classes() -> None:
    """Prevent vLLM from changing transformers' classes when it runs their modeling code. It would prepare them for
    compilation, which is off on a CPU, and a trainer's model of the same class in this process would then fail."""
    from vllm.model_executor.models.transformers.base import Base

    backend: Any = Base
    backend._decorate_for_torch_compile = lambda model: None


def drop_packed_experts(worker: Any) -> None:
    """Make vLLM pack the experts of a mixture again at a reload. Otherwise a reload on a CPU does not pack them, and
    vLLM then reads the unpacked weights as packed ones."""
    for module in worker.get_model().modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
