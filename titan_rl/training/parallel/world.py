"""The processes that train one policy together, and what they agree on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titan_rl.core.errors import TitanRLError, TrainingError
from titan_rl.training.attention.context import ContextRanks
from titan_rl.training.device import local_device

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view. Ranks that share tokens (tensor parallel) are neighbours, and so are those, in steps of that
    size, that share rows (context parallel); beyond them each has rows of its own (data parallel).

    Example: of 2 x 1 x 2 ranks, rank 3 has `data_rank` 1 and holds the second half of each matrix.
    """

    data_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    rank: int = 0
    dims: Any = None  # torchtitan's ParallelDims, where there are several ranks
    group: Any = None  # in which they agree; None is torch.distributed's own

    @staticmethod
    def join(*, data_parallel: int = 1, context_parallel: int = 1, tensor_parallel: int = 1) -> World:
        """Meet the other ranks, as torch.distributed's environment variables say. Alone there is nobody to meet.

        Raises:
            TrainingError: there are more or fewer processes than that.
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
        )
        dims = ParallelDims.from_config(settings, size)
        dims.build_mesh()
        return World(data_parallel, context_parallel, tensor_parallel, dist.get_rank(), dims)

    def with_own_group(self) -> World:
        """The same ranks, for another thread: what they agree on there does not get into the way of this one's. All
        ranks call this at the same time. They may wait long for one another."""
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
        """The ranks that share the tokens of this one's rows; None where it has them to itself."""
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
        """Each value summed over the ranks that have rows of their own. Those that share rows call it with the same."""
        counted = values if self._context_rank == 0 else [0.0] * len(values)
        return self._reduce(counted, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def agree(self, problem: str | None, error: type[TitanRLError] = TrainingError) -> None:
        """Every rank calls this, and all fail if one has a problem.

        Raises:
            TrainingError: with the first problem. Or another error, where one is given.
        """
        if (first := next((each for each in self.gather(problem) if each is not None), None)) is not None:
            raise error(first)

    def gather(self, value: T) -> list[T]:
        """What each rank calls this with, by rank."""
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
