"""Turns finished rollouts into training samples. Standard library only.

What holds: a completion token is trained in exactly one sample, in the context it was sampled in; every other token
is masked. As long as each turn's prompt extends the previous prompt and completion, a rollout is one sample. A turn
whose history was edited opens a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.training.data.sample import TrainingSample


def build_samples(group: RolloutGroup, temperature: float, *, oldest_version: int = 0) -> list[TrainingSample]:
    """The samples of every rollout that takes part in training.

    Rollouts that were aborted, ended in a fault that is not the policy's, have no advantage or no completion token
    give none.

    A token's advantage is its rollout's, plus its own where the environment gave one.

    Args:
        temperature: what the completions were sampled with; the loss scores them at the same temperature.
        oldest_version: tokens of earlier versions are context and are not trained; a sample of none but those is left
            out.

    Example: two turns, the second prompt being the first prompt [7, 8], its completion [5, 1] and an answer [9]:

        token_ids = [7, 8, 5, 1, 9, 6, 1]
        loss_mask = [False, False, True, True, False, True, True]

    Raises:
        ValueError: the temperature is not positive; greedy completions have no behaviour distribution to correct for.
            Or a completion has lost rows of its routed experts.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature!r}; completions to train on are sampled at a temperature above 0"
        )
    samples: list[TrainingSample] = []
    for rollout in group.rollouts:
        if rollout.advantage is None or rollout.status.is_fault or rollout.status is RolloutStatus.ABORTED:
            continue
        for turns in _extending_runs(rollout):
            sample = _merge(rollout, turns, rollout.advantage, temperature, oldest_version)
            if sample.num_trained_tokens:
                samples.append(sample)
    return samples


def count_branches(rollout: Rollout) -> int:
    """How many samples a rollout's turns make: 1 as long as each prompt extends what was before it."""
    return sum(1 for _ in _extending_runs(rollout))


def _extending_runs(rollout: Rollout) -> Iterator[list[Turn]]:
    """Longest runs of turns in which each prompt begins with all tokens before it."""
    run: list[Turn] = []
    for turn in rollout.turns:
        if run:
            history = [*run[-1].prompt_token_ids, *run[-1].completion.token_ids]
            if list(turn.prompt_token_ids[: len(history)]) != history:
                yield run
                run = []
        run.append(turn)
    if run:
        yield run


def _merge(
    rollout: Rollout, turns: list[Turn], advantage: float, temperature: float, oldest_version: int
) -> TrainingSample:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    advantages: list[float] = []
    experts: list[Any] = []
    for turn in turns:
        context = turn.prompt_token_ids[len(token_ids) :]
        token_ids += context
        loss_mask += [False] * len(context)
        logprobs += [0.0] * len(context)
        versions += [-1] * len(context)
        advantages += [0.0] * len(context)
        experts += [None] * len(context)
        completion = turn.completion
        token_ids += completion.token_ids
        fresh = [version >= oldest_version for version in completion.versions]
        loss_mask += fresh
        logprobs += [logprob if ok else 0.0 for logprob, ok in zip(completion.logprobs, fresh, strict=True)]
        versions += [version if ok else -1 for version, ok in zip(completion.versions, fresh, strict=True)]
        added = turn.token_advantages or [0.0] * len(fresh)
        rows = [None] * len(fresh) if completion.routed_experts is None else completion.routed_experts
        if len(rows) != len(fresh):
            raise ValueError(
                f"rollout {rollout.rollout_id!r} has a completion of {len(fresh)} tokens with {len(rows)} rows of "
                "routed experts; each token needs its row"
            )
        experts += rows
        advantages += [advantage + own if ok else 0.0 for own, ok in zip(added, fresh, strict=True)]
    return TrainingSample(
        group_id=rollout.group_id,
        rollout_id=rollout.rollout_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        advantages=advantages,
        versions=versions,
        temperature=temperature,
        routed_experts=experts if any(row is not None for row in experts) else None,
    )
