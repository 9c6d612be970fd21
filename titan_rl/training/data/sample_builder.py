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
from titan_rl.types import SamplingParams

UNSHAPED = SamplingParams(max_tokens=1)
"""Its `top_p`, `top_k`, `min_p` and `min_tokens` leave every token its probability, as the loss takes for granted."""


def build_samples(
    group: RolloutGroup, temperature: float | None = None, *, oldest_version: int = 0
) -> list[TrainingSample]:
    """The samples of every rollout that takes part in training.

    Rollouts that were aborted, ended in a fault that is not the policy's, have no advantage or no completion token
    give none.

    A token's advantage is its rollout's, plus its own where the environment gave one.

    Args:
        temperature: of turns that do not say how they were sampled. The others have it in `Turn.sampling`, where it may
            differ from turn to turn: the loss scores each token at the temperature that it was sampled at.
        oldest_version: tokens of earlier versions are context and are not trained; a sample of none but those is left
            out.

    Example: two turns, the second prompt being the first prompt [7, 8], its completion [5, 1] and an answer [9]:

        token_ids = [7, 8, 5, 1, 9, 6, 1]
        loss_mask = [False, False, True, True, False, True, True]

    Raises:
        ValueError: names the rollout and the setting. A turn was sampled in a way that the loss cannot account for: at
            temperature 0, so that there is no behaviour distribution to correct for, or with tokens left out by
            `top_p`, `top_k`, `min_p` or `min_tokens`. Or it does not say how it was sampled, and neither does
            `temperature`; or the two differ. Or a completion has lost rows of its routed experts.
    """
    if temperature is not None and not temperature > 0:
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
    rollout: Rollout, turns: list[Turn], advantage: float, temperature: float | None, oldest_version: int
) -> TrainingSample:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    advantages: list[float] = []
    temperatures: list[float] = []
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
        temperatures += [0.0] * len(context)
        temperatures += [_temperature_of(turn, rollout, temperature)] * len(fresh) if any(fresh) else [0.0] * len(fresh)
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
    trained_at = {value for value, trained in zip(temperatures, loss_mask, strict=True) if trained}
    return TrainingSample(
        group_id=rollout.group_id,
        rollout_id=rollout.rollout_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        advantages=advantages,
        versions=versions,
        temperature=trained_at.pop() if len(trained_at) == 1 else temperatures,
        routed_experts=experts if any(row is not None for row in experts) else None,
    )


def _temperature_of(turn: Turn, rollout: Rollout, otherwise: float | None) -> float:
    """What a turn was sampled at, so that its tokens can be trained."""
    turn_of = f"turn {turn.completion.request_id!r} of rollout {rollout.rollout_id!r}"
    if turn.sampling is None:
        if otherwise is None:
            raise ValueError(
                f"{turn_of} does not say how it was sampled; give the Turn its sampling, or build_samples a temperature"
            )
        return otherwise
    for name in ("top_p", "top_k", "min_p", "min_tokens"):
        if (value := getattr(turn.sampling, name)) != (unshaped := getattr(UNSHAPED, name)):
            raise ValueError(
                f"{turn_of} was sampled with {name} = {value!r}, which the loss cannot account for; sample with "
                f"{name} = {unshaped!r} what is trained on"
            )
    own = turn.sampling.temperature
    if not own > 0:
        raise ValueError(
            f"{turn_of} was sampled with temperature = {own!r}; sample above 0 what is trained on, since greedy "
            "completions have no behaviour distribution"
        )
    if otherwise is not None and otherwise != own:
        raise ValueError(
            f"{turn_of} was sampled with temperature = {own!r}, and build_samples was given {otherwise!r}; leave it out"
        )
    return own
