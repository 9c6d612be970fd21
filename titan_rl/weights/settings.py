"""The settings of state-dict sync: the table [statedict]."""

from __future__ import annotations

from typing import Annotated

from pydantic import NonNegativeInt, PositiveFloat

from titan_rl.settings import FunctionName, Section
from titan_rl.weights.transports.registry import BY_NAME


class StateDictConfig(Section):
    """How every published version travels to the generators, and how they verify it."""

    transport: Annotated[str, FunctionName(tuple(BY_NAME))] = "shared_memory"
    """With shared_memory generators are on the trainer's host; with rdma they may be elsewhere, too, and read over the
    network there. With cuda_ipc all are on GPUs of one host, and read from the trainer's GPU memory, which has two more
    copies then."""
    num_probes: NonNegativeInt = 4
    """Sequences whose logprobs the trainer publishes with each version; 0 verifies nothing."""
    tolerance: PositiveFloat | None = None
    """Largest mean logprob difference of a probe; by default 1e-5 in float32 and 0.1 in bfloat16."""
    pull_timeout_s: PositiveFloat = 120.0
    """Longest wait for a generator to load a version."""
