"""Where the generators of a run or a server are, as hosts come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan_rl.cluster.hosts.placement import GPUs, ProcessPlace, place_generator_again, place_generators
from titan_rl.config.sections import GenerationConfig

GENERATOR = "generator-"
"""With its number, the name of a generator."""

Ranks = tuple[ProcessPlace, ...]
"""Places of the ranks of one generator."""


def number_of(name: str) -> int:
    """`number_of("generator-3")` is 3."""
    return int(name.removeprefix(GENERATOR))


class GeneratorPlaces:
    """Of generators by their numbers, as those of settings `begin` on the hosts that there are."""

    def __init__(self, generation: GenerationConfig) -> None:
        self._generation = generation
        self._ranks: list[Ranks] = []
        self._a_host = 1  # generators that a host without GPUs has

    def __getitem__(self, index: int) -> Ranks:
        return self._ranks[index]

    def __iter__(self) -> Iterator[Ranks]:
        return iter(self._ranks)

    @property
    def gpus(self) -> set[tuple[str, str]]:
        """Hosts and GPUs that are taken."""
        return {(place.host, gpu) for ranks in self._ranks for place in ranks for gpu in place.gpus}

    def neighbours(self, index: int) -> int:
        """Other generators that have a GPU of this one."""
        own = _gpus(self._ranks[index])
        return sum(not own.isdisjoint(_gpus(ranks)) for at, ranks in enumerate(self._ranks) if at != index)

    def shares(self, index: int, trainer: Sequence[ProcessPlace]) -> bool:
        """Whether a trainer in these places has a GPU of this generator."""
        return not _gpus(self._ranks[index]).isdisjoint(_gpus(trainer))

    def begin(self, hosts: Sequence[str], gpus: GPUs, trainer: Sequence[ProcessPlace] = ()) -> None:
        """As `place_generators`, which may raise a ConfigError."""
        self._ranks = [*place_generators(self._generation, hosts, gpus, trainer)]
        used = {place.host for ranks in self._ranks for place in ranks}
        self._a_host = -(-len(self._ranks) // max(len(used), 1))

    def move(self, index: int, gpus: GPUs, trainer: Sequence[ProcessPlace]) -> bool:
        """Whether a host has room for one whose own is gone, which is there from now on.

        Args:
            gpus: of the hosts that are there.
        """
        ranks = place_generator_again(index, self._ranks, gpus, self._a_host, trainer)
        self._ranks[index] = ranks or self._ranks[index]
        return bool(ranks)

    def join(self, host: str, gpus: Sequence[str], without: Sequence[int]) -> list[int]:
        """The generators that a host has which comes to the others.

        Args:
            without: generators that are nowhere, which go before further ones.
        """
        generation = self._generation
        room = len(gpus) // generation.tensor_parallel_size if gpus else self._a_host
        most = generation.most_generators or len(self._ranks) + room
        chosen = [*without, *range(len(self._ranks), most)][:room]
        alone = generation.model_copy(update={"num_generators": room})
        for index, ranks in zip(chosen, place_generators(alone, [host], {host: gpus}), strict=False):
            self._ranks[index : index + 1] = [ranks]
        return chosen


def _gpus(places: Sequence[ProcessPlace]) -> set[tuple[str, str]]:
    return {(place.host, gpu) for place in places for gpu in place.gpus}
