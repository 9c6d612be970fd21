"""Sharding: the `World` of ranks that train one policy together, and the part of the model that each rank holds.

Parameters are sharded by FSDP2, tensor parallelism, expert parallelism, or FSDP2 with one of the others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_rl.core.errors import ConfigError, TitanRLError, TrainingError
from titan_rl.training.attention.attention import ContextRanks
from titan_rl.training.choices import ActivationCheckpointing
from titan_rl.training.decoder_interface import DecoderModel
from titan_rl.training.device import local_device  # before torchtitan
from titan_rl.weights.types import SlicePosition, TensorSlice

# isort: split
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that train together, as one of them sees them. Ranks are numbered with tensor-parallel ranks, which
    share tokens, innermost; then context-parallel ranks, which share rows; and data-parallel ranks, which have their
    own rows, outermost. Expert-parallel ranks are consecutive context- and data-parallel ranks, and share the experts
    of each layer.

    Example: of 2 x 1 x 2 ranks, rank 3 has `data_rank` 1 and holds the second half of each matrix.
    """

    data_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1  # divides data_parallel * context_parallel
    rank: int = 0
    dims: Any = None  # torchtitan's ParallelDims, if there are several ranks
    group: Any = None  # process group of `gather` and `barrier`; None is torch.distributed's default

    @staticmethod
    def join(
        *, data_parallel: int = 1, context_parallel: int = 1, tensor_parallel: int = 1, expert_parallel: int = 1
    ) -> World:
        """Join the other ranks, which torch.distributed's environment variables describe. A single rank needs none.

        Raises:
            TrainingError: The number of processes is not the product of the parallel sizes.
        """
        size = data_parallel * context_parallel * tensor_parallel
        found = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if found != size:
            raise TrainingError(
                f"there are {found} trainer processes; training.data_parallel = {data_parallel}, "
                f"training.context_parallel = {context_parallel} and training.tensor_parallel = {tensor_parallel} "
                f"need {size}"
            )
        if size == 1:
            return World()
        from torchtitan.config import ParallelismConfig
        from torchtitan.distributed import ParallelDims

        if not dist.is_initialized():
            dist.init_process_group("gloo" if local_device().type == "cpu" else "cpu:gloo,cuda:nccl")
        settings = ParallelismConfig(
            spmd_backend="partial_dtensor",
            data_parallel_shard_degree=data_parallel,
            context_parallel_degree=context_parallel,
            tensor_parallel_degree=tensor_parallel,
            expert_parallel_degree=expert_parallel,
        )
        dims = ParallelDims.from_config(settings, size)
        dims.build_mesh()
        return World(data_parallel, context_parallel, tensor_parallel, expert_parallel, dist.get_rank(), dims)

    def with_own_group(self) -> World:
        """Return the same ranks with a process group for another thread, so that its messages do not mix with this
        thread's. All ranks call this at the same time. In the new group, a rank waits up to a day for the others."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(days=1)))

    @property
    def size(self) -> int:
        return self.data_parallel * self.context_parallel * self.tensor_parallel

    @property
    def data_rank(self) -> int:
        return self.rank // (self.context_parallel * self.tensor_parallel)

    @property
    def context(self) -> ContextRanks | None:
        """Ranks that share the tokens of this rank's rows; None if this rank has them alone."""
        if self.context_parallel == 1:
            return None
        return ContextRanks(self._context_rank, self.context_parallel, self.dims.get_mesh("cp").get_group())

    @property
    def _context_rank(self) -> int:
        return self.rank // self.tensor_parallel % self.context_parallel

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over the data-parallel ranks. Ranks that share rows must pass equal values."""
        counted = values if self._context_rank == 0 else [0.0] * len(values)
        return self._reduce(counted, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def agree(self, problem: str | None, error: type[TitanRLError] = TrainingError) -> None:
        """Raise an error on all ranks if one of them has a problem. All ranks call this.

        Raises:
            TrainingError: A rank has a problem; the message is that of the first such rank. If `error` is given, that
                type is raised instead.
        """
        if (first := next((each for each in self.gather(problem) if each is not None), None)) is not None:
            raise error(first)

    def gather(self, value: T) -> list[T]:
        """Collect the values of all ranks, in the order of the ranks. All ranks call this."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(self.group)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.data_parallel * self.context_parallel == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        group = self.dims.get_mesh("fsdp").get_group()
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else local_device()
        tensor = tensor.to(device)
        dist.all_reduce(tensor, operation, group=group)
        return tensor.tolist()


def checkpoint_activations(model: DecoderModel, which: ActivationCheckpointing) -> None:
    """Checkpoint the activations of the blocks, in place."""
    if which != "none":
        policy = {"full": FullAC.Config, "selective": SelectiveAC.Config}[which]()
        model.wrap_blocks(policy.build(dump_folder=""))


def parallelize(
    model: DecoderModel,
    world: World,
    *,
    dtype: torch.dtype,
    compile: bool,
    activation_checkpointing: ActivationCheckpointing,
    offload_parameters: bool,
) -> None:
    """Compile the model and checkpoint its activations on request, and shard the parameters if there are several ranks,
    all in place.

    Gradients are summed over the ranks, not averaged, because the loss has its own denominator.

    Args:
        dtype: Dtype in which the ranks gather parameters and compute. Parameters are kept, and gradients summed, in
            float32.
        offload_parameters: Whether to keep parameters and gradients in the host's memory, and gather those of a layer
            on the device only for its computation. The caller must then allocate the parameters on the CPU. This needs
            several ranks: a single rank gathers nothing.
    """
    assert world.size > 1 or not offload_parameters, "offloading of parameters needs FSDP on several ranks"
    if world.tensor_parallel > 1:
        model.split_matrices(world.dims)
    same_experts = None
    if world.expert_parallel > 1:
        model.divide_experts(world.dims.get_mesh("ep"))
        same_experts = world.dims.get_mesh("efsdp")
    if compile:  # before the blocks are wrapped, because torch cannot compile a checkpointed block as a whole
        _compile_blocks(model)
    checkpoint_activations(model, activation_checkpointing)
    if world.size == 1:
        return
    model.shard(world.dims.get_mesh(["fsdp"]), dtype, offload=offload_parameters, same_experts=same_experts)
    for module in model.module.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # the only reduction of gloo
            if local_device().type == "cpu":
                _leave_unpinned(module)


def _leave_unpinned(module: FSDPModule) -> None:
    """Turn off the pinning of offloaded parameters, which torch cannot do without an accelerator."""
    state: Any = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.pin_memory = False


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by the mesh of ranks that holds their parts, because torch's operations on lists require tensors of
    one mesh. With expert parallelism, experts are on another mesh than the other parameters."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor; all ranks call this. A plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor as a plain tensor. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slice(tensor: torch.Tensor) -> TensorSlice:
    """The slice of a tensor that this rank holds, sharing its memory; the whole tensor if it is not sharded."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorSlice(tensor, SlicePosition((0,) * len(shape), shape))
    own = tensor.to_local()
    size, start = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    assert tuple(own.shape) == tuple(size), f"a slice of {shape} has shape {tuple(own.shape)}; {size} is expected"
    return TensorSlice(own, SlicePosition(tuple(start), shape))


def owned_slice(tensor: torch.Tensor, world: World) -> TensorSlice | None:
    """The slice of a parameter that this rank publishes and saves, sharing its memory. None if the rank holds nothing
    of it, or only a replica of another rank's part."""
    if not isinstance(tensor, DTensor):
        return local_slice(tensor) if world.is_first else None
    coordinates = tensor.device_mesh.get_coordinate() or ()
    if any(at and placement.is_replicate() for at, placement in zip(coordinates, tensor.placements, strict=True)):
        return None
    own = local_slice(tensor)
    return own if own.tensor.numel() else None


def fill(piece: TensorSlice, whole: Any) -> None:
    """Fill a slice with its part of the whole tensor, which may be in a safetensors file."""
    sizes = zip(piece.position.start, piece.tensor.shape, strict=True)
    piece.tensor.copy_(whole[tuple(slice(first, first + size) for first, size in sizes)])


class HeldSlices:
    """Collects the slices that this rank publishes. The first rank also names tensors of which it holds nothing, so
    that readers notice a missing part.

    Args:
        dtype: Dtype of gathered tensors.

    Attributes:
        named: Pairs of a name and a slice.
    """

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.named: list[tuple[str, TensorSlice]] = []
        self._world = world
        self._dtype = dtype
        self._num_gathered = 0

    def add(self, name: str, piece: TensorSlice | None, shape: Sequence[int]) -> None:
        """Add this rank's slice of a tensor; None if another rank publishes it."""
        if piece is not None:
            self.named.append((name, piece))
        elif self._world.is_first:
            empty = torch.empty((0, *shape[1:]), dtype=self._dtype)
            self.named.append((name, TensorSlice(empty, SlicePosition((0,) * len(shape), tuple(shape)))))

    def add_gathered(self, name: str, whole: torch.Tensor) -> None:
        """Add a tensor that all ranks have gathered. The ranks take turns in publishing such tensors."""
        is_owner = self._num_gathered % self._world.size == self._world.rank
        self._num_gathered += 1
        piece = None
        if is_owner:
            own = whole.to(self._dtype)
            if own.untyped_storage().nbytes() > own.nbytes:  # a view would keep the whole gathered parameter allocated
                own = own.clone()
            piece = local_slice(own)
        self.add(name, piece, whole.shape)


def _compile_blocks(model: DecoderModel) -> None:
    """Compile the blocks in place, so that parameters keep their names. torch compiles during the first batches: with
    and without gradients, and for one row and for several.

    Modules whose shapes depend on the batch run uncompiled between the compiled parts of a block; otherwise torch would
    recompile them for every batch. torchtitan's `apply_compile` does not support that.

    Raises:
        ConfigError: This machine lacks the compiler that torch needs on a CPU.
    """
    if local_device().type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise ConfigError(
            "training.compile = true needs a C++ compiler on a machine without an accelerator, but none was found; "
            "install g++, name your compiler in the environment variable CXX, or set compile = false"
        )
    for module in model.uncompiled:
        module.forward = cast(Any, torch.compiler.disable(module.forward))
    for block in model.blocks.values():
        block.compile(dynamic=True)
