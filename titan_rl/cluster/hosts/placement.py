"""Placement of processes on hosts and GPUs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.hosts import Roles
from titan_rl.config.model_folder import BYTES, count_parameters
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.core.errors import ConfigError
from titan_rl.generation.gpu_share import has_gpu_driver
from titan_rl.training.settings import TrainingConfig
from titan_rl.weights.transports.registry import TransportKind
from titan_rl.weights.types import NUM_KEPT


def visible_gpus() -> tuple[str, ...]:
    """GPUs that this process may use, as in CUDA_VISIBLE_DEVICES, found without initializing CUDA on one."""
    if not has_gpu_driver():
        return ()
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return tuple(map(str, range(count))) if named is None else tuple(named.split(",")[:count])


def least_gpu_bytes() -> int | None:
    """Memory in bytes of the smallest GPU of this machine, found without initializing CUDA; None if nvidia-smi is
    missing or fails."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in output.splitlines()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


_COUNTS = "training.data_parallel x training.context_parallel x training.tensor_parallel"

GPUs = Mapping[str, Sequence[str]]
"""GPUs of each host by its name, as in CUDA_VISIBLE_DEVICES; empty for a host without GPUs."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Placement of one process: its host and the GPUs that it sees. `local_rank` is the index of its own GPU among
    them."""

    host: str
    gpus: tuple[str, ...] = ()
    local_rank: int = 0


def place_trainer(training: TrainingConfig, hosts: Sequence[str], gpus: GPUs) -> tuple[ProcessPlace, ...]:
    """Place the ranks of a trainer. The first ranks go to the first host and its first GPUs. Each rank sees only its
    own GPU, because torch's current device is per thread.

    Raises:
        ConfigError: The ranks cannot be distributed evenly, ranks that share a tensor would be on several hosts, or a
            host has fewer GPUs than ranks.
    """
    num_ranks = training.num_ranks
    if num_ranks % len(hosts) or num_ranks // len(hosts) % training.tensor_parallel:
        raise ConfigError(
            f"hosts.train is {len(hosts)}, and {_COUNTS} is {training.data_parallel} x {training.context_parallel} x "
            f"{training.tensor_parallel}: each host needs the same number of ranks, and all ranks of a tensor; "
            f"set training.data_parallel to a multiple of {len(hosts)}, or hosts.train to 1"
        )
    per_host = num_ranks // len(hosts)
    places: list[ProcessPlace] = []
    for host in hosts:
        if gpus[host]:
            _check(_COUNTS, per_host, host, gpus[host])
        places += [ProcessPlace(host, tuple(gpus[host][rank : rank + 1])) for rank in range(per_host)]
    return tuple(places)


def place_trainer_again(
    training: TrainingConfig, before: Sequence[ProcessPlace], gpus: GPUs, taken: Collection[tuple[str, str]] = ()
) -> tuple[ProcessPlace, ...]:
    """Place the ranks of a trainer that died, on the same hosts if all are still present. Another host, preferably one
    with free GPUs, takes the ranks of a lost host. If there are too few hosts, each takes more ranks.

    Args:
        gpus: GPUs of the hosts that are present.
        taken: Pairs of host and GPU that other processes use.

    Raises:
        ConfigError: The remaining hosts cannot take the ranks.
    """
    hosts = list(dict.fromkeys(place.host for place in before))
    present = [host for host in hosts if host in gpus]
    if present == hosts:
        return tuple(before)
    free = {host: [gpu for gpu in own if (host, gpu) not in taken] for host, own in gpus.items()}
    others = sorted((host for host in gpus if host not in present), key=lambda host: -len(free[host]))
    candidates = [*present, *others][: len(hosts)]
    for count in range(len(candidates), 0, -1):
        num_ranks, per_host = len(before), len(before) // count
        if num_ranks % count == 0 and per_host % training.tensor_parallel == 0:
            chosen = candidates[:count]
            room = {host: free[host] if len(free[host]) >= per_host else gpus[host] for host in chosen}
            return place_trainer(training, chosen, room)
    raise ConfigError(
        "no host that sees the run's folder is left to train on; `titan-rl hosts RUN add ADDRESS` adds one"
    )


def place_generators(
    generation: GenerationConfig, hosts: Sequence[str], gpus: GPUs, trainer: Sequence[ProcessPlace] = ()
) -> tuple[tuple[ProcessPlace, ...], ...]:
    """Place the ranks of all generators. Each generator goes to one host, in turn, and takes the GPUs that the trainer
    leaves there. If too few are left for one generator, the generators share all GPUs of the host.

    Example: on one host with GPUs 0 to 3 and a trainer of two ranks, three generators have 2, 3 and 2.

    Raises:
        ConfigError: A generator has more ranks than its host has GPUs.
    """
    size = generation.tensor_parallel_size
    taken = _gpus(trainer)
    placed: list[tuple[ProcessPlace, ...]] = []
    for index in range(generation.num_generators):
        host, on_host = hosts[index % len(hosts)], index // len(hosts)
        if host_gpus := gpus[host]:
            _check("generation.tensor_parallel_size", size, host, host_gpus)
        left = [gpu for gpu in host_gpus if (host, gpu) not in taken]
        free = left if len(left) >= size else host_gpus
        own = tuple(free[at % len(free)] for at in range(on_host * size, (on_host + 1) * size)) if free else ()
        placed.append(tuple(ProcessPlace(host, own, rank) for rank in range(size)))  # ranks access each other's GPUs
    return tuple(placed)


def place_generator_again(
    index: int,
    generators: Sequence[Sequence[ProcessPlace]],
    gpus: GPUs,
    per_host: int,
    trainer: Sequence[ProcessPlace] = (),
) -> tuple[ProcessPlace, ...]:
    """Place a generator whose host is lost on a host that has room. Returns () if there is none.

    Args:
        index: Index of the generator.
        generators: Places of all generators.
        gpus: GPUs of the hosts that are present.
        per_host: Number of generators for which a host without GPUs has room. Such a host is used only if it has a
            generator already or no host has.
    """
    size = len(generators[index])
    others = [place for ranks in generators for place in ranks]
    taken = _gpus((*others, *trainer))
    generate, train = {place.host for place in others} & gpus.keys(), {place.host for place in trainer}
    for host, own in sorted(gpus.items(), key=lambda each: each[0] in train):
        free = tuple(gpu for gpu in own if (host, gpu) not in taken)
        num_here = sum(place.host == host for place in others)
        if len(free) >= size if own else num_here < per_host * size and (num_here or not generate):
            return tuple(ProcessPlace(host, free[:size], rank) for rank in range(size))
    return ()


def place_workers(num_workers: int, hosts: Sequence[str]) -> tuple[ProcessPlace, ...]:
    """Place rollout workers on the hosts in turn."""
    return tuple(ProcessPlace(hosts[index % len(hosts)]) for index in range(num_workers))


def check_transport(name: str, kind: TransportKind, roles: Roles, gpus: GPUs) -> None:
    """Check that a transport can connect the hosts that train and generate.

    Raises:
        ConfigError: `statedict.transport` needs GPUs and a host has none, or it reaches only one host and there are
            several.
    """
    hosts = list(dict.fromkeys((*roles.train, *roles.generate)))
    without = [host for host in hosts if not gpus[host]]
    if kind.needs_gpus and without:
        raise ConfigError(f"statedict.transport is {name!r} and {without[0]} has no GPU; choose 'auto'")
    if not kind.spans_hosts and len(hosts) > 1:
        raise ConfigError(
            f"statedict.transport is {name!r}, which reaches one host, and {', '.join(hosts)} train and generate; "
            "choose 'auto'"
        )


TRAINED_BYTES = 16
"""Bytes per parameter during training: the parameter, its gradient and two moments in float32."""

ROOM = 0.5
"""Share of a GPU's memory that parameters and published versions may take. The rest is for activations. Used by
`choose_transport`."""


def choose_transport(
    config: RunConfig,
    trainer: Sequence[ProcessPlace],
    generators: Sequence[Sequence[ProcessPlace]],
    gpu_bytes: Callable[[], int | None],
    *,
    parameters: int | None = None,
) -> tuple[str, str]:
    """Choose the transport for `statedict.transport = "auto"`. Returns its name and the reason.

    Args:
        trainer, generators: Places of the ranks of the trainer and of each generator.
        gpu_bytes: Returns the memory of the smallest GPU in bytes; None if unknown. Called only if other criteria do
            not decide.
        parameters: Number of the model's parameters. By default they are counted in its folder.

    Example: `("cuda_ipc", "trainer and generators have GPUs of one host, with room for ...")`.
    """
    others = [place for ranks in generators for place in ranks]
    if config.hosts.elsewhere:
        return "tcp", "processes may be on several hosts"
    if not all(place.gpus for place in (*trainer, *others)):
        return "shared_memory", "trainer and generators are on one host, not all on GPUs"
    if config.generation.engine != "vllm":
        return "shared_memory", "an engine other than vllm may not read weights that are in GPU memory"
    if not {gpu for place in trainer for gpu in place.gpus}.isdisjoint(gpu for place in others for gpu in place.gpus):
        return "shared_memory", "trainer and generators share a GPU, which has no room for two more versions"
    total = gpu_bytes()
    if total is None:
        return "shared_memory", "nvidia-smi does not say whether the trainer's GPU has room for two more versions"
    each = TRAINED_BYTES + (NUM_KEPT + config.validates_beside_training) * BYTES[config.model.dtype]
    count = count_parameters(Path(config.model.path)) if parameters is None else parameters
    need = each * count / config.training.num_ranks
    memory = f"{need / 2**30:.1f} GiB of parameters and published versions on a trainer's GPU of {total / 2**30:.0f}"
    if need > ROOM * total:
        return "shared_memory", f"{memory} leave too little for activations"
    return "cuda_ipc", f"trainer and generators have GPUs of one host, with room: {memory}"


def _check(field: str, num_ranks: int, host: str, gpus: Sequence[str]) -> None:
    if num_ranks > len(gpus):
        raise ConfigError(
            f"{field} is {num_ranks} on a host and each rank needs its own GPU; set it to {len(gpus)} or less, as "
            f"{host} has no more"
        )


Ranks = tuple[ProcessPlace, ...]
"""Places of the ranks of one generator."""


class GeneratorPlaces:
    """Places of generators by index: first as the settings place them on the initial hosts (`begin`), later as hosts
    come and go."""

    def __init__(self, generation: GenerationConfig) -> None:
        self._generation = generation
        self._ranks: list[Ranks] = []
        self._per_host = 1  # number of generators that fit on a host without GPUs

    def __getitem__(self, index: int) -> Ranks:
        return self._ranks[index]

    def __iter__(self) -> Iterator[Ranks]:
        return iter(self._ranks)

    @property
    def gpus(self) -> set[tuple[str, str]]:
        """Pairs of host and GPU that generators use."""
        return {gpu for ranks in self._ranks for gpu in _gpus(ranks)}

    def neighbours(self, index: int) -> int:
        """Number of other generators that share a GPU with this one."""
        own = _gpus(self._ranks[index])
        return sum(not own.isdisjoint(_gpus(ranks)) for at, ranks in enumerate(self._ranks) if at != index)

    def shares(self, index: int, trainer: Sequence[ProcessPlace]) -> bool:
        """Whether a trainer in these places shares a GPU with this generator."""
        return not _gpus(self._ranks[index]).isdisjoint(_gpus(trainer))

    def begin(self, hosts: Sequence[str], gpus: GPUs, trainer: Sequence[ProcessPlace] = ()) -> None:
        """Place all generators; see `place_generators` for errors."""
        self._ranks = [*place_generators(self._generation, hosts, gpus, trainer)]
        used = {place.host for ranks in self._ranks for place in ranks}
        self._per_host = -(-len(self._ranks) // max(len(used), 1))

    def move(self, index: int, gpus: GPUs, trainer: Sequence[ProcessPlace]) -> bool:
        """Move a generator whose host is lost. Returns whether a host has room for it.

        Args:
            gpus: GPUs of the hosts that are present.
        """
        ranks = place_generator_again(index, self._ranks, gpus, self._per_host, trainer)
        self._ranks[index] = ranks or self._ranks[index]
        return bool(ranks)

    def join(self, host: str, gpus: Sequence[str], without: Sequence[int]) -> list[int]:
        """Choose and place the generators of a host that joins. Returns their indices.

        Args:
            without: Indices of generators without a place, which are chosen before new ones.
        """
        generation = self._generation
        room = len(gpus) // generation.tensor_parallel_size if gpus else self._per_host
        most = generation.most_generators or len(self._ranks) + room
        chosen = [*without, *range(len(self._ranks), most)][:room]
        alone = generation.model_copy(update={"num_generators": room})
        for index, ranks in zip(chosen, place_generators(alone, [host], {host: gpus}), strict=False):
            self._ranks[index : index + 1] = [ranks]
        return chosen


def _gpus(places: Sequence[ProcessPlace]) -> set[tuple[str, str]]:
    """Pairs of host and GPU that processes use."""
    return {(place.host, gpu) for place in places for gpu in place.gpus}
