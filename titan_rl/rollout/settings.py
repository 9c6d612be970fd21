"""Settings of the rollout plane: the table [rollout]."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from titan_rl.core.settings import Section


class RolloutConfig(Section):
    """Groups of sibling rollouts and their limits."""

    group_size: int = Field(default=8, ge=2)
    """Number of rollouts of one sample, which are compared with each other."""
    max_turns: PositiveInt = 8
    """Most completions of one rollout."""
    rollout_timeout_s: PositiveFloat = 300.0
    """Time limit of one rollout: time of its environment, and of its requests while they run, not while they queue or
    are interrupted. The rollout then ends with the answers it has, as truncated."""
    generate_timeout_s: PositiveFloat = 7200.0
    """Longest time of one completion, including interruptions."""
    env_timeout_s: PositiveFloat = 60.0
    """Longest time of one call into the environment."""
    env_in_thread: bool = False
    """Run each environment entirely in its own thread, for coroutines that block and objects bound to a thread. Time
    limits then apply to them. Plain methods run in a thread in any case."""
    num_workers: NonNegativeInt = 0
    """Processes that run groups, for environments or rewards that need much computation; 0 runs groups in the
    controller."""
    max_retries: NonNegativeInt = 0
    """Retries of siblings, in all for one group, after errors other than parse errors; each in a new
    environment."""
