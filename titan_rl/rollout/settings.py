"""Settings of the rollout plane: the table [rollout]."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from titan_rl.core.settings import Section


class RolloutConfig(Section):
    """Groups of sibling rollouts and their limits."""

    group_size: PositiveInt = 8
    """Number of rollouts of each sample, whose rewards are compared with each other. 1 takes an advantage that does not
    compare them, such as that of training.algorithm = "ppo"."""
    max_turns: PositiveInt = 8
    """Maximum number of turns (completions) of one rollout."""
    rollout_timeout_s: PositiveFloat = 300.0
    """Time limit of one rollout. It includes the time of its environment and of its running requests, but not of
    requests that queue or are interrupted. At the limit the rollout ends as truncated, with the answers so far."""
    generate_timeout_s: PositiveFloat = 7200.0
    """Time limit of one completion, including interruptions."""
    env_timeout_s: PositiveFloat = 60.0
    """Time limit of one call of the environment."""
    env_in_thread: bool = False
    """Run each environment entirely in its own thread, for coroutines that block and objects bound to a thread. Time
    limits then apply to them. Plain methods run in a thread in any case."""
    num_workers: NonNegativeInt = 0
    """Processes that run groups, for environments or rewards that need much computation, and for more requests than
    one process can send; 0 runs groups in the controller."""
    max_retries: NonNegativeInt = 0
    """Maximum number of retries per group, over all its siblings, after errors other than parse errors; each in a new
    environment."""
