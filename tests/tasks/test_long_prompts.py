"""Prompts that leave no room for an answer are counted before a run, and left out of it."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from titan_rl import PromptTask, ToolEnv
from titan_rl.core.errors import DataError
from titan_rl.rollout.task import PromptedTask
from titan_rl.tasks import Rows
from titan_rl.tasks.adapters.trl import TRLTask
from titan_rl.tasks.rows import MOST_TOKENIZED

REWARD = f"{__name__}:one"
SHORT, LONG = "What is 1 + 1?", "word " * 100


def one(*_: Any, **columns: Any) -> Any:
    return [1.0] * len(columns["completions"]) if columns else 1.0


def look(x: int) -> int:
    """Look."""
    return x


class WordRenderer:
    """Renderer with a token for each word, two for each message, and 50 for tools. Records the texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def render_ids(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        self.texts += [message["content"] for message in messages]
        words = sum(2 + len(message["content"].split()) for message in messages)
        return [0] * (words + 50 * bool(tools) + add_generation_prompt)


def renderer() -> Any:
    return WordRenderer()


def rows_task(folder: Path, prompts: Sequence[Any], **settings: Any) -> Rows:
    def write(name: str, given: Sequence[Any]) -> str:
        (folder / name).write_text("".join(json.dumps({"prompt": each, "n": n}) + "\n" for n, each in enumerate(given)))
        return str(folder / name)

    held_out = settings.pop("held_out_prompts", [SHORT])
    return Rows(path=write("a.jsonl", prompts), validation_path=write("b.jsonl", held_out), reward=REWARD, **settings)


def epoch(task: Rows | TRLTask, size: int) -> list[int]:
    return sorted(task.train_sample(0, index)["n"] for index in range(size))


def test_long_prompts_of_rows_are_left_out_of_both_sides(tmp_path: Path) -> None:
    task = rows_task(tmp_path, [SHORT, LONG, SHORT, LONG, SHORT], held_out_prompts=[LONG, SHORT])
    found = task.leave_out_long_prompts(renderer(), 80)
    assert found == (
        f"2 of 5 prompts to train on, such as row 1 of {tmp_path}/a.jsonl, and "
        f"1 of 2 held-out prompts, such as row 0 of {tmp_path}/a.jsonl,"
    )
    assert set(epoch(task, 5)) == {0, 2, 4}
    assert [row["n"] for row in task.validation_samples(9)] == [1]


def test_prompt_may_fill_the_context_but_for_one_token(tmp_path: Path) -> None:
    prompts = ["word " * 17, "word " * 16]
    for given in (prompts, [[{"role": "user", "content": text}] for text in prompts]):
        task = rows_task(tmp_path, given)
        task.leave_out_long_prompts(renderer(), 20)
        assert epoch(task, 1) == [1]


def test_held_out_share_is_measured_too_and_the_order_stays_without_long_prompts(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": SHORT + str(n), "n": n}) + "\n" for n in range(50))
    (tmp_path / "rows.jsonl").write_text(lines)
    for held_out in (0.2, 0):
        task, other = (Rows(path=str(tmp_path / "rows.jsonl"), reward=REWARD, held_out=held_out) for _ in range(2))
        assert task.leave_out_long_prompts(renderer(), 80) == ""
        assert [task.train_sample(1, at) for at in range(60)] == [other.train_sample(1, at) for at in range(60)]
        assert task.validation_samples(5) == other.validation_samples(5)


def test_tools_and_system_message_count(tmp_path: Path) -> None:
    task = rows_task(tmp_path, ["word " * 30, SHORT])
    assert task.leave_out_long_prompts(renderer(), 64) == ""
    assert rows_task(tmp_path, ["word " * 30, SHORT], system="word " * 40).leave_out_long_prompts(renderer(), 64)
    task = rows_task(tmp_path, ["word " * 30, SHORT], tools=(f"{__name__}:look",))
    assert "1 of 2" in task.leave_out_long_prompts(renderer(), 64)


def test_short_prompts_are_not_tokenized_and_long_ones_up_to_a_limit(tmp_path: Path) -> None:
    words = renderer()
    assert rows_task(tmp_path, [f"{n} {SHORT}" for n in range(5000)]).leave_out_long_prompts(words, 80) == ""
    assert len(words.texts) == 1
    words = renderer()
    texts = ["word " * (900 if n % 4 else 1100) for n in range(5000)]
    found = rows_task(tmp_path, texts).leave_out_long_prompts(words, 1000)
    number, _, measured = found.partition(" of the ")
    assert measured.startswith(f"{len(words.texts) - 1} measured of 5,000 prompts to train on, such as row ")
    assert int(number) < len(words.texts) / 3
    assert MOST_TOKENIZED / 2 < sum(map(len, words.texts)) <= MOST_TOKENIZED
    task = rows_task(tmp_path, texts)
    task.leave_out_long_prompts(renderer(), 1000)
    assert all(row % 4 for row in epoch(task, 5000))


def test_only_the_beginning_of_a_huge_prompt_is_tokenized(tmp_path: Path) -> None:
    words = renderer()
    task = rows_task(tmp_path, ["word " * 800_000, SHORT])
    assert "1 of 2" in task.leave_out_long_prompts(words, 32_768)
    assert max(map(len, words.texts)) <= 8 * 32_768


def test_rows_without_a_prompt_that_fits_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of the 2 prompts to train on leaves room for an answer"):
        rows_task(tmp_path, [LONG, LONG]).leave_out_long_prompts(renderer(), 80)


def test_rows_of_trl_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": p, "n": 1}) + "\n" for p in (SHORT, LONG)))
    task = TRLTask(dataset=str(tmp_path / "a.jsonl"), reward_funcs=(REWARD,), held_out=0)
    expected = f"1 of 2 prompts to train on, such as row 1 of {tmp_path}/a.jsonl,"
    assert task.leave_out_long_prompts(renderer(), 80) == expected
    assert epoch(task, 3) == [1, 1, 1]


class Questions(PromptTask):
    share: float = 0.25
    held_out: float = 0.5

    def key(self, sample: str) -> str:
        return sample

    def sample(self, rng: random.Random) -> str:
        return (LONG if rng.random() < self.share else SHORT) + str(rng.random())

    def prompt(self, sample: str) -> str:
        return sample

    def reward(self, sample: str, answer: str) -> float:
        return 1.0


class OwnEnv(Questions):
    """Task whose environment shows the beginning of a prompt."""

    def env(self, sample: str) -> ToolEnv:
        return ToolEnv(sample[:20])


def test_long_prompts_that_are_drawn_are_replaced() -> None:
    task, other = Questions(), Questions()
    assert isinstance(task, PromptedTask)
    found = task.leave_out_long_prompts(renderer(), 80)
    number, _, drawn = found.removesuffix(" prompts").partition(" of the first ")
    assert (int(drawn), int(number) > 30) == (256 + int(number), True)
    samples = [task.train_sample(0, at) for at in range(200)] + task.validation_samples(200)
    assert not any(sample.startswith(LONG) for sample in samples)
    same = [sample for at in range(200) if not (sample := other.train_sample(0, at)).startswith(LONG)]
    assert set(same) <= set(samples)
    assert task == other
    with pytest.raises(DataError, match=r"prompts of \d+ training samples in a row leave no room for an answ"):
        Questions(share=1).leave_out_long_prompts(renderer(), 80)


class Faulty(Questions):
    def prompt(self, sample: str) -> str:
        raise KeyError("question")


def test_prompt_that_raises_is_left_to_its_rollout() -> None:
    assert Faulty().leave_out_long_prompts(renderer(), 80) == ""
    assert Faulty().train_sample(0, 0) == Questions().train_sample(0, 0)


def test_environment_of_the_user_may_shorten_its_prompts() -> None:
    assert OwnEnv().leave_out_long_prompts(renderer(), 80) == ""
    assert any(OwnEnv().train_sample(0, at).startswith(LONG) for at in range(50))
