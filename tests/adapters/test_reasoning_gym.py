"""Data sets of the reasoning-gym package."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest
from adapters.playing import play

from titan_rl.core.errors import ConfigError, DataError
from titan_rl.tasks.adapters.reasoning_gym import ReasoningGym

if importlib.util.find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed", allow_module_level=True)

from reasoning_gym.factory import DATASETS

FEW = {"min_animals": 1, "max_animals": 1, "max_instances": 3}  # a few dozen distinct questions
# Data sets with many right answers, which give none.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
CONFIGS = {"knight_swap": {"impossible_ratio": 1.0}}  # otherwise an item takes seconds


def legs(**settings: Any) -> ReasoningGym:
    return ReasoningGym(dataset="leg_counting", **settings)


def answered(text: object) -> Any:
    return lambda messages: f"It is this: <answer> {text}\n</answer>"


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"composite"}))
async def test_every_dataset_gives_questions_and_scores_right_answers(name: str) -> None:
    task = ReasoningGym(dataset=name, held_out=0, config=CONFIGS.get(name, {}))
    item = task.train_sample(0, 3)
    assert item["question"] in task.prompt(item)[-1]["content"]
    if name in WITHOUT_ANSWER:
        assert item["answer"] is None
    else:
        assert await task.reward(item, f"It is this: <answer>{item['answer']}</answer>") == 1.0
        assert await task.reward(item, str(item["answer"])) == 0.0
    assert 0.0 <= await task.reward(item, "<answer>no such thing)</answer>") <= 1.0


async def test_prompt_gives_the_answer_format_and_answers_are_scored() -> None:
    task = legs(format_weight=0.25, system="Think first.")
    item = task.train_sample(0, 0)
    group = await play(task, item, answered(item["answer"]), answered(-1), lambda _: "I do not know")
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.2, 0.0]
    assert group.rollouts[1].reward_breakdown == {"score": 0.0, "answered": 1.0}
    system, asked = group.rollouts[0].messages[:2]
    assert system == {"role": "system", "content": "Think first."}
    assert item["question"] in asked["content"]
    assert "between <answer> and </answer>" in asked["content"]


def test_items_are_determined_by_index_and_never_held_out() -> None:
    task = legs(config=FEW)
    held_out = {item["question"] for item in task.validation_samples(30)}
    trained = [task.train_sample(seed, index)["question"] for seed in range(3) for index in range(100)]
    assert not held_out & set(trained)
    assert len(held_out) > 3
    assert trained == [
        legs(config=FEW).train_sample(seed, index)["question"] for seed in range(3) for index in range(100)
    ]
    assert task.validation_samples(30)[:10] == legs(config=FEW).validation_samples(10)
    wide = [legs().train_sample(0, index)["question"] for index in range(300)]
    assert len(set(wide)) > 290


def test_demonstrations_are_never_held_out() -> None:
    task = legs(config=FEW, demonstrated_right=0.25)
    held_out = {item["question"] for item in task.validation_samples(30)}
    shown = list(task.demonstrations(200))
    assert [one.messages for one in shown[:5]] == [one.messages for one in task.demonstrations(5)]
    assert not any(question in str(one.messages[0]) for one in shown for question in held_out)
    assert all(str(one.messages[-1]["content"]).startswith("<answer>") for one in shown)
    with pytest.raises(ConfigError, match="has no right answers"):
        list(ReasoningGym(dataset="rush_hour").demonstrations(1))


def test_too_few_questions_for_validation_is_an_error() -> None:
    one = {"min_animals": 1, "max_animals": 1, "max_instances": 1}
    task = legs(config=one, held_out=0.0001)
    with pytest.raises(DataError, match="leg_counting gave no held-out question"):
        task.validation_samples(1)


async def test_composite_draws_datasets_by_weight() -> None:
    datasets = [{"name": "leg_counting", "weight": 3, "config": FEW}, {"name": "chain_sum", "config": {"max_terms": 2}}]
    task = ReasoningGym(dataset="composite", config={"datasets": datasets})
    items = [task.train_sample(0, index) for index in range(400)]
    sources = [item["metadata"]["source_dataset"] for item in items]
    assert 0.68 < sources.count("leg_counting") / 400 < 0.82
    for name in ("leg_counting", "chain_sum"):
        item = items[sources.index(name)]
        assert await task.reward(item, f"<answer>{item['answer']}</answer>") == 1.0


def test_lists_are_accepted_for_tuple_settings() -> None:
    task = ReasoningGym(dataset="basic_arithmetic", config={"operators": ["+"]})
    assert not any(sign in task.train_sample(0, index)["question"] for index in range(20) for sign in "*/")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"dataset": "legs_counting"},
            r"task.dataset = 'legs_counting' is not one of the \d+ .*: leg_counting|nearest",
        ),
        (
            {"config": {"max_animal": 3}},
            r"task.config = 'max_animal' is not one of .* settings of leg_counting.*max_animals",
        ),
        ({"config": {"seed": 3}}, "task.config.seed cannot be set"),
        ({"config": {"min_animals": 5, "max_animals": 2}}, "leg_counting refuses it"),
        (
            {"dataset": "composite", "config": {"datasets": [{"name": "chain_sums"}]}},
            r"datasets\[0\].name = 'chain_sums'",
        ),
        ({"dataset": "composite", "config": {"datasets": [{"name": "composite"}]}}, "cannot be one of composite"),
        (
            {"dataset": "composite", "config": {"datasets": ["chain_sum"]}},
            r"datasets\[0\] = 'chain_sum' must be a table",
        ),
        ({"dataset": "composite"}, "composite refuses it: Must specify at least one"),
    ],
)
def test_check_settings_rejects_invalid_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReasoningGym(**{"dataset": "leg_counting", **settings}).check_settings()


async def test_hanging_or_failing_scorer_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    task = legs(score_timeout_s=0.05)
    item = task.train_sample(0, 0)
    dataset = type(DATASETS["leg_counting"][0](DATASETS["leg_counting"][1](seed=0)))
    monkeypatch.setattr(dataset, "score_answer", lambda *_: go_on.wait(60))
    assert await task.reward(item, "<answer>1</answer>") == 0.0
    go_on.set()
    monkeypatch.setattr(dataset, "score_answer", lambda *_: 1 / 0)
    assert await task.reward(item, "<answer>1</answer>") == 0.0
