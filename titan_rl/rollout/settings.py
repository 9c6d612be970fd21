"""Settings of the rollout plane: the table [rollout]."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from titan_rl.core.settings import Section


class RolloutConfig(Section):
    """Groups of sibling rollouts and their limits."""

    group_size: int = Field(default=8, ge=2)
    """Rollouts of one sample; each is compared with its siblings."""
    max_turns: PositiveInt = 8
    """Completions of one rollout."""
    rollout_timeout_s: PositiveFloat = 300.0
    """Time that one rollout may use itself: its environment's, and that of its requests while they run, not while they
    queue or are interrupted. It then ends with the answers it has, as truncated."""
    generate_timeout_s: PositiveFloat = 7200.0
    """Longest time of one completion, interruptions included."""
    env_timeout_s: PositiveFloat = 60.0
    """Longest time of one call into the environment."""
    env_in_thread: bool = False
    """Each environment runs in a thread of its own, from its making to its end. For coroutines that block, and objects
    bound to a thread: a time limit then has an effect on them. Plain methods run in a thread anyway."""
    judge_grace_s: NonNegativeFloat = 10.0
    """While generation is paused, rewards being computed have this long; they are then cancelled and begun anew."""
    num_workers: NonNegativeInt = 0
    """Processes that run groups, where environments or scoring take much computing; 0 runs them in the controller."""
    max_retries: NonNegativeInt = 0
    """Siblings of one group that are run again after an error other than of parsing, in fresh environments."""
