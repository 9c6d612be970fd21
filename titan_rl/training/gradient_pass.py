"""Forward and backward passes of a minibatch, up to the averaged and clipped gradient.

On CPUs, several micro-batches are computed at the same time, each in a thread: torch's own threads would split each
small operation, and wait for each other at its end. The gradients are summed in the order of the micro-batches, so the
number of threads does not change the result.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, islice
from typing import NoReturn

import torch
from torch import nn

from titan_rl.core.errors import TrainingError, UntrainableError
from titan_rl.core.tracing.spans import span
from titan_rl.training.objective import Objective, TokenStats
from titan_rl.training.parallel import World, by_mesh, full_tensor
from titan_rl.training.policy import Policy, Reference
from titan_rl.training.settings import TrainingConfig
from titan_rl.training.tensor_batch import Minibatch, TensorBatch


@dataclass(frozen=True, slots=True)
class MinibatchGradient:
    """Results of the passes over a minibatch. The gradients are in the parameters. The results are equal on all ranks,
    except `stats`, which covers this rank's tokens."""

    loss: float
    norm: float  # before clipping
    stats: TokenStats


class GradientPass:
    """Computes the gradient of a minibatch's loss, the mean over the tokens of all ranks, and leaves it in the policy's
    parameters.

    Args:
        reference: Reference model for the KL term of the loss; None if there is no such term.
        num_threads: Micro-batches to compute at the same time, if the policy and the reference allow it.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        objective: Objective,
        training: TrainingConfig,
        world: World,
        *,
        num_threads: int = 1,
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._objective = objective
        self._world = world
        self._parameters = [each for each in policy.model.parameters() if each.requires_grad]
        self._max_grad_norm = training.max_grad_norm
        self._row_tokens = training.row_tokens
        self._taught_share = 1.0  # result of `_count_taught` for the current minibatch
        self._objective_lock = threading.Lock()  # calls of a user's loss must not overlap
        in_threads = all(each.runs_in_threads for each in (policy, reference) if each is not None)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "micro-batch") if in_threads and num_threads > 1 else None

    def proximal_logprobs(self, minibatches: Sequence[Minibatch]) -> dict[int, torch.Tensor]:
        """Logprobs under the weights at the start of the step, by the id() of the micro-batch. Empty if they are not
        needed, or if the forward pass of the update computes them, as with a single minibatch, which uses the same
        weights."""
        if len(minibatches) == 1 or not self._objective.recomputes_proximal:
            return {}
        with span("proximal logprobs", "trainer"), torch.no_grad():
            return {id(b): self._policy.logprobs(b)[0] for minibatch in minibatches for b in minibatch.batches}

    def run(self, minibatch: Minibatch, proximal: dict[int, torch.Tensor], *, version: int) -> MinibatchGradient:
        """Run all micro-batches of a minibatch, and sum the gradients over the ranks. All ranks call this at the same
        time.

        Args:
            proximal: Result of `proximal_logprobs` for the step.
            version: Version of the weights at the start of the step.

        Raises:
            UntrainableError: No token can be trained on, or the loss or the gradient is not finite; raised on all
                ranks.
        """
        self._taught_share = self._count_taught(minibatch)
        by_batch = self._accumulate(minibatch.batches, proximal, version)
        loss, denominator = self._mean(by_batch, minibatch)
        norm = average_and_clip(self._parameters, denominator, self._max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._refuse(minibatch, f"step {version + 1} has loss {loss} and gradient norm {norm}", by_batch)
        return MinibatchGradient(loss, norm, TokenStats.concatenate(by_batch))

    @torch.no_grad()
    def measure(self, minibatch: Minibatch, *, version: int) -> float:
        """Compute only the loss, without gradients. All ranks call this at the same time.

        Raises:
            UntrainableError: No token contributes to the loss.
            TrainingError: The loss is not finite.
        """
        self._taught_share = self._count_taught(minibatch)
        by_batch = [self._forward(batch, None, version)[1] for batch in minibatch.batches]
        loss, _ = self._mean(by_batch, minibatch)
        if not math.isfinite(loss):
            raise TrainingError(f"the loss of {minibatch.num_samples} samples that are not trained is {loss}")
        return loss

    def _count_taught(self, minibatch: Minibatch) -> float:
        """Denominator of the loss divided by the number of tokens that a teacher has scored, both over all ranks; 1
        without such tokens."""
        if not self._objective.distills:
            return 1.0
        counts = [self._objective.counts(batch) for batch in minibatch.batches]
        denominator, scored = self._world.sum([sum(each[i] for each in counts) for i in range(2)])
        return denominator / scored if scored else 1.0

    def _mean(self, by_batch: Sequence[TokenStats], minibatch: Minibatch) -> tuple[float, float]:
        """Mean loss over the tokens of all ranks, and its denominator."""
        summed, denominator = self._world.sum(
            [
                float(torch.cat([stats.loss_M for stats in by_batch]).sum()) if by_batch else 0.0,
                sum(float(stats.denominator) for stats in by_batch),
            ]
        )
        if not denominator:
            self._refuse(
                minibatch,
                f"none of {minibatch.num_samples} samples has a token to train on: {minibatch.num_dropped} are longer "
                f"than training.row_tokens ({self._row_tokens}), the others have no finite behaviour logprob",
            )
        return summed / denominator, denominator

    def _refuse(self, minibatch: Minibatch, reason: str, by_batch: Sequence[TokenStats] = ()) -> NoReturn:
        """Raise an `UntrainableError` that names the rollouts of all ranks, and those with a token whose loss is not
        finite. All ranks call this."""
        at_fault: list[str] = []
        for batch, stats in zip(minibatch.batches, by_batch, strict=False):
            sequences_M = batch.sequences_N[stats.valid_N]
            at_fault += [batch.rollout_ids[number] for number in sequences_M[~stats.loss_M.isfinite()].unique()]
        by_rank = self._world.gather((minibatch.rollout_ids, at_fault))
        rollout_ids, at_fault = (list(dict.fromkeys(chain(*lists))) for lists in zip(*by_rank, strict=True))
        raise UntrainableError(reason, rollout_ids, at_fault)

    def _accumulate(
        self, batches: Sequence[TensorBatch], proximal: dict[int, torch.Tensor], version: int
    ) -> list[TokenStats]:
        """Add up the gradients of the micro-batches' summed losses. The caller divides them once the tokens of the
        whole batch are counted."""
        by_batch: list[TokenStats] = []
        if self._threads is None or len(batches) == 1:
            for batch in batches:
                summed, stats = self._forward(batch, proximal.get(id(batch)), version)
                summed.backward()
                by_batch.append(stats)
            return by_batch
        # At most as many batches are submitted as there are threads, because each result is as large as the model.
        submitted = (
            self._threads.submit(self._gradient_of, batch, proximal.get(id(batch)), version) for batch in batches
        )
        running = deque(islice(submitted, self._num_threads))
        try:
            while running:
                gradients, stats = running.popleft().result()
                for parameter, gradient in zip(self._parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                by_batch.append(stats)
                running.extend(islice(submitted, 1))
        finally:
            wait(running)  # after an error the weights may change, so no thread may still read them
        return by_batch

    def _gradient_of(
        self,
        batch: TensorBatch,
        proximal_N: torch.Tensor | None,
        version: int,
    ) -> tuple[list[torch.Tensor | None], TokenStats]:
        """Gradient of one micro-batch's summed loss, in the order of the parameters."""
        summed, stats = self._forward(batch, proximal_N, version)
        gradients = torch.autograd.grad(summed, self._parameters, allow_unused=True)
        return [None if gradient is None else gradient.contiguous() for gradient in gradients], stats

    def _forward(
        self, batch: TensorBatch, proximal_N: torch.Tensor | None, version: int
    ) -> tuple[torch.Tensor, TokenStats]:
        """Summed loss of a micro-batch, and the statistics of its tokens."""
        reference_N = None
        if self._reference is not None:
            with torch.no_grad():
                reference_N, _ = self._reference.logprobs(batch)
        taught_NK = None
        if self._objective.distills and batch.teacher is not None:
            logprobs_NJ, entropies_N = self._policy.logprobs_of(batch, batch.teacher.ids_NK)
            logprobs_N, taught_NK = logprobs_NJ[:, 0], logprobs_NJ[:, 1:]
        else:
            logprobs_N, entropies_N = self._policy.logprobs(batch)
        with self._objective_lock:
            return self._objective(
                batch,
                logprobs_N,
                entropies_N,
                version=version,
                proximal_logprobs_N=proximal_N,
                reference_logprobs_N=reference_N,
                taught_logprobs_NK=taught_NK,
                taught_share=self._taught_share,
            )


def average_and_clip(parameters: Sequence[nn.Parameter], denominator: float, max_norm: float) -> float:
    """Divide the gradients by the denominator in place, and scale them down to `max_norm` if their total norm is then
    larger. All ranks call this at the same time.

    Returns:
        The total norm before clipping.
    """
    norms: list[torch.Tensor] = []
    groups = by_mesh(parameter for parameter in parameters if parameter.grad is not None)
    for group in groups:
        gradients = [parameter.grad for parameter in group if parameter.grad is not None]
        torch._foreach_div_(gradients, denominator)
        # In float32: a sum of squares in bfloat16 is off by percents if there are many of them.
        of_each = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norms.append(full_tensor(torch.nn.utils.get_total_norm(of_each)))
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return float(norm)
