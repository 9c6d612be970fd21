"""A model whose parameters are spread over the ranks of a world: FSDP2, tensor parallel, or both, by torchtitan."""

from __future__ import annotations

from typing import Any

import torch

from titan_rl.training.choices import ActivationCheckpointing
from titan_rl.training.device import local_device  # before torchtitan
from titan_rl.training.parallel.compilation import compile_blocks
from titan_rl.training.parallel.world import World
from titan_rl.weights.types import SlicePosition, TensorSlice

# isort: split
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

_CHECKPOINTING = {"full": FullAC.Config, "selective": SelectiveAC.Config}


def parallelize(
    model: Any,
    world: World,
    *,
    dtype: torch.dtype = torch.float32,
    compile: bool = False,
    activation_checkpointing: ActivationCheckpointing = "none",
    offload_parameters: bool = False,
) -> None:
    """Compile and checkpoint activations on request and, in a world of several ranks, spread the parameters, all in
    place.

    Gradients are summed over the ranks, not averaged: the loss has a denominator of its own.

    Args:
        dtype: in which the ranks gather parameters, and compute. They hold them and sum gradients in float32.
        offload_parameters: Parameters and gradients are kept in the host's memory, and each layer's are gathered on the
            device for its computation alone. Give the parameters memory on the CPU afterwards. One rank gathers
            nothing, so a world of one cannot do this.
    """
    assert world.size > 1 or not offload_parameters, "FSDP moves parameters, and takes several ranks"
    if world.tensor_parallel > 1:
        model.parallelize(world.dims)
        if model.enable_weight_tying:
            model.tok_embeddings.weight = model.lm_head.weight  # each was split into a parameter of its own
    if compile:  # inside of checkpointing: torch would not compile around it
        compile_blocks(model, local_device())
    if (checkpointing := _CHECKPOINTING.get(activation_checkpointing)) is not None:
        checkpointing().build(dump_folder="").apply(model)
    if world.size == 1:
        return
    apply_fsdp_to_decoder(
        model,
        world.dims.get_mesh(["fsdp"]),
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        cpu_offload=offload_parameters,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can do no other
            if local_device().type == "cpu":
                _leave_unpinned(module)


def _leave_unpinned(module: FSDPModule) -> None:
    """Offloaded parameters are pinned for transfers to an accelerator; without one torch cannot pin memory."""
    state: Any = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.pin_memory = False


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the ranks hold parts of. Called by all of them; one that is whole already is returned as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank holds whole, as a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slice(tensor: torch.Tensor) -> TensorSlice:
    """The slice of a tensor that this rank holds, sharing its memory; of one that no rank shares, all of it."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorSlice(tensor, SlicePosition((0,) * len(shape), shape))
    own = tensor.to_local()
    size, start = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    assert tuple(own.shape) == tuple(size), f"a slice of {shape} has shape {tuple(own.shape)}; {size} is expected"
    return TensorSlice(own, SlicePosition(tuple(start), shape))


def owned_slice(tensor: torch.Tensor, world: World) -> TensorSlice | None:
    """The slice of a parameter that this rank answers for, sharing its memory. None where it holds nothing of it, or
    only what another rank holds, too."""
    if not isinstance(tensor, DTensor):
        return local_slice(tensor) if world.is_first else None
    coordinates = tensor.device_mesh.get_coordinate() or ()
    if any(at and placement.is_replicate() for at, placement in zip(coordinates, tensor.placements, strict=True)):
        return None
    own = local_slice(tensor)
    return own if own.tensor.numel() else None
