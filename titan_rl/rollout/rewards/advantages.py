"""Advantages: functions that compare the rewards of siblings.

`training.advantage` names one of these, or yours as "module:function"; in code pass it to `Rollouter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.user_code import summary, where
from titan_rl.core.errors import RewardError
from titan_rl.core.plain_data import safe_repr
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.types import float_or_none, sequence_or_none

AdvantageFn = Callable[[Sequence[float]], Sequence[float]]
"""Function from the rewards of siblings to their advantages.  # [num_siblings] -> [num_siblings]"""


def reward(rewards: Sequence[float]) -> list[float]:
    """Plain reward, `A_i = r_i`: REINFORCE without a baseline (Williams, 1992).

    >>> reward([1.0, 0.0])
    [1.0, 0.0]
    """
    return list(rewards)


def zero(rewards: Sequence[float]) -> list[float]:
    """No advantage, `A_i = 0`: the policy learns only from a teacher, and rewards are only recorded.

    >>> zero([1.0, 0.0])
    [0.0, 0.0]
    """
    return [0.0] * len(rewards)


@runtime_checkable
class BatchAdvantage(Protocol):
    """Advantage that also compares a rollout with the rest of its batch."""

    def __call__(self, rewards: Sequence[float]) -> Sequence[float]:
        """Advantages of siblings, before the batch is known."""
        ...

    def compare_batch(self, groups: Sequence[RolloutGroup]) -> None:
        """Complete the advantages of the groups of one task in a batch, in place."""
        ...


class BatchMean:
    """Distance from the mean reward of the batch: REINFORCE with a baseline. The advantage of siblings is their reward.

    A baseline that includes the rollout itself scales the gradient by 1 - 1/n, where n is the number of rollouts of the
    batch.
    """

    __name__ = "batch_mean"

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        return list(rewards)

    def compare_batch(self, groups: Iterable[RolloutGroup]) -> None:
        """Subtract the mean over all groups in place. With several seats, the mean of each role is subtracted."""
        for compared in _by_role(groups).values():
            mean = fmean(rollout.advantage or 0.0 for rollout in compared)
            for rollout in compared:
                rollout.advantage = (rollout.advantage or 0.0) - mean


batch_mean = BatchMean()


@runtime_checkable
class RunningAdvantage(Protocol):
    """Advantage that depends on earlier batches. The object is stateless: its method receives a state, which the run
    keeps and checkpoints contain as JSON. A resumed run restores the state."""

    def __call__(self, rewards: Sequence[float]) -> Sequence[float]:
        """Advantages of siblings, before the batch is known."""
        ...

    def compare_running(self, groups: Sequence[RolloutGroup], state: dict[str, Any]) -> None:
        """Complete the advantages of the groups of one task in a batch, in place, and update the state.

        Args:
            groups: Groups of the task in the batch.
            state: State, which is empty before the first batch.
        """
        ...


class RoleBaseline:
    """Distance from a moving average of the rewards of the rollout's role, `A_i = r_i - b_role`: role-conditioned
    advantage estimation (RAE) of SPIRAL (Liu et al., 2025, arXiv:2506.24119, section 3.3). After each rollout

        b_role = 0.95 * b_role + 0.05 * r_i

    A task has a baseline for each of its roles, or a single one if it has no seats. The advantages of a batch use the
    baselines from before the batch, so that no rollout is part of its own baseline. Those of the first batch use its
    mean.
    """

    __name__ = "role_baseline"
    decay = 0.95

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        return list(rewards)

    def compare_running(self, groups: Sequence[RolloutGroup], state: dict[str, Any]) -> None:
        """Subtract the baselines in place, and update them in the order of the rollouts.

        Args:
            groups: Groups of the task in the batch.
            state: Baseline by role; "" is the role of rollouts without a seat.
        """
        for role, rollouts in _by_role(groups).items():
            rewards = [rollout.advantage or 0.0 for rollout in rollouts]
            baseline = state[role] if role in state else fmean(rewards)
            for rollout, reward in zip(rollouts, rewards, strict=True):
                rollout.advantage = reward - baseline
            for reward in rewards:
                state[role] = self.decay * state.get(role, baseline) + (1 - self.decay) * reward


role_baseline = RoleBaseline()


def group_mean(rewards: Sequence[float]) -> list[float]:
    """Distance from the group's mean, `A_i = r_i - mean(r)`, as in Dr. GRPO (arXiv:2503.20783, section 3.2), which
    also averages losses by a constant: `training.average = "constant"`.

    >>> group_mean([1.0, 0.0, 0.5, 0.5])
    [0.5, -0.5, 0.0, 0.0]
    """
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Distance from the mean of the other siblings, `A_i = r_i - mean(r_j, j != i)`: RLOO (arXiv:2402.14740, eq. 8).

    This is the distance from the group's mean times n / (n - 1). A single rollout has advantage 0.

    >>> leave_one_out([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    count = len(rewards)
    return [distance * count / (count - 1) for distance in group_mean(rewards)] if count > 1 else [0.0] * count


def standardized(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """Distance from the group's mean in units of its standard deviation, as in GRPO (arXiv:2402.03300, section 4.1).

    `A_i = (r_i - mean(r)) / (std(r) + eps)` with the population standard deviation. Siblings that all have the same
    reward teach nothing: their advantages are 0.

    >>> [round(advantage, 3) for advantage in standardized([1.0, 0.0, 1.0, 0.0])]
    [1.0, -1.0, 1.0, -1.0]
    """
    distances = group_mean(rewards)
    std = fmean(distance**2 for distance in distances) ** 0.5 if distances else 0.0
    return [distance / (std + eps) for distance in distances]


def _by_role(groups: Iterable[RolloutGroup]) -> dict[str, list[Rollout]]:
    """Rollouts of a batch that have an advantage, in their order, by role ("" without seats)."""
    roles: dict[str, list[Rollout]] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts if rollout.advantage is not None):
        roles.setdefault(rollout.role or "", []).append(rollout)
    return roles


def compare(group: RolloutGroup, advantage: AdvantageFn) -> None:
    """Fill in the advantages of the siblings that have a reward and did not end in a fault, in place. Each seat is
    compared separately, since seats may have different odds; see `RolloutGroup.compared`.

    Raises:
        RewardError: the function raised, or did not return one finite number per reward.
    """
    name = getattr(advantage, "__name__", type(advantage).__name__)
    for level, rollouts in group.compared.items():
        compared = [rollout for rollout in rollouts if rollout.reward is not None and not rollout.status.is_fault]
        rewards = [rollout.reward for rollout in compared if rollout.reward is not None]
        if not rewards:
            continue
        whose = f"the rewards {rewards} of group {group.group_id!r}" + (f", {level}" if level else "")
        try:
            given = advantage(list(rewards))
            values = list(map(float_or_none, sequence_or_none(given, len(rewards)) or ()))
        except BaseException as error:  # including a CancelledError, which without an await cannot come from the caller
            if is_ctrl_c(error):
                raise
            raise RewardError(f"advantage {name!r} failed on {whose}: {summary(error)}", where(error)) from error
        if len(values) != len(compared) or not all(value is not None and math.isfinite(value) for value in values):
            raise RewardError(
                f"advantage {name!r} returned {safe_repr(given)} for {whose}; it must return as many finite numbers"
            )
        for rollout, value in zip(compared, values, strict=True):
            rollout.advantage = value


def compare_batch(groups: Sequence[RolloutGroup], advantage: AdvantageFn, state: dict[str, Any] | None = None) -> None:
    """Complete the advantages of the groups of one task in a batch, in place, if the advantage compares over batches.

    Args:
        groups: Groups of the task in the batch.
        advantage: Advantage of the task.
        state: State of a `RunningAdvantage`, which is updated in place.

    Raises:
        RewardError: the function raised, or left an advantage that is not finite.
    """
    if not isinstance(advantage, BatchAdvantage | RunningAdvantage):
        return
    name = getattr(advantage, "__name__", type(advantage).__name__)
    try:
        if isinstance(advantage, RunningAdvantage):
            advantage.compare_running(groups, {} if state is None else state)
        else:
            advantage.compare_batch(groups)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise RewardError(f"advantage {name!r} failed on a batch: {summary(error)}", where(error)) from error
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        number = float_or_none(rollout.advantage)
        if rollout.advantage is not None and (number is None or not math.isfinite(number)):
            raise RewardError(
                f"advantage {name!r} assigned {safe_repr(rollout.advantage)} to rollout {rollout.rollout_id!r} of a "
                "batch; it must be a finite number"
            )


BY_NAME: dict[str, AdvantageFn] = {
    "standardized": standardized,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "reward": reward,
    "batch_mean": batch_mean,
    "role_baseline": role_baseline,
    "zero": zero,
}
"""Built-in advantages that `training.advantage` can name."""


def find_advantage(name: str) -> AdvantageFn:
    """Look up the advantage that `training.advantage` names.

    Raises:
        ConfigError: no advantage has that name.
    """
    return find_function("training.advantage", name, BY_NAME)
