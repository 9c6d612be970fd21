"""A task of one prompt and one answer, from its samples to its rewards."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout.test_message_token_env import LetterRenderer

from titan_rl import (
    Completion,
    FinishReason,
    Message,
    MessageStep,
    PromptTask,
    Rollouter,
    RolloutStatus,
    SamplingParams,
    Task,
    ToolEnv,
    VersionSpan,
    call_of,
    tools_of,
)
from titan_rl.config.task_tables import load_task
from titan_rl.config.validation_errors import Origins
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.rollout.task import DemonstratingTask


class Sums(PromptTask):
    largest: int = 99

    def sample(self, rng):
        return rng.randint(0, self.largest), rng.randint(0, self.largest)

    def prompt(self, sample):
        return f"What is {sample[0]} + {sample[1]}?"

    def reward(self, sample, answer):
        return answer.strip() == str(sum(sample))


class AsyncSums(Sums):
    async def reward(self, sample, answer):
        return super().reward(sample, answer)


def says(*texts: str, reason: FinishReason = FinishReason.STOP) -> Any:
    said = iter(texts)

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        ids = [*map(ord, next(said)), 0]
        return Completion(request_id, ids, [0.0] * len(ids), reason, [VersionSpan(0, len(ids))])

    return generate


async def play(task: Task, sample: Any, generate: Any) -> list[tuple[RolloutStatus, float | None]]:
    rollouter = Rollouter(lambda sample: task.make_env(sample, LetterRenderer()), task.rubric(), max_context=512)
    sampling = SamplingParams(max_tokens=32)
    group = await rollouter.run_group(generate, sample, group_id="g", group_size=2, sampling=sampling)
    return [(rollout.status, rollout.reward) for rollout in group.rollouts]


@pytest.mark.parametrize("task_class", [Sums, AsyncSums])
async def test_answer_is_rewarded(task_class: type[Sums]) -> None:
    done = RolloutStatus.COMPLETED
    assert sorted(await play(task_class(), (2, 3), says("5", "6"))) == [(done, 0.0), (done, 1.0)]


async def test_truncated_or_unparsable_answer_earns_zero() -> None:
    cut = await play(Sums(), (2, 3), says("5", "5", reason=FinishReason.LENGTH))
    assert cut == [(RolloutStatus.TRUNCATED_LENGTH, 0.0)] * 2
    assert await play(Sums(), (2, 3), says("?", "?")) == [(RolloutStatus.ERROR_PARSE, 0.0)] * 2


def test_samples_are_deterministic_and_validation_is_held_out() -> None:
    task = Sums(largest=9)
    trained = [task.train_sample(0, index) for index in range(300)]
    assert trained == [Sums(largest=9).train_sample(0, index) for index in range(300)]
    assert trained != [task.train_sample(1, index) for index in range(300)]
    held_out = task.validation_samples(50)
    assert held_out[:20] == task.validation_samples(20)
    assert not {*trained} & {*held_out}
    assert len({*trained}) > 60
    assert {*Sums(largest=9, held_out=0).validation_samples(300)} & {*trained}


def test_too_few_distinct_samples_error_gives_the_fix() -> None:
    with pytest.raises(DataError, match=r"Sums.sample returned no held-out sample in 1000 draws.*set held_out = 0"):
        Sums(largest=0).validation_samples(1)


def test_rejects_a_sample_key_with_a_memory_address() -> None:
    class Objects(Sums):
        def key(self, sample: Any) -> str:
            return repr(object())

    with pytest.raises(DataError, match="not the same in each process; make samples dataclasses, or define Objects"):
        Objects().train_sample(0, 0)


class Lookup(PromptTask):
    def sample(self, rng: random.Random) -> int:
        return rng.randint(0, 1000)

    def prompt(self, sample: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Look."}, {"role": "user", "content": f"{sample}?"}]

    def tools(self, sample: int) -> object:
        def look(x: int) -> int:
            """Look it up."""
            return sample + x

        return look

    def reward(self, sample: int, answer: str) -> float:
        return float(answer == str(sample + 1))


async def test_tools_are_called_before_the_answer() -> None:
    task = Lookup()
    env = task.env(6)
    assert isinstance(env, ToolEnv)
    step: MessageStep = await env.step(
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"x": 1}}}]}
    )
    assert step.messages[0]["content"] == "7"
    # The renderer of these tests parses an exclamation mark as a call of `look`.
    assert await play(task, 6, says("!", "!", "7", "7")) == [(RolloutStatus.COMPLETED, 1.0)] * 2


class Shown(Lookup):
    def demonstrate(self, sample: int, messages: Sequence[Message], rng: random.Random) -> str | Message:
        if messages[-1]["role"] == "tool":
            return messages[-1]["content"]
        return call_of("look", {"x": rng.choice([1, 2])})


async def test_demonstrations_are_deterministic() -> None:
    task = Shown()
    shown = list(task.demonstrations(300))  # while an event loop is running
    assert shown == list(Shown().demonstrations(300))
    assert isinstance(task, DemonstratingTask)
    for demonstration in shown:
        _, asked, called, looked_up, answered = demonstration.messages
        sample = int(asked["content"].removesuffix("?"))
        assert not task.is_held_out(sample)
        (call,) = called["tool_calls"]
        assert looked_up["content"] == answered["content"] == str(sample + call["function"]["arguments"]["x"])
        assert demonstration.tools == [tool.schema for tool in tools_of(task.tools(sample))]


def test_last_sixth_of_demonstrations_is_careless() -> None:
    class Careless(Shown):
        def demonstrate_carelessly(self, sample: int, messages: Sequence[Message], rng: random.Random) -> str | Message:
            return "unknown"

    shown = list(Careless().demonstrations(60))
    assert shown[:50] == list(Shown().demonstrations(60))[:50]
    assert [demonstration.messages[-1]["content"] for demonstration in shown[50:]] == ["unknown"] * 10


def test_task_without_demonstrations_error_gives_the_fix() -> None:
    with pytest.raises(ConfigError, match="Lookup has no demonstrations; define demonstrate"):
        list(Lookup().demonstrations(1))


def test_endless_demonstration_is_an_error() -> None:
    class Endless(Lookup):
        def demonstrate(self, sample: int, messages: Sequence[Message], rng: random.Random) -> str | Message:
            return call_of("look", {"x": 0})

    with pytest.raises(DataError, match="has not ended after 64 turns"):
        list(Endless().demonstrations(1))


class Unfinished(PromptTask):
    def sample(self, rng: random.Random) -> int:
        return 0


def test_missing_method_error_names_the_method() -> None:
    with pytest.raises(ConfigError, match=r"Unfinished is not a task: it lacks prompt, reward; tasks in .*Sums"):
        load_task({"type": f"{__name__}:Unfinished"}, Origins((Path("run.toml"),)))
