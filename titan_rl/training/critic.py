"""Critic of a policy: the value of each state, from which PPO computes advantages, and its own optimizer step.

The value is a linear function of the last hidden state of a trunk:

    V(s) = w . h(s) + b,    s the tokens up to and including a position

The trunk is either a separate model, trained for the value, or the policy. The policy learns nothing from the value:
its hidden states are constants then. Values, advantages (`titan_rl.training.gae`) and targets are computed with the
weights at the start of a step. Then, for each minibatch, the critic minimizes

    1/2 * max((V - target)^2, (V_clip - target)^2) / K,    V_clip = V_old + clamp(V - V_old, -clip, clip)

with K the number of actions in the minibatch, over all ranks. Source: the clipped value loss of PPO's implementation
(Engstrom et al., 2020, arXiv:2005.12729, section 3), which has no effect on the first update of a step.

Weights, gradients and moments of the trunk are sharded like the policy's; every rank has w and b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from titan_rl.core.errors import TrainingError, UntrainableError
from titan_rl.core.tracing.spans import span
from titan_rl.training.choices import GAEOver
from titan_rl.training.gae import AdvantageEstimate, estimate
from titan_rl.training.gradient_pass import average_and_clip
from titan_rl.training.optimizer.optimizers import Optimizers
from titan_rl.training.optimizer.registry import OptimizerSpec
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import TrainingConfig
from titan_rl.training.state.train_state import Trained
from titan_rl.training.tensor_batch import Minibatch, TensorBatch

CLIP = 0.2
"""Largest change of a value in one step that the value loss rewards."""

LEAST_STD = 1e-6
"""Added to the standard deviation that advantages are divided by."""


class ValueHead(nn.Module):
    """Value of a state as a linear function of its hidden state. The initial function is 0.

    Args:
        size: Entries of a hidden state.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Values of states, in float32.  # [M]"""
        with torch.autocast(hidden_MD.device.type, enabled=False):
            return F.linear(hidden_MD.float(), self.weight, self.bias).squeeze(-1)


@dataclass(frozen=True, slots=True)
class _Valued:
    """A micro-batch with the values of its states at the start of the step."""

    batch: TensorBatch
    values_N: NDArray[np.float64]  # of the states before its trained tokens
    last_values_S: NDArray[np.float64]  # of the last states of its samples
    hidden_ND: torch.Tensor | None  # hidden states of the policy, if the policy is the trunk

    @property
    def last_values(self) -> dict[str, float]:
        """Value of the last state of each truncated rollout that ends here, by rollout id."""
        if (episodes := self.batch.episodes) is None:
            return {}
        ended = np.flatnonzero(episodes.is_truncated_S & episodes.ends_rollout_S)
        return {self.batch.rollout_ids[index]: float(self.last_values_S[index]) for index in ended}


@dataclass(frozen=True, slots=True)
class _Judged(_Valued):
    """A micro-batch with the advantages of its trained tokens, and the targets of its values."""

    estimate: AdvantageEstimate


class Critic:
    """Value function of a policy.

    Args:
        trunk: Model that computes the hidden states: with `training.critic = "head"` the policy, otherwise a model that
            begins with the policy's weights, and is trained.
    """

    def __init__(self, trunk: Policy, world: World, training: TrainingConfig) -> None:
        self._trunk = trunk
        self._world = world
        self._gamma, self._lam = training.gae
        self._over: GAEOver = training.gae_over
        self._epochs = training.critic_epochs
        self._max_grad_norm = training.max_grad_norm
        self._relative_lr = training.critic_peak_lr / training.peak_lr
        self._head = ValueHead(trunk.hidden_size, trunk.device)
        spec = OptimizerSpec(training.critic_peak_lr, betas=training.betas, weight_decay=training.weight_decay)
        self._modules: dict[str, nn.Module] = {"head": self._head}
        self._optimizers = {"head": Optimizers(self._head, "adamw", spec)}  # muon needs matrices
        if training.critic == "model":
            spec = replace(spec, state_dtype=training.optimizer_dtype, offload=training.offloads_moments)
            self._modules["trunk"] = trunk.model
            self._optimizers["trunk"] = Optimizers(trunk.model, training.optimizer, spec)
        self._judged: dict[int, _Judged] = {}  # micro-batches of the current step, by their id()

    @property
    def _trains_trunk(self) -> bool:
        return "trunk" in self._modules

    @property
    def state(self) -> Mapping[str, Trained]:
        """Modules and optimizers that a checkpoint holds, by name."""
        return {f"critic_{name}": (each, self._optimizers[name].parts) for name, each in self._modules.items()}

    def judge(self, minibatches: Sequence[Minibatch]) -> tuple[list[Minibatch], dict[str, float]]:
        """Compute the values of a step's states and, from them and the rewards, the advantages of its tokens. All ranks
        call this at the same time.

        Advantages are standardized over the tokens of all ranks. Advantages that the tokens already have, such as those
        from a teacher, are added to the result.

        Returns:
            The minibatches with these advantages, and the metric `explained_variance`: 1 minus the variance of target -
            value over that of the targets; absent where all targets are the same.

        Raises:
            TrainingError: The samples have no rewards.
        """
        with span("values", "trainer"), torch.no_grad():
            valued = [[self._evaluate(batch) for batch in minibatch.batches] for minibatch in minibatches]
        # Samples of one rollout may be in several micro-batches, and on several ranks.
        own_lasts = {name: value for each in chain(*valued) for name, value in each.last_values.items()}
        lasts = {name: value for given in self._world.gather(own_lasts) for name, value in given.items()}
        judged = [[self._judge(each, lasts) for each in own] for own in valued]
        every = [each for own in judged for each in own]
        count, mean, std = self._spread([each.estimate.advantages_N for each in every])
        self._judged = {}
        given: list[Minibatch] = []
        for minibatch, own in zip(minibatches, judged, strict=True):
            batches: list[TensorBatch] = []
            for each in own:
                standardized_N = (each.estimate.advantages_N - mean) / (std + LEAST_STD)
                added_N = torch.from_numpy(standardized_N).to(each.batch.advantages_N)
                batches.append(replace(each.batch, advantages_N=each.batch.advantages_N + added_N))
                self._judged[id(batches[-1])] = replace(each, batch=batches[-1])
            given.append(replace(minibatch, batches=batches))
        targets = [each.estimate.targets_N[each.estimate.acts_N] for each in every]
        errors = [(each.estimate.targets_N - each.values_N)[each.estimate.acts_N] for each in every]
        (_, _, target_std), (_, _, error_std) = self._spread(targets), self._spread(errors)
        metrics = {"explained_variance": 1 - (error_std / target_std) ** 2} if count and target_std > LEAST_STD else {}
        return given, metrics

    def _evaluate(self, batch: TensorBatch) -> _Valued:
        episodes, size = batch.episodes, batch.num_trained
        if size and episodes is None:
            raise TrainingError("the samples have no rewards (TrainingSample.episode), from which a critic learns")
        positions_M = batch.predictors_N
        if episodes is not None:
            positions_M = torch.cat([positions_M, torch.from_numpy(episodes.lasts_S).to(positions_M)])
        hidden_MD = self._trunk.states(self._seen(batch), positions_M)
        values_M = self._head(hidden_MD).double().cpu().numpy()
        return _Valued(batch, values_M[:size], values_M[size:], None if self._trains_trunk else hidden_MD[:size])

    def _judge(self, valued: _Valued, lasts: Mapping[str, float]) -> _Judged:
        """Estimate the advantages of a micro-batch.

        Args:
            lasts: Value of the last state of each truncated rollout. It is 0 if that state is in no sample, because
                no token of the rollout's last turns is trained.
        """
        batch, episodes = valued.batch, valued.batch.episodes
        if episodes is None:
            nothing = np.zeros(0)
            made = AdvantageEstimate(nothing, nothing, np.zeros(0, bool))
        else:
            last_values_S = np.array([lasts.get(rollout_id, 0.0) for rollout_id in batch.rollout_ids])
            made = estimate(
                episodes.rewards_N,
                valued.values_N,
                np.where(episodes.is_truncated_S, last_values_S, 0.0),
                batch.sequences_N.cpu().numpy(),
                episodes.turns_N,
                gamma=self._gamma,
                lam=self._lam,
                over=self._over,
            )
        return _Judged(batch, valued.values_N, valued.last_values_S, valued.hidden_ND, made)

    def _seen(self, batch: TensorBatch) -> TensorBatch:
        """Return the batch without the policy's choice of experts if the trunk is another model, which chooses its
        own."""
        return replace(batch, experts_BLRK=None) if self._trains_trunk else batch

    def update(self, minibatch: Minibatch, lr: float) -> float:
        """Fit the values to their targets, in `training.critic_epochs` optimizer steps. All ranks call this at the same
        time.

        Args:
            minibatch: A minibatch that `judge` returned. Each can be passed only once.
            lr: Current learning rate of the policy. The critic's learning rate is proportional to it.

        Returns:
            The loss before the first of these steps.

        Raises:
            UntrainableError: The loss or the gradient is not finite; raised on all ranks. If this happens in the first
                step, nothing has changed.
        """
        judged = [self._judged.pop(id(batch)) for batch in minibatch.batches]  # popped, so that the update frees them
        (count,) = self._world.sum([float(sum(each.estimate.acts_N.sum() for each in judged))])
        losses: list[float] = []
        try:
            for _ in range(self._epochs if count else 0):
                with span("critic", "trainer"):
                    losses.append(self._accumulate(judged, count))
                    self._sum_gradients_of_head()
                    parameters = [each for module in self._modules.values() for each in module.parameters()]
                    norm = average_and_clip(parameters, count, self._max_grad_norm)
                    if not (math.isfinite(losses[-1]) and math.isfinite(norm)):
                        rollout_ids = [*chain(*self._world.gather(minibatch.rollout_ids))]
                        raise UntrainableError(f"the critic has loss {losses[-1]}, gradient norm {norm}", rollout_ids)
                    for optimizers in self._optimizers.values():
                        optimizers.step(lr * self._relative_lr)
                        optimizers.zero_grad()
        finally:
            for optimizers in self._optimizers.values():
                optimizers.zero_grad()
        return losses[0] if losses else 0.0

    def _accumulate(self, judged: Sequence[_Judged], count: float) -> float:
        """Add up the gradients of the summed loss, and return the mean over all ranks."""
        total = 0.0
        for each in judged:
            summed = self._loss(each)
            summed.backward()
            total += float(summed.detach())
        (total,) = self._world.sum([total])
        return total / count

    def _loss(self, judged: _Judged) -> torch.Tensor:
        batch = judged.batch
        hidden_ND = judged.hidden_ND
        if hidden_ND is None:
            hidden_ND = self._trunk.states(self._seen(batch), batch.predictors_N)
        acts_K = torch.from_numpy(judged.estimate.acts_N.nonzero()[0]).to(hidden_ND.device)
        values_K = self._head(hidden_ND)[acts_K]
        old_K = torch.from_numpy(judged.values_N).to(values_K)[acts_K]
        targets_K = torch.from_numpy(judged.estimate.targets_N).to(values_K)[acts_K]
        clipped_K = old_K + (values_K - old_K).clamp(-CLIP, CLIP)
        return 0.5 * torch.maximum((values_K - targets_K).square(), (clipped_K - targets_K).square()).sum()

    def _sum_gradients_of_head(self) -> None:
        """Sum the gradients of w and b over the ranks. FSDP sums those of the trunk."""
        own: list[Any] = [each.grad for each in self._head.parameters()]
        flat = self._world.sum(torch.cat([each.flatten() for each in own]).tolist())
        for each, part in zip(own, torch.tensor(flat).split([each.numel() for each in own]), strict=True):
            each.copy_(part.view_as(each))

    def _spread(self, values: Sequence[NDArray[np.float64]]) -> tuple[float, float, float]:
        """Number, mean and standard deviation of the values of all ranks."""
        own = np.concatenate([*values, np.zeros(0)])
        count, total = self._world.sum([float(len(own)), float(own.sum())])
        mean = total / count if count else 0.0
        (squares,) = self._world.sum([float(np.square(own - mean).sum())])
        return count, mean, math.sqrt(squares / count) if count else 0.0
