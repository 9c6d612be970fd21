"""Alphabet-sort task: samples, environment, reward, and settings."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict

import pytest
from pydantic import ValidationError

from examples.alphabet_sort.data import Sample, is_held_out, name_pool, sort_names
from examples.alphabet_sort.env import AlphabetSortEnv
from examples.alphabet_sort.rubric import similarity
from examples.alphabet_sort.task import AlphabetSort
from titan_rl.rollout.environment.types import MessageEnv
from titan_rl.rollout.task import Task
from titan_rl.rollout.types import Rollout, RolloutStatus

SMALL = AlphabetSort(pool_size=24, min_turns=2, max_turns=3, max_first_names=3, max_new_names=2)
SAMPLE = Sample("last", (("AdaWolf", "BenHill"), ("MiaKhan",)))


def block(tag: str, *lines: str) -> str:
    return "\n".join([f"<{tag}>", *lines, f"</{tag}>"])


def cumulative_lists(sample: Sample) -> list[frozenset[str]]:
    return [frozenset(sample.names(turn)) for turn in range(len(sample.turns))]


async def reward(sample: Sample, *answers: str, power: float = 4.0) -> float:
    messages = [{"role": "assistant", "content": answer} for answer in answers]
    rollout = Rollout("g/0", "g", 0, sample, messages=[{"role": "user", "content": "?"}, *messages])
    await AlphabetSort(power=power).rubric().score([rollout])
    assert rollout.reward is not None
    return rollout.reward


def test_alphabet_sort_is_a_task() -> None:
    assert isinstance(SMALL, Task)


@pytest.mark.parametrize("task", [AlphabetSort(), SMALL])
def test_held_out_lists_are_never_trained_on(task: AlphabetSort) -> None:
    held_out = {names for sample in task.validation_samples(200) for names in cumulative_lists(sample)}
    trained = {names for i in range(2000) for names in cumulative_lists(task.train_sample(seed=i % 3, index=i))}
    assert all(is_held_out(names) for names in held_out)
    assert not any(is_held_out(names) for names in trained)
    assert held_out.isdisjoint(trained)


def test_training_sample_depends_only_on_seed_and_index() -> None:
    assert SMALL.train_sample(7, 41) == SMALL.train_sample(7, 41)
    assert len({SMALL.train_sample(seed, index) for seed in range(5) for index in range(20)}) > 90
    assert SMALL.validation_samples(8) == SMALL.validation_samples(64)[:8]


def test_turns_and_names_stay_in_range_without_duplicates() -> None:
    samples = [SMALL.train_sample(0, index) for index in range(300)]
    assert {len(sample.turns) for sample in samples} == {2, 3}
    assert {len(sample.turns[0]) for sample in samples} == {2, 3}
    assert {len(brought) for sample in samples for brought in sample.turns[1:]} == {1, 2}
    assert all(len(set(names := sample.names(2))) == len(names) for sample in samples)
    assert {sample.sort_by for sample in samples} == {"first", "last"}


def test_sample_survives_pickle_and_json() -> None:
    assert pickle.loads(pickle.dumps(SAMPLE)) == SAMPLE
    assert json.loads(json.dumps(asdict(SAMPLE)))["turns"] == [["AdaWolf", "BenHill"], ["MiaKhan"]]


def test_ties_are_sorted_by_the_other_name() -> None:
    names = ["MiaWolf", "AdaWolf", "AdaHill"]
    assert sort_names(names, "first") == ["AdaHill", "AdaWolf", "MiaWolf"]
    assert sort_names(names, "last") == ["AdaHill", "AdaWolf", "MiaWolf"]
    assert len(set(name_pool(24))) == 24


def test_only_names_of_the_current_turn_are_marked_new() -> None:
    sample = Sample("first", (("MiaKhan",), ("BenHill",), ("AdaWolf",)))
    assert sample.answer(0) == ["MiaKhan"]
    assert sample.answer(1) == ["BenHill // new name!", "MiaKhan"]
    assert sample.answer(2) == ["AdaWolf // new name!", "BenHill", "MiaKhan"]


async def test_environment_gives_names_each_turn_and_then_ends() -> None:
    env = AlphabetSortEnv(SAMPLE)
    assert isinstance(env, MessageEnv)
    (first,) = (await env.reset()).messages
    assert "by last name:\nAdaWolf\nBenHill\n" in first["content"]
    step = await env.step({"role": "assistant", "content": "nonsense"})
    assert "MiaKhan" in step.messages[0]["content"]
    assert "<combined_alphabetical_sorted>" in step.messages[0]["content"]
    assert (await env.step({"role": "assistant", "content": ""})).status is RolloutStatus.COMPLETED


async def test_right_answers_earn_one_and_unanswered_turns_zero() -> None:
    first = block("alphabetical_sorted", "BenHill", "AdaWolf")
    second = block("combined_alphabetical_sorted", "BenHill", "MiaKhan // new name!", "AdaWolf")
    assert await reward(SAMPLE, first, second) == 1.0
    assert await reward(SAMPLE, first) == 0.5
    assert await reward(SAMPLE) == 0.0
    assert await reward(SAMPLE, second, first) == 0.0  # each turn has its own tag


async def test_wrong_order_earns_similarity_to_the_power() -> None:
    swapped = block("alphabetical_sorted", "AdaWolf", "BenHill")
    likeness = similarity(SAMPLE, 0, swapped)
    assert 0.4 < likeness < 0.6
    assert await reward(SAMPLE, swapped, power=1.0) == pytest.approx(likeness / 2)
    assert await reward(SAMPLE, swapped, power=3.0) == pytest.approx(likeness**3 / 2)


def test_last_block_counts_and_must_be_closed() -> None:
    right, wrong = block("alphabetical_sorted", "BenHill", "AdaWolf"), block("alphabetical_sorted", "AdaWolf")
    assert similarity(SAMPLE, 0, f"{wrong}\nNo:\n{right}") == 1.0
    assert similarity(SAMPLE, 0, f"{right}\nNo:\n{wrong}") < 1.0
    assert similarity(SAMPLE, 0, right.removesuffix("</alphabetical_sorted>")) == 0.0


def test_missing_new_name_tag_lowers_similarity() -> None:
    untagged = block("combined_alphabetical_sorted", "BenHill", "MiaKhan", "AdaWolf")
    assert 0.5 < similarity(SAMPLE, 1, untagged) < 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_turns": 4}, "min_turns is 4, above max_turns 3"),
        ({"min_first_names": 6}, "min_first_names is 6, above max_first_names 5"),
        ({"min_new_names": 6}, "min_new_names is 6, above max_new_names 5"),
        ({"pool_size": 20}, "pool_size is 20; with these turns it must be at least 30"),
        ({"pool_size": 100_000}, "pool_size is 100000; there are 4096 names"),
        ({"power": 0.0}, "power"),
        ({"names": 3}, "names"),
    ],
)
def test_invalid_settings_error_names_field_value_and_fix(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlphabetSort.model_validate(settings)
