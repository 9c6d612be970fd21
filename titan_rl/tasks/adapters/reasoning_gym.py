"""Data sets of `reasoning-gym` as tasks: endless questions, each with a scorer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, cast

from pydantic import Field, NonNegativeFloat, PositiveFloat, PrivateAttr, field_validator

from titan_rl.core.calls.imports import require
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.threads import DaemonThreads
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.rollout.policy_text import text_of
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric, TextRubric
from titan_rl.rollout.types import Message, Rollout
from titan_rl.tasks import PromptTask
from titan_rl.tasks.adapters.shared import check_name
from titan_rl.tasks.tools import messages_of

SAMPLES_PER_DATASET = 64  # samples taken from a data set of one seed, because some take a second to make
ITEMS_PER_DATASET = 1024  # size of a data set; more items than samples, because held-out items are skipped
MOST_DATASETS = 64  # largest number of data sets searched for one training or held-out sample

_threads = DaemonThreads(4, "reasoning_gym")

Item = dict[str, Any]
"""Item of reasoning-gym: "question", "answer", and "metadata", which the scorer reads."""


class ReasoningGym(PromptTask):
    """Questions of one or several data sets of reasoning-gym, scored by the data set itself.

    Example:

        [task]
        type = "titan_rl.tasks.adapters.reasoning_gym:ReasoningGym"
        dataset = "leg_counting"
        config = { min_animals = 2, max_animals = 3 }

    or several data sets, drawn by their weights:

        dataset = "composite"
        config.datasets = [{ name = "leg_counting", weight = 2 }, { name = "chain_sum", config = { max_terms = 3 } }]

    Samples are reasoning-gym's items, each determined by the run's seed and its index. Items with equal questions are
    held out together, so no held-out question is ever trained on.
    """

    dataset: str
    """Name of the data set in reasoning-gym."""
    config: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of the data set, except seed and size."""
    system: str = ""
    """System message, if any."""
    prompt_template: str = "{question}\n\nGive the final answer, and nothing else, between <{tag}> and </{tag}>."
    """User's message."""
    tag: str = Field(default="answer", min_length=1)
    """Tag of the final answer: the text in the last <tag> ... </tag> is scored; without one the score is 0."""
    format_weight: NonNegativeFloat = 0.0
    """Weight of the reward `answered`, which is 1 for any text in the tags, relative to the score's weight of 1."""
    demonstrated_right: float = Field(default=0.5, ge=0, le=1)
    """Share of right answers in the demonstrations of `titan-rl sft`; the rest are answers of other questions."""
    score_timeout_s: PositiveFloat = 10.0
    """Longest time of one call of the scorer. An answer that it cannot read, or not in that time, is worth 0."""

    _held_out: list[Item] = PrivateAttr(default_factory=list[Item])  # kept, because some take long to make

    @field_validator("prompt_template")
    @classmethod
    def _has_a_question(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError("must have {question} in it")
        return template

    def check_settings(self) -> None:
        """Make the data set once.

        Raises:
            ConfigError: there is no such data set, or it takes no such settings.
            MissingExtraError: reasoning-gym is not installed.
        """
        self._dataset("check")
        self.validation_samples(1)

    def train_sample(self, seed: int, index: int) -> Item:
        return self._nth(f"train/{seed}", index, held_out=False)

    def validation_samples(self, count: int) -> list[Item]:
        while len(self._held_out) < count:
            self._held_out.append(self._nth("validation", len(self._held_out), held_out=True))
        return self._held_out[:count]

    def sample(self, rng: random.Random) -> Item:
        return self._dataset(f"drawn/{rng.randrange(16)}")[rng.randrange(ITEMS_PER_DATASET)]

    def demonstrate(self, sample: Item, messages: Sequence[Message], rng: random.Random) -> str:
        """Right answer between the tags, or the answer of another question.

        Raises:
            ConfigError: the data set has no right answers.
        """
        shown = sample if rng.random() < self.demonstrated_right else self.sample(rng)
        if shown["answer"] is None:
            raise ConfigError(f"task.dataset = {self.dataset!r} has no right answers, so it has no demonstrations")
        return f"<{self.tag}>{shown['answer']}</{self.tag}>"

    def key(self, sample: Item) -> str:
        return sample["question"]

    def prompt(self, sample: Item) -> Sequence[Message]:
        text = self.prompt_template.replace("{tag}", self.tag).replace("{question}", sample["question"])
        return messages_of(text, self.system)

    async def reward(self, sample: Item, text: str) -> float:
        """Score of a reply by the data set's scorer: 1 if it is right, less if it is partly right, else about 0."""
        found = self.answer_in(text)
        if found is None:
            return 0.0
        dataset = self._dataset("scoring")
        try:
            return float(await _threads.run(lambda: dataset.score_answer(found, sample), self.score_timeout_s))
        except Exception:  # the reply is at fault: scorers parse it as dates, formulas or lists, which may take long
            return 0.0

    def answer_in(self, reply: str) -> str | None:
        """Text of a reply between the tags."""
        return require("reasoning_gym.utils", "reasoning-gym").extract_answer(reply, tag_name=self.tag)

    def rubric(self) -> Rubric:
        async def score(rollout: Rollout) -> float:
            return await self.reward(rollout.sample, text_of(rollout))

        def answered(rollout: Rollout) -> bool:
            return self.answer_in(text_of(rollout)) is not None

        rewards = [Reward(score), Reward(answered, weight=self.format_weight)]
        return TextRubric(rewards, truncated_reward=0.0, error_reward=0.0)

    def _nth(self, key: str, index: int, *, held_out: bool) -> Item:
        """Item number `index` among the held-out items, or among the training items.

        Raises:
            DataError: the data set has no such question.
        """
        chunk, start = divmod(index, SAMPLES_PER_DATASET)
        for number in range(MOST_DATASETS):
            dataset = self._dataset(f"{key}/{chunk}/{number}")
            for at in range(start, ITEMS_PER_DATASET, SAMPLES_PER_DATASET):
                item = dataset[at]
                if (not self.held_out or self.is_held_out(item) == held_out) and self.leaves_room(item):
                    return item
        side = "held-out" if held_out else "training"
        raise DataError(
            f"reasoning-gym's {self.dataset} gave no {side} question in a thousand with held_out = {self.held_out}: "
            "it has too few different ones; choose a wider config, or held_out = 0"
        )

    def _dataset(self, key: str) -> Any:
        return _make(self.dataset, json.dumps(dict(self.config), sort_keys=True), key)


@lru_cache(maxsize=24)
def _make(name: str, config: str, key: str) -> Any:
    """Make a data set.

    Args:
        name: Name of the data set.
        config: Settings of the data set as JSON.
        key: Text that determines the seed.

    Raises:
        ConfigError: there is no such data set, or it refuses the settings.
    """
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")
    gym = require("reasoning_gym", "reasoning-gym")
    given = _settings_of(name, parse_json(config), "task.dataset", "task.config")
    try:
        return gym.create_dataset(name, seed=seed, size=ITEMS_PER_DATASET, **given)
    except Exception as error:  # data sets check their config with assertions
        raise ConfigError(f"task.config = {config}: {name} refuses it: {error or type(error).__name__}") from error


def _settings_of(name: str, given: dict[str, Any], name_field: str, field: str) -> dict[str, Any]:
    """Convert settings to the types of the data set's config class, which has tuples instead of TOML's lists.

    Raises:
        ConfigError: there is no such data set, or no such setting.
    """
    registry = require("reasoning_gym.factory", "reasoning-gym").DATASETS
    check_name(name_field, name, registry, "data sets of reasoning-gym")
    known = {known.name: known for known in fields(registry[name][1])}
    for key, value in given.items():
        if key in ("seed", "size"):
            raise ConfigError(f"{field}.{key} cannot be set: items depend on the run's seed and their index")
        check_name(field, key, known.keys() - {"seed", "size"}, f"settings of {name}")
        default = known[key].default if known[key].default is not MISSING else None
        if isinstance(value, list) and isinstance(default, tuple):
            given[key] = tuple(cast("list[Any]", value))
    if name == "composite":
        given["datasets"] = [_spec(number, each) for number, each in enumerate(given.get("datasets", ()))]
    return given


def _spec(number: int, given: Any) -> Any:
    """Specification of one of the data sets of a composite."""
    field = f"task.config.datasets[{number}]"
    if not isinstance(given, dict) or "name" not in given:
        raise ConfigError(f'{field} = {given!r} must be a table such as {{ name = "leg_counting", weight = 2 }}')
    table = cast("dict[str, Any]", given)
    for key in table:
        check_name(field, key, ("name", "weight", "config"), "settings")
    if table["name"] == "composite":
        raise ConfigError(f"{field}: composite cannot be one of composite; list its data sets here")
    settings = _settings_of(table["name"], dict(table.get("config", {})), f"{field}.name", f"{field}.config")
    spec = require("reasoning_gym.composite", "reasoning-gym").DatasetSpec
    return spec(table["name"], float(table.get("weight", 1.0)), settings)
