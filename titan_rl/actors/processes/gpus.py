"""Which GPUs each process uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.errors import ConfigError
from titan_rl.training.settings import TrainingConfig
from titan_rl.weights.transports.registry import find_transport


@dataclass(frozen=True, slots=True)
class GPUAssignment:
    """GPUs by what CUDA_VISIBLE_DEVICES calls them, one for each rank. Empty where there are none."""

    trainer: tuple[str, ...]
    generators: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(config: RunConfig, gpus: Sequence[str]) -> GPUAssignment:
        """The trainer's ranks take the first GPUs, and the generators what is left, in turn. With nothing left, or too
        little for one generator, generators share the trainer's.

        Example: of four GPUs, a trainer of two ranks has 0 and 1, and three generators have 2, 3 and 2.

        Raises:
            ConfigError: a trainer or a generator has more ranks than there are GPUs, or there are none where the
                transport needs them.
        """
        training, generation = config.training, config.generation
        if not gpus and find_transport(name := config.statedict.transport).needs_gpus:
            raise ConfigError(f"statedict.transport is {name!r} and this host has no GPU; choose 'shared_memory'")
        if not gpus:
            return GPUAssignment((), share_out(generation, gpus))
        trainer, size = take_gpus(training, gpus), generation.tensor_parallel_size
        _check("generation.tensor_parallel_size", size, gpus)
        left = gpus[len(trainer) :] if len(gpus) - len(trainer) >= size else gpus
        return GPUAssignment(trainer, share_out(generation, left))


def take_gpus(training: TrainingConfig, gpus: Sequence[str]) -> tuple[str, ...]:
    """Those of the trainer's ranks, the first of these; none where there are none.

    Raises:
        ConfigError: there are fewer than ranks.
    """
    if not gpus:
        return ()
    num_ranks = training.data_parallel * training.tensor_parallel
    _check("training.data_parallel x training.tensor_parallel", num_ranks, gpus)
    return tuple(gpus[:num_ranks])


def share_out(generation: GenerationConfig, gpus: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """What each generator takes of these GPUs, in turn; nothing where there are none.

    Raises:
        ConfigError: a generator has more ranks than there are GPUs.
    """
    size = generation.tensor_parallel_size
    if not gpus:
        return ((),) * generation.num_generators
    _check("generation.tensor_parallel_size", size, gpus)
    return tuple(
        tuple(gpus[at % len(gpus)] for at in range(index * size, (index + 1) * size))
        for index in range(generation.num_generators)
    )


_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")  # of NVIDIA, its Tegra, AMD, and within WSL


def visible_gpus() -> tuple[str, ...]:
    """Those that this process may use, found without taking hold of one."""
    if not any(os.path.exists(driver) for driver in _DRIVERS):
        return ()  # torch would say so, too, and takes seconds to import
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return tuple(map(str, range(count))) if named is None else tuple(named.split(",")[:count])


def use_gpus(gpus: Sequence[str], local_rank: int) -> None:
    """Have this process see these GPUs alone, and take that of its rank. Called before anything of CUDA; on a machine
    without a GPU it changes nothing."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        os.environ["LOCAL_RANK"] = str(local_rank)


def _check(field: str, num_ranks: int, gpus: Sequence[str]) -> None:
    if num_ranks > len(gpus):
        raise ConfigError(
            f"{field} is {num_ranks} and each rank needs a GPU of its own; set it to {len(gpus)} or less, as this host "
            f"has no more"
        )
