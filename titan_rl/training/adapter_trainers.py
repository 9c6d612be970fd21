"""Several adapters of one model in one trainer: the frozen weights are in memory once, everything else is separate."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager

import torch

from titan_rl.training.settings import ModelConfig, PolicySettings
from titan_rl.training.trainer import TrainerCore


class AdapterTrainers:
    """Trainers of several adapters of one model, or the one trainer of a run, by name.

    Each adapter has a `TrainerCore` with its own matrices, optimizer, settings, version and random state. They share
    the frozen weights, so the result for each adapter is bitwise identical to training it alone.

    Args:
        policies: Settings by adapter name. With several adapters, each trains in a world of one rank.
        seed, num_threads: Arguments of each trainer; see `TrainerCore`.

    Raises:
        ModelError, ConfigError: A trainer cannot be created; see `TrainerCore`.

    Example:

        trainers = AdapterTrainers(model, {"sort": first, "sum": second}, seed=0)
        with trainers.turn("sort") as trainer:
            trainer.step(samples)
    """

    def __init__(
        self, model: ModelConfig, policies: Mapping[str, PolicySettings], *, seed: int, num_threads: int = 1
    ) -> None:
        self._trainers: dict[str, TrainerCore] = {}
        self._random: dict[str, torch.Tensor] = {}
        base: TrainerCore | None = None
        for name, settings in policies.items():
            trainer = TrainerCore(
                model, settings.training, settings.correction, seed=seed, num_threads=num_threads, base=base
            )
            base = base or trainer
            self._trainers[name], self._random[name] = trainer, torch.get_rng_state()
        self._current = next(reversed(self._trainers))

    def __getitem__(self, name: str) -> TrainerCore:
        return self._trainers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainers)

    @contextmanager
    def turn(self, name: str) -> Generator[TrainerCore]:
        """Give the block the trainer of one adapter, and set torch's random state to that adapter's.

        Blocks must not overlap.
        """
        if name != self._current:
            self._random[self._current] = torch.get_rng_state()
            torch.set_rng_state(self._random[name])
            self._current = name
        yield self._trainers[name]
