"""Building of training samples from the finished rollouts of a batch. Imports no torch.

Invariant: a completion token is trained in exactly one sample, in the context in which it was sampled; every other
token is masked. As long as each turn's prompt extends the previous prompt and completion, a rollout is one sample. A
turn whose history was edited begins a new sample.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titan_rl.core.arrays import (
    LOGPROBS,
    TOKENS,
    VERSIONS,
    ExpertRows,
    MaskArray,
    NumberArray,
    expert_rows,
    free_rows,
    joined_rows,
    logprob_array,
    token_array,
)
from titan_rl.core.errors import RewardError
from titan_rl.rollout.rewards.advantages import AdvantageFn, RunningAdvantage, compare_batch
from titan_rl.rollout.shared_tokens import extends
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.training.choices import Constrained, DistillKind
from titan_rl.training.data.sample import SampleRewards, TrainingSample
from titan_rl.training.losses import MAX_LOG_RATIO
from titan_rl.types import Completion, PromptScores, SamplingParams, float_or_none

UNSHAPED = SamplingParams(max_tokens=1)
"""Sampling parameters that do not change the probabilities of tokens, as the loss requires."""


class SampleMaker:
    """Makes the samples of a batch. The advantages within each group have been computed before; see `Rollouter`.

    Args:
        advantages: Advantage function of each task, by the task's name.
        constrained: Treatment of tokens sampled under a constraint; see `build_samples`.
        distillation: Use of the teacher's scores; see `build_samples`.
        episodes: Placement of the rewards of each task, by its name, if a critic computes advantages from them; see
            `build_samples`.
        max_token_age: Largest age of a trained token, in versions. By default, there is no limit.
        state: Result of an earlier call of `state`. By default, the state of a new run.

    Example: `SampleMaker({"sums": batch_mean}).samples(batch.groups, version=12)`
    """

    def __init__(
        self,
        advantages: Mapping[str, AdvantageFn] | None = None,
        *,
        constrained: Constrained = "masked",
        distillation: Distillation | None = None,
        episodes: Mapping[str, RewardPlacement] | None = None,
        max_token_age: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._advantages = advantages or {}
        self._constrained: Constrained = constrained
        self._distillation = distillation
        self._episodes = episodes or {}
        self._max_token_age = max_token_age
        self._states: dict[str, dict[str, Any]] = _json_copy(state or {})  # state of running advantages, by task

    def state(self) -> dict[str, Any]:
        """State of the advantages that depend on earlier batches, by task, as JSON values.

        Raises:
            RewardError: The state of an advantage cannot be written as JSON.
        """
        return _json_copy(self._states)

    def samples(self, groups: Iterable[RolloutGroup], version: int) -> list[TrainingSample]:
        """Training samples of a batch. Advantages over the whole batch are computed first, in place.

        Args:
            version: Policy version that the batch is trained from.

        Raises:
            RewardError: An advantage failed.
        """
        groups = list(groups)
        for task, advantage in self._advantages.items():
            state = self._states.setdefault(task, {}) if isinstance(advantage, RunningAdvantage) else None
            compare_batch([group for group in groups if group.task == task], advantage, state)
        oldest = 0 if self._max_token_age is None else version - self._max_token_age
        return [
            sample
            for group in groups
            for sample in build_samples(
                group,
                oldest_version=oldest,
                constrained=self._constrained,
                distillation=self._distillation,
                episodes=self._episodes.get(group.task),
            )
        ]


def _json_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RewardError(f"the state of an advantage, {state!r}, cannot be written as JSON: {error}") from error


def build_samples(
    group: RolloutGroup,
    temperature: float | None = None,
    *,
    oldest_version: int = 0,
    constrained: Constrained = "masked",
    distillation: Distillation | None = None,
    episodes: RewardPlacement | None = None,
) -> list[TrainingSample]:
    """Build the samples of a group's rollouts.

    Rollouts that were aborted, that ended in a fault that is not the policy's, or that have no advantage or no
    completion token give no samples.

    A token's advantage is that of its rollout, plus its own if the environment gave one.

    Args:
        temperature: Temperature of turns without `Turn.sampling`. Other turns record their own, which may differ
            between turns: the loss scores each token at the temperature at which it was sampled.
        oldest_version: Oldest version whose tokens are trained. Tokens of earlier versions are only context, and a
            sample without other tokens is left out.
        constrained: Treatment of tokens that were sampled under a constraint that excluded other tokens, that is, with
            `Completion.allowed_logprobs` below 0. The behaviour logprob of such a token is always that of the policy
            without the constraint, so that ratios compare like with like.

            masked               context, and not trained
            trained              like any other token. This is biased, because they are not the policy's own choice
            corrected            each token of the rollout is weighted by the probability of its constrained tokens
                                 under the policy divided by that under the constraint, prod_t Z_t. The expected
                                 gradient is that of the unconstrained policy, over the texts that are allowed
            corrected_by_token   each constrained token is weighted by its own Z_t: improbable texts count for more, and
                                 the contexts keep the distribution of the constrained sampler

            where Z_t <= 1 is the probability that the policy gives to the tokens allowed at t.
        distillation: Use of the teacher's scores (`Turn.teacher`). By default, they are left out.
        episodes: Placement of the rewards for a critic, which then computes the advantages; the advantage of a rollout
            must be the sum of its rewards. By default, there is no critic.

    Example: two turns, the second prompt being the first prompt [7, 8], its completion [5, 1] and an answer [9]:

        token_ids = [7, 8, 5, 1, 9, 6, 1]
        loss_mask = [False, False, True, True, False, True, True]

    Raises:
        ValueError: The loss cannot account for the sampling of a turn: the temperature was 0, so there is no behaviour
            distribution, or `top_p`, `top_k`, `min_p` or `min_tokens` excluded tokens, or penalties or biases changed
            their probabilities. Or a turn was sampled under a constraint, but has no `allowed_logprobs`. Or neither the
            turn nor `temperature` gives a temperature, or they differ. Or a completion lacks rows of its routed
            experts. The message names the rollout and the setting.
    """
    if temperature is not None:
        value = float_or_none(temperature)
        if value is None or not 0 < value < math.inf:
            raise ValueError(
                f"temperature is {temperature!r}; completions to train on are sampled at a finite temperature above 0"
            )
        temperature = value
    if not isinstance(oldest_version, int) or isinstance(oldest_version, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"oldest_version is {oldest_version!r}; it must be an integer")
    samples: list[TrainingSample] = []
    for rollout in group.rollouts:
        if rollout.advantage is None or rollout.status.is_fault or rollout.status is RolloutStatus.ABORTED:
            continue
        treatment = _Treatment(
            constrained=constrained,
            weight=_rollout_weight(rollout) if constrained == "corrected" else 1.0,
            distillation=distillation or Distillation(),
            advantage=rollout.advantage if episodes is None else 0.0,
            temperature=temperature,
            oldest_version=oldest_version,
        )
        num_turns = 0
        for turns in extending_runs(rollout):
            tokens = _SampleTokens(rollout, treatment)
            for turn in turns:
                tokens.add(turn)
            sample = tokens.sample()
            num_turns += len(turns)
            if episodes is not None:
                sample = replace(sample, episode=episodes.place(rollout, turns, num_turns))
            if sample.num_trained_tokens:
                samples.append(sample)
    return samples


def count_branches(rollout: Rollout) -> int:
    """Number of samples of a rollout: 1 as long as each prompt extends the tokens before it."""
    return sum(1 for _ in extending_runs(rollout))


@dataclass(frozen=True, slots=True)
class Distillation:
    """Use of a teacher's scores in samples.

    Args:
        kind: "sampled" adds `coef * (log pi_T(t) - log pi_b(t))` to the advantage of each scored token. This is the
            negated estimate of the reverse KL divergence on the sampled token, so the policy gradient lowers the
            divergence. "forward" and "reverse" put the teacher's top tokens into the samples, for a term of the
            loss.
        coef: Weight of the distillation; 0 leaves the scores out.
    """

    kind: DistillKind = "sampled"
    coef: float = 0.0


@dataclass(frozen=True, slots=True)
class RewardPlacement:
    """Placement of a rollout's rewards at its tokens, for a critic.

    A reward that the environment gives in a turn is placed at the last token of the turn, and the rest of the rollout's
    reward at the last token of the rollout. If a rollout continues in another sample, because its history was edited,
    the later rewards are placed at the end of the earlier sample.

    A truncated rollout has not earned its final reward: only rewards of turns are placed, and the value of its last
    state replaces the rewards that would have followed, in all of its samples.

    Args:
        weights: Weights of the environment's rewards in the reward of a rollout, by name.
        truncation_ends: Whether truncation ends an episode, so that truncated rollouts have their own final reward.
    """

    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    truncation_ends: bool = False

    def place(self, rollout: Rollout, turns: Sequence[Turn], num_turns: int) -> SampleRewards:
        """Place the rewards of a sample at its tokens.

        Args:
            turns: Turns of the sample.
            num_turns: Number of turns of the rollout up to the end of this sample.
        """
        rewards, numbers = array(LOGPROBS), array(VERSIONS)
        for number, turn in enumerate(turns):
            context = len(turn.prompt_token_ids) - len(rewards)
            num_tokens = len(turn.completion.token_ids)
            rewards += array(LOGPROBS, (0.0,)) * (context + num_tokens)
            numbers += array(VERSIONS, (-1,)) * context + array(VERSIONS, (number,)) * num_tokens
            rewards[-1] += self._of(turn)
        is_truncated = rollout.status.is_truncated and not self.truncation_ends
        earned = sum(map(self._of, rollout.turns)) if is_truncated else rollout.advantage or 0.0
        rewards[-1] += earned - sum(map(self._of, rollout.turns[:num_turns]))
        ends_rollout = num_turns == len(rollout.turns)
        return SampleRewards(NumberArray(rewards), NumberArray(numbers), is_truncated, ends_rollout)

    def _of(self, turn: Turn) -> float:
        return sum(weight * turn.rewards.get(name, 0.0) for name, weight in self.weights.items())


@dataclass(frozen=True, slots=True)
class _Treatment:
    """Treatment of the tokens of a rollout.

    Args:
        weight: Loss weight of every token of the rollout.
        advantage: Advantage of every token of the rollout, to which that of the token itself is added.
        temperature: Temperature of turns that do not record their own.
        oldest_version: Oldest version whose tokens are trained.
    """

    constrained: Constrained
    weight: float
    distillation: Distillation
    advantage: float
    temperature: float | None
    oldest_version: int

    def advantages_of(self, turn: Turn) -> array[float]:
        """Advantage of each token.  # [num_tokens]"""
        advantages = array(LOGPROBS, (self.advantage,)) * len(turn.completion.token_ids)
        for index, own in enumerate(turn.token_advantages or ()):
            advantages[index] = self.advantage + own
        if turn.teacher is not None and self.distillation.coef and self.distillation.kind == "sampled":
            pairs = zip(turn.teacher.logprobs, _policy_logprobs(turn.completion), strict=False)
            for index, (taught, own) in enumerate(pairs):
                advantages[index] += self.distillation.coef * max(taught - own, -MAX_LOG_RATIO)
        return advantages

    def scores_of(self, turn: Turn) -> PromptScores | None:
        """Return the teacher's scores of a turn if the loss needs them, otherwise None."""
        has_term = self.distillation.coef and self.distillation.kind != "sampled"
        return turn.teacher if has_term and turn.teacher is not None and turn.teacher.top_k else None

    def weights_of(self, completion: Completion) -> array[float]:
        """Loss weight of each token.  # [num_tokens]"""
        allowed = completion.allowed_logprobs
        if allowed is not None and self.constrained == "corrected_by_token":
            return array(LOGPROBS, map(math.exp, allowed))
        return array(LOGPROBS, (self.weight,)) * len(completion.token_ids)

    def left_out(self, completion: Completion) -> list[int]:
        """Indices of the tokens that are not trained."""
        if self.constrained != "masked":
            return []
        return [index for index, allowed in enumerate(completion.allowed_logprobs or ()) if allowed < 0]


def _rollout_weight(rollout: Rollout) -> float:
    """Probability of a rollout's constrained tokens under the policy, divided by that under their constraints."""
    return math.exp(sum(sum(turn.completion.allowed_logprobs or ()) for turn in rollout.turns))


def extending_runs(rollout: Rollout) -> Iterator[list[Turn]]:
    """Longest runs of turns in which each prompt begins with all tokens before it."""
    run: list[Turn] = []
    for turn in rollout.turns:
        if run and not extends(run[-1], turn):
            yield run
            run = []
        run.append(turn)
    if run:
        yield run


# Weights are compared as bytes, which is many times as fast as one by one.
_ONE = array(LOGPROBS, (1.0,)).tobytes()


class _SampleTokens:
    """Accumulator of the tokens of a sample's turns."""

    def __init__(self, rollout: Rollout, treatment: _Treatment) -> None:
        self._rollout = rollout
        self._treatment = treatment
        self._token_ids = array(TOKENS)
        self._weights = array(LOGPROBS)
        self._loss_mask = bytearray()
        self._logprobs = array(LOGPROBS)
        self._advantages = array(LOGPROBS)
        self._versions = array(VERSIONS)
        self._temperatures: list[tuple[float, int]] = []  # each with its number of tokens
        self._trained_at: set[float] = set()
        self._experts: list[ExpertRows | int] = []  # an int is a number of tokens for which the router chooses
        self._scores: list[tuple[int, PromptScores]] = []  # each with the position of its first token

    def add(self, turn: Turn) -> None:
        """Add the tokens between the turns before and this turn's completion, and those of the completion."""
        completion, treatment = turn.completion, self._treatment
        context = token_array(turn.prompt_token_ids[len(self._token_ids) :])
        self._token_ids.extend(context.array())
        self._add_untrained(len(context))
        self._temperatures.append((0.0, len(context)))
        self._experts.append(len(context))

        oldest, sampled_at = treatment.oldest_version, 0.0
        if any(span.version >= oldest and span.num_tokens for span in completion.version_spans):
            sampled_at = _temperature_of(turn, self._rollout, treatment.temperature)
        num_tokens, experts = len(completion.token_ids), completion.routed_experts
        if experts is not None and len(experts) != num_tokens:
            raise ValueError(
                f"rollout {self._rollout.rollout_id!r} has a completion of {num_tokens} tokens with {len(experts)} "
                "rows of routed experts; each token needs a row"
            )
        self._token_ids.extend(token_array(completion.token_ids).array())
        logprobs, begin = _policy_logprobs(completion), 0
        weights, first = treatment.weights_of(completion), len(self._loss_mask)
        advantages = treatment.advantages_of(turn)
        if (scores := treatment.scores_of(turn)) is not None:
            self._scores.append((first, scores))
        for span in completion.version_spans:
            count, end = span.num_tokens, begin + span.num_tokens
            if span.version < oldest:
                self._add_untrained(count)
            elif count:
                self._loss_mask += b"\1" * count
                self._weights += weights[begin:end]
                self._logprobs.extend(logprobs[begin:end].array())
                self._versions += array(VERSIONS, (span.version,)) * count
                self._advantages += advantages[begin:end]
            begin = end
        for index in treatment.left_out(completion):
            at = first + index
            self._loss_mask[at], self._versions[at] = 0, -1
            self._logprobs[at] = self._advantages[at] = 0.0
        if any(self._loss_mask[first:]):
            self._trained_at.add(sampled_at)
        self._temperatures.append((sampled_at, begin))
        self._experts.append(begin if experts is None else expert_rows(experts))

    def sample(self) -> TrainingSample:
        temperature: float | NumberArray[float]
        if len(self._trained_at) == 1:
            (temperature,) = self._trained_at
        else:
            of_tokens = array(LOGPROBS)
            for value, count in self._temperatures:
                of_tokens += array(LOGPROBS, (value,)) * count
            temperature = NumberArray(of_tokens)
        like = next((rows for rows in self._experts if isinstance(rows, ExpertRows)), None)
        experts = like and joined_rows(
            free_rows(rows, like) if isinstance(rows, int) else rows for rows in self._experts
        )
        return TrainingSample(
            group_id=self._rollout.group_id,
            rollout_id=self._rollout.rollout_id,
            token_ids=NumberArray(self._token_ids),
            loss_mask=MaskArray(self._loss_mask),
            behaviour_logprobs=NumberArray(self._logprobs),
            advantages=NumberArray(self._advantages),
            versions=NumberArray(self._versions),
            temperature=temperature,
            routed_experts=experts,
            loss_weights=None if self._weights.tobytes() == _ONE * len(self._weights) else NumberArray(self._weights),
            teacher=self._joined_scores(),
        )

    def _joined_scores(self) -> PromptScores | None:
        """Scores of all tokens of the sample; NaN where there is none. None if no token has a score."""
        if not self._scores:
            return None
        size, top_k = len(self._token_ids), self._scores[0][1].top_k
        nan = array(LOGPROBS, (math.nan,))
        logprobs, top_ids, top_logprobs = nan * size, array(TOKENS, (0,)) * (size * top_k), nan * (size * top_k)
        for first, scores in self._scores:
            end = first + len(scores.logprobs)
            logprobs[first:end] = logprob_array(scores.logprobs).array()
            top_ids[first * top_k : end * top_k] = token_array(scores.top_ids).array()
            top_logprobs[first * top_k : end * top_k] = logprob_array(scores.top_logprobs).array()
        return PromptScores(NumberArray(logprobs), top_k, NumberArray(top_ids), NumberArray(top_logprobs))

    def _add_untrained(self, count: int) -> None:
        self._loss_mask += bytes(count)
        self._logprobs += array(LOGPROBS, (0.0,)) * count
        self._advantages += array(LOGPROBS, (0.0,)) * count
        self._versions += array(VERSIONS, (-1,)) * count
        self._weights += array(LOGPROBS, (1.0,)) * count


def _policy_logprobs(completion: Completion) -> NumberArray[float]:
    """Logprobs under the policy, without the constraint of the completion.  # [num_tokens]"""
    logprobs, allowed = logprob_array(completion.logprobs), completion.allowed_logprobs
    if allowed is None:
        return logprobs
    return NumberArray(array(LOGPROBS, (sum(pair) for pair in zip(logprobs, allowed, strict=True))))


def _temperature_of(turn: Turn, rollout: Rollout, otherwise: float | None) -> float:
    """Return the temperature at which a turn was sampled. Its tokens must be trainable; see `build_samples`."""
    turn_of = f"turn {turn.completion.request_id!r} of rollout {rollout.rollout_id!r}"
    if turn.sampling is None:
        if otherwise is None:
            raise ValueError(
                f"{turn_of} does not record how it was sampled; set Turn.sampling, or pass build_samples a temperature"
            )
        return otherwise
    for name, value in turn.sampling.shaping.items():
        if name != "constraint":
            raise ValueError(
                f"{turn_of} was sampled with {name} = {value!r}, which the loss cannot account for; sample with "
                f"{name} = {getattr(UNSHAPED, name)!r} to train on the turn"
            )
        if turn.completion.allowed_logprobs is None:
            raise ValueError(
                f"{turn_of} was sampled under a constraint, but its completion has no allowed_logprobs, which the loss "
                "needs; return them from the GenerateFn, or leave the constraint out"
            )
    own = turn.sampling.temperature
    if not own > 0:
        raise ValueError(
            f"{turn_of} was sampled with temperature = {own!r}; sample above 0 to train on the turn, because greedy "
            "completions have no behaviour distribution"
        )
    if otherwise is not None and otherwise != own:
        raise ValueError(
            f"{turn_of} was sampled with temperature = {own!r}, but build_samples was given {otherwise!r}; leave it out"
        )
    return own
