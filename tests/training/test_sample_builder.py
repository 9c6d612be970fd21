from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.training.tensor_batch import make_tensor_batch
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan


def turn(prompt: Sequence[int], completion: Sequence[int], *, version: int = 3, logprob: float = -0.5) -> Turn:
    spans = (VersionSpan(version, len(completion)),)
    return Turn(prompt, Completion("r", completion, [logprob] * len(completion), FinishReason.STOP, spans))


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup("g", None, list(rollouts))


def rollout(*turns: Turn, advantage: float | None = 1.5, status: RolloutStatus = RolloutStatus.COMPLETED) -> Rollout:
    return Rollout("g/0", "g", 0, None, status=status, turns=list(turns), advantage=advantage)


def test_turns_that_extend_each_other_become_one_sample():
    turns = [turn([7, 8], [5, 1], version=3), turn((7, 8, 5, 1, 9), [6, 1], version=4, logprob=-2.0)]
    (sample,) = build_samples(group(rollout(*turns)), temperature=0.7)
    assert list(sample.token_ids) == [7, 8, 5, 1, 9, 6, 1]
    assert list(sample.loss_mask) == [False, False, True, True, False, True, True]
    assert list(sample.behaviour_logprobs) == [0, 0, -0.5, -0.5, 0, -2.0, -2.0]
    assert list(sample.advantages) == [0, 0, 1.5, 1.5, 0, 1.5, 1.5]
    assert list(sample.versions) == [-1, -1, 3, 3, -1, 4, 4]
    assert (sample.temperature, sample.group_id, sample.rollout_id) == (0.7, "g", "g/0")


def test_edited_history_starts_a_new_sample():
    turns = [turn([7, 8], [5, 1]), turn([7, 9, 5, 1], [6]), turn([7, 9, 5, 1, 6, 2], [4])]
    first, second = build_samples(group(rollout(*turns)), 1.0)
    assert list(first.token_ids) == [7, 8, 5, 1]
    assert list(second.token_ids) == [7, 9, 5, 1, 6, 2, 4]
    assert list(second.loss_mask) == [False, False, False, False, True, False, True]


def test_rejects_missing_rows_of_routed_experts():
    rows = [[[0]], [[1]], [[2]]]
    completion = Completion("r", [5, 6, 7], [-1.0] * 3, FinishReason.STOP, (VersionSpan(0, 3),), list(rows))
    played = group(rollout(Turn([1], completion)))
    assert build_samples(played, 1.0)[0].routed_experts == [None, *rows]
    del completion.routed_experts[1]
    with pytest.raises(ValueError, match="'g/0' has a completion of 3 tokens with 2 rows"):
        build_samples(played, 1.0)


def test_empty_completion_is_context_only():
    (sample,) = build_samples(group(rollout(turn([7], []), turn([7, 8], [5]))), 1.0)
    assert list(sample.token_ids) == [7, 8, 5]
    assert sample.num_trained_tokens == 1


@pytest.mark.parametrize(
    "left_out",
    [
        rollout(turn([1], [2]), advantage=None),
        rollout(turn([1], [2]), status=RolloutStatus.ABORTED),
        rollout(turn([1], [2]), status=RolloutStatus.ERROR_TIMEOUT),
        rollout(turn([1], [])),
        rollout(),
    ],
)
def test_excluded_rollouts_give_no_samples(left_out: Rollout):
    kept = rollout(turn([1], [2]), status=RolloutStatus.TRUNCATED_LENGTH)
    assert [sample.num_trained_tokens for sample in build_samples(group(left_out, kept), 1.0)] == [1]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_rejects_nonpositive_temperature(temperature: float):
    with pytest.raises(ValueError, match="temperature"):
        build_samples(group(), temperature)


def sampled(turn: Turn, **settings: Any) -> Turn:
    return replace(turn, sampling=SamplingParams(**{"max_tokens": 8, **settings}))


@pytest.mark.parametrize("version", [None, "3", float("nan"), True])
def test_rejects_noninteger_oldest_version(version: Any):
    with pytest.raises(ValueError, match=r"oldest_version is .*; it must be an integer"):
        build_samples(RolloutGroup("g", None, []), oldest_version=version)


def test_temperature_defaults_to_that_of_the_turns():
    played = [sampled(turn([7], [5]), temperature=0.7), sampled(turn([7, 5, 9], [6]), temperature=0.7)]
    (sample,) = build_samples(group(rollout(*played)))
    assert sample.temperature == 0.7
    assert build_samples(group(rollout(*played)), 0.7) == [sample]


def test_tokens_keep_the_temperature_of_their_turn():
    played = [
        sampled(turn([7, 8], [5, 1]), temperature=0.5),
        sampled(turn([7, 8, 5, 1, 9], [6]), temperature=1.0),
        sampled(turn([7, 8, 5, 1, 9, 6], [4]), temperature=2.0),
    ]
    (sample,) = build_samples(group(rollout(*played)))
    assert list(sample.temperatures) == [0, 0, 0.5, 0.5, 0, 1.0, 2.0]
    batch = make_tensor_batch([[Family((sample, replace(sample, temperature=0.25)), prefix_length=1)]])
    assert batch.temperatures_N.tolist() == [0.5, 0.5, 1.0, 2.0, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.9}, "top_p = 0.9, which the loss cannot account for; sample with top_p = 1.0"),
        ({"top_k": 5}, "top_k = 5, which the loss cannot account for; sample with top_k = -1"),
        ({"min_p": 0.1}, "min_p = 0.1, which the loss cannot account for; sample with min_p = 0.0"),
        ({"min_tokens": 2}, "min_tokens = 2, which the loss cannot account for; sample with min_tokens = 0"),
        ({"temperature": 0.0}, "temperature = 0.0; sample above 0"),
    ],
)
def test_rejects_sampling_parameters_that_the_loss_cannot_account_for(settings: dict[str, Any], message: str):
    wrong = sampled(turn([7], [5]), **settings)
    with pytest.raises(ValueError, match=f"turn 'r' of rollout 'g/0' was sampled with {message}"):
        build_samples(group(rollout(wrong)))
    context = [wrong, sampled(turn([7, 5, 9], [6], version=4))]
    (sample,) = build_samples(group(rollout(*context)), oldest_version=4)  # untrained tokens may use any sampling
    assert sample.temperature == 1.0


def test_rejects_temperature_that_differs_from_the_turn():
    with pytest.raises(ValueError, match=r"temperature = 0\.5, but build_samples was given 1\.0"):
        build_samples(group(rollout(sampled(turn([7], [5]), temperature=0.5))), 1.0)


def test_turn_without_sampling_parameters_requires_a_temperature():
    with pytest.raises(ValueError, match="rollout 'g/0' does not record how it was sampled"):
        build_samples(group(rollout(turn([7], [5]))))


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.booleans(), tokens, st.lists(st.integers(0, 3), max_size=4)), min_size=1, max_size=5))
def test_every_completion_token_is_trained_once_in_its_own_context(plan: list[tuple[bool, list[int], list[int]]]):
    turns: list[Turn] = []
    history: list[int] = []
    for keeps_history, context, completion in plan:
        prompt = history + context if keeps_history else context
        turns.append(turn(prompt, completion))
        history = prompt + completion
    samples = build_samples(group(rollout(*turns)), 1.0)
    trained = [
        (tuple(sample.token_ids[:t]), sample.token_ids[t])
        for sample in samples
        for t in range(len(sample.token_ids))
        if sample.loss_mask[t]
    ]
    sampled = [
        ((*turn.prompt_token_ids, *turn.completion.token_ids[:t]), token)
        for turn in turns
        for t, token in enumerate(turn.completion.token_ids)
    ]
    assert trained == sampled


def test_stale_tokens_are_context_only():
    spans = (VersionSpan(2, 1), VersionSpan(3, 2))
    mixed = Turn([7], Completion("r", [5, 6, 1], [-0.5, -0.25, -2.0], FinishReason.STOP, spans))
    (sample,) = build_samples(group(rollout(mixed)), 1.0, oldest_version=3)
    assert list(sample.token_ids) == [7, 5, 6, 1]
    assert list(sample.loss_mask) == [False, False, True, True]
    assert list(sample.behaviour_logprobs) == [0, 0, -0.25, -2.0]
    assert list(sample.versions) == [-1, -1, 3, 3]
    assert list(sample.advantages) == [0, 0, 1.5, 1.5]
    assert build_samples(group(rollout(mixed)), 1.0, oldest_version=4) == []


CONSTRAINED = SamplingParams(8, constraint='{"type": "structural_tag"}', stop_token_ids=(1,))


def constrained_turn(prompt: Sequence[int], token_ids: Sequence[int], allowed: Sequence[float] | None) -> Turn:
    spans = (VersionSpan(3, len(token_ids)),)
    logprobs = [-0.5] * len(token_ids)
    completion = Completion("r", token_ids, logprobs, FinishReason.STOP, spans, allowed_logprobs=allowed)
    return Turn(prompt, completion, sampling=CONSTRAINED if allowed is not None else SamplingParams(8))


@pytest.mark.parametrize(
    ("constrained", "mask", "weights"),
    [
        ("masked", [0, 0, 0, 1, 0, 0, 1, 1], None),
        ("trained", [0, 0, 1, 1, 1, 0, 1, 1], None),
        ("corrected", [0, 0, 1, 1, 1, 0, 1, 1], [1, 1, 0.125, 0.125, 0.125, 1, 0.125, 0.125]),
        ("corrected_by_token", [0, 0, 1, 1, 1, 0, 1, 1], [1, 1, 0.25, 1, 0.5, 1, 1, 1]),
    ],
)
def test_constrained_tokens_are_masked_trained_or_corrected(
    constrained: Any, mask: list[int], weights: list[float] | None
):
    turns = [
        constrained_turn([7, 8], [5, 6, 1], [math.log(0.25), 0.0, math.log(0.5)]),  # every token was allowed at 6
        constrained_turn([7, 8, 5, 6, 1, 9], [4, 1], None),
    ]
    (sample,) = build_samples(group(rollout(*turns)), constrained=constrained)
    assert list(sample.loss_mask) == [bool(one) for one in mask]
    assert sample.loss_weights is None if weights is None else list(sample.loss_weights) == pytest.approx(weights)
    own = [0, 0, -0.5 + math.log(0.25), -0.5, -0.5 + math.log(0.5), 0, -0.5, -0.5]
    expected = [logprob if trained else 0 for logprob, trained in zip(own, mask, strict=True)]
    assert list(sample.behaviour_logprobs) == pytest.approx(expected), "logprobs of the unconstrained policy"
    assert list(sample.advantages) == [1.5 * trained for trained in mask]
    assert list(sample.versions) == [3 if trained else -1 for trained in mask]


def test_correction_includes_all_branches_and_stale_tokens():
    turns = [
        constrained_turn([7, 8], [5, 1], [math.log(0.5), 0.0]),
        constrained_turn([9], [4, 1], [math.log(0.25), 0.0]),
    ]
    old = replace(turns[0], completion=replace(turns[0].completion, version_spans=(VersionSpan(0, 2),)))
    (sample,) = build_samples(group(rollout(old, turns[1])), oldest_version=2, constrained="corrected")
    assert list(sample.token_ids) == [9, 4, 1]
    assert sample.loss_weights is not None
    assert list(sample.loss_weights) == pytest.approx([1.0, 0.125, 0.125])


def test_fully_masked_rollout_gives_no_sample():
    played = rollout(constrained_turn([7, 8], [5, 1], [-2.0, -0.1]))
    assert build_samples(group(played)) == []


def test_rejects_constrained_completion_without_allowed_logprobs():
    unmeasured = replace(constrained_turn([7], [5], None), sampling=CONSTRAINED)
    with pytest.raises(ValueError, match="sampled under a constraint, but its completion has no allowed_logprobs"):
        build_samples(group(rollout(unmeasured)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("presence_penalty", 0.5), ("frequency_penalty", 0.5), ("repetition_penalty", 1.1), ("logit_bias", {5: 1.0})],
)
def test_rejects_penalties_and_logit_biases(name: str, value: Any):
    shaped = replace(turn([7], [5]), sampling=SamplingParams(8, **{name: value}))
    with pytest.raises(ValueError, match=f"was sampled with {name} = "):
        build_samples(group(rollout(shaped)))
