"""What a simulated cluster can do, and how long it takes over it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan_rl.core.errors import ConfigError
from titan_rl.generation.scripted_engine import CostModel

UNLIMITED = 1 << 40  # tokens, more than there are


@dataclass(frozen=True, slots=True)
class Cluster:
    """Generators and a trainer. All times in seconds.

    Args:
        num_replicas: engines, each with its own batch.
        cost: of one engine step, as a function of its running requests, their tokens and new prompt tokens; `load` is
            what a pull takes of each engine.
        max_running: requests that one engine advances at a time.
        kv_tokens: tokens that the KV cache of one engine holds.
        move_below: generators with at most this part of the fullest's requests get some of them, see `Moves`.
        num_lent: engines on the trainer's devices, which generate while it waits for a batch, see `LentEngines`.
        adapts: fewer requests are advanced where the KV cache is expected to be full, see `AdaptivePlaces`.
        train_s: one optimizer step on one batch.
        logprob_s: recomputing the logprobs of one batch before it is trained on; 0 where the sampler's own are used.
        wake_s: what an engine takes to have its memory again after it slept.
        colocated: generators and trainer share their devices, so that nothing is generated while a batch is trained.

    Raises:
        ConfigError: names the field, the value and what is allowed.
    """

    num_replicas: int
    cost: CostModel
    max_running: int = 256
    kv_tokens: int = UNLIMITED
    move_below: float | None = None
    num_lent: int = 0
    adapts: bool = False
    train_s: float = 0.0
    logprob_s: float = 0.0
    wake_s: float = 0.0
    colocated: bool = False

    def __post_init__(self) -> None:
        for name, least in {"num_replicas": 1, "max_running": 1, "kv_tokens": 1, "num_lent": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"Cluster.{name} is {getattr(self, name)!r}; it must be at least {least}")
        for name in ("train_s", "logprob_s", "wake_s"):
            if not (math.isfinite(seconds := getattr(self, name)) and seconds >= 0):
                raise ConfigError(f"Cluster.{name} is {seconds!r}; it must be finite and >= 0")
        if self.colocated and self.num_lent:
            raise ConfigError(
                f"Cluster.num_lent is {self.num_lent}, and on a colocated cluster all engines are on the trainer's "
                "devices already; set num_lent = 0, or colocated = False"
            )
