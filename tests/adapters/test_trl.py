"""Rows, reward functions and environments written for TRL, with `datasets` and TRL's own functions."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from adapters import trl_functions
from adapters.playing import calling, play
from byte_tokenizer import byte_tokenizer

from titan_rl import (
    ChatTemplateRenderer,
    Completion,
    FinishReason,
    Reward,
    Rollouter,
    Rubric,
    SamplingParams,
    VersionSpan,
)
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.tasks.adapters.trl import TRLTask

SUMS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b), "level": a} for a in range(10) for b in range(10)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    trl_functions.calls.clear()


def named(*names: str) -> tuple[str, ...]:
    return tuple(f"adapters.trl_functions:{name}" for name in names)


def rows(folder: Path, given: Sequence[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    return str(path)


def sums(folder: Path, *functions: str, **settings: Any) -> TRLTask:
    return TRLTask(dataset=rows(folder, SUMS), reward_funcs=named(*functions), **settings)


def test_rows_load_from_every_datasets_source(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(SUMS)
    data.to_csv(tmp_path / "a.csv")
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=data, test=data.select([5])).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    rows(tmp_path / "folder", SUMS)
    for place in ("a.csv", "a.parquet", "saved", "splits", "folder"):
        task = TRLTask(dataset=str(tmp_path / place), reward_funcs=named("never"), held_out=0)
        epoch = [task.train_sample(0, index)["prompt"] for index in range(100)]
        assert sorted(epoch) == sorted(row["prompt"] for row in SUMS), place
    task = TRLTask(dataset=str(tmp_path / "splits"), reward_funcs=named("never"), validation_split="test")
    assert [row["prompt"] for row in task.validation_samples(10)] == [SUMS[5]["prompt"]]


def test_rows_load_from_files_as_people_have_them(tmp_path: Path) -> None:
    lines = "\ufeff" + "\n".join(json.dumps(row) for row in SUMS)
    table = "\ufeffprompt,answer,level\n" + "".join(f"{row['prompt']},{row['answer']},{row['level']}\n" for row in SUMS)
    numbered = [{**row, "answer": int(row["answer"])} for row in SUMS]  # `datasets` makes numbers of them
    for name, text, expected in [
        ("a.json", lines, SUMS),
        ("a.ndjson", lines, SUMS),
        ("a.jsonl.gz", lines, SUMS),
        ("a.csv", table, numbered),
        ("a.csv.gz", table, numbered),
        ("a.tsv", table.replace(",", "\t"), numbered),
    ]:
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        task = TRLTask(dataset=str(tmp_path / name), reward_funcs=named("never"), held_out=0)
        assert sorted((task.train_sample(0, at) for at in range(100)), key=repr) == sorted(expected, key=repr), name


def test_split_of_a_file_of_json(tmp_path: Path) -> None:
    task = sums(tmp_path, "never", split="train[:3]+train[98:]", validation_split="train[50%:60%]")
    trained = [task.train_sample(0, at) for at in range(5)]
    assert sorted(map(repr, trained)) == sorted(map(repr, (*SUMS[:3], *SUMS[98:])))
    assert sorted(map(repr, task.validation_samples(99))) == sorted(map(repr, SUMS[50:60]))
    with pytest.raises(ConfigError, match=r"split 'test'.*Unknown split \"test\""):
        sums(tmp_path, "never", split="test").check_settings()


def test_arrow_data_invents_no_nulls_in_chats_and_json_keeps_its_own(tmp_path: Path) -> None:
    def call(**arguments: Any) -> dict[str, Any]:
        return {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
        }

    prompt = [{"role": "user", "content": "Hi"}, call(a=1), call(b=2), {"role": "user", "content": "Go on"}]
    datasets.Dataset.from_list([{"prompt": prompt, "note": None}] * 3).to_parquet(tmp_path / "a.parquet")
    task = TRLTask(dataset=str(tmp_path / "a.parquet"), reward_funcs=named("never"), held_out=0)
    assert task.train_sample(0, 0) == {"prompt": prompt, "note": None}
    own = [prompt[0], call(a=None), prompt[3]]
    path = rows(tmp_path, [{"prompt": own}, {"prompt": own, "level": 1}])
    task = TRLTask(dataset=path, reward_funcs=named("never"), held_out=0)
    found = sorted((task.train_sample(0, at) for at in range(2)), key=repr)
    assert found == [{"prompt": own, "level": 1}, {"prompt": own, "level": None}]


def test_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer,answer\na,b,c\n")
    with pytest.raises(ConfigError, match=r"a.csv has more than one 'answer'"):
        TRLTask(dataset=str(tmp_path / "a.csv"), reward_funcs=named("never")).check_settings()


def test_held_out_rows_are_never_trained_on(tmp_path: Path) -> None:
    task = sums(tmp_path, "never")
    held_out = {row["prompt"] for row in task.validation_samples(100)}
    trained = [task.train_sample(0, index)["prompt"] for index in range(300)]
    assert 2 <= len(held_out) <= 25
    assert len(set(trained)) == 100 - len(held_out)
    assert not held_out & set(trained)
    again = sums(tmp_path, "never")
    assert trained == [again.train_sample(0, index)["prompt"] for index in range(300)]
    assert trained != [task.train_sample(1, index)["prompt"] for index in range(300)]


async def test_reward_functions_get_texts_for_a_text_prompt(tmp_path: Path) -> None:
    task = sums(tmp_path, "remembered", "is_right", reward_weights=(1.0, 3.0), system="Be brief.")
    row = task.train_sample(0, 0)
    group = await play(task, row, lambda _: row["answer"], lambda _: "none")
    assert [rollout.reward for rollout in group.rollouts] == [3.0, 0.0]  # a weighted sum, as in TRL
    assert group.rollouts[0].reward_breakdown == {"remembered": 0.0, "is_right": 1.0}
    assert group.rollouts[0].messages[:2] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": row["prompt"]},
    ]
    (given,) = trl_functions.calls
    assert given["prompts"] == [row["prompt"]] * 2
    assert given["completions"] == [row["answer"], "none"]
    assert (given["answer"], given["level"]) == ([row["answer"]] * 2, [row["level"]] * 2)
    assert not given.keys() & {"prompt", "environments"}


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("forgets_its_return", "returned None for group .*; it must return a sequence"),
        ("too_few", "returned 1 values for the 2 rollouts of group"),
        ("logs_too_few", r"failed on group .*log_extra\('length', ...\) got 1 values for 2 completions"),
    ],
)
async def test_wrong_number_of_values_of_a_reward_function_is_named(tmp_path: Path, function: str, problem: str):
    task = sums(tmp_path, function)
    group = await play(task, task.train_sample(0, 0), lambda _: "1", lambda _: "2")
    assert group.failure is not None
    assert re.search(f"reward '{function}' {problem}", group.failure.error)


async def test_reward_functions_get_messages_for_a_conversational_prompt(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1 + 1?"}]
    task = TRLTask(dataset=rows(tmp_path, [{"prompt": prompt}]), reward_funcs=named("remembered"), held_out=0)
    await play(task, task.train_sample(0, 0), lambda _: "2")
    (given,) = trl_functions.calls
    assert given["prompts"] == [prompt]
    assert given["completions"] == [[{"role": "assistant", "content": "2"}]]


async def test_prompt_can_be_another_column_or_a_template(tmp_path: Path) -> None:
    path = rows(tmp_path, [{"question": "1 + 1?", "answer": "2"}])
    for prompt, said in (("question", "1 + 1?"), ("{question} Briefly!", "1 + 1? Briefly!")):
        task = TRLTask(dataset=path, reward_funcs=named("remembered"), prompt=prompt, held_out=0)
        await play(task, task.train_sample(0, 0), lambda _: "2")
        assert trl_functions.calls[-1]["prompts"] == [said]
        assert trl_functions.calls[-1]["question"] == ["1 + 1?"]


async def test_reward_functions_get_tokens_and_the_policy_step(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    renderer = ChatTemplateRenderer(tokenizer)
    replies = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in ("18", "eighteen")]
    given_out = iter(replies)

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        reply = next(given_out)
        spans = [VersionSpan(4, len(reply) - 1), VersionSpan(5, 1)]
        return Completion(request_id, reply, [0.0] * len(reply), FinishReason.STOP, spans)

    task = sums(tmp_path, "remembered", "overlong")
    rollouter = Rollouter(lambda sample: task.make_env(sample, renderer), task.rubric(), max_context=200)
    group = await rollouter.run_group(
        generate, task.train_sample(0, 0), group_id="g", group_size=2, sampling=SamplingParams(max_tokens=16)
    )
    (given,) = trl_functions.calls
    assert given["completion_ids"] == replies
    assert given["completions"] == ["18", "eighteen"]
    assert given["trainer_state"].global_step == 5
    assert [rollout.reward for rollout in group.rollouts] == [0.0, -0.8]  # TRL's own function, which counts tokens


async def test_none_excludes_a_reward_and_logged_values_are_recorded(tmp_path: Path) -> None:
    task = sums(tmp_path, "of_long_ones", "is_right")
    row = {"prompt": "", "answer": "yes"}
    group = await play(task, row, lambda _: "yes", lambda _: "no", lambda _: "never so")
    assert [rollout.reward for rollout in group.rollouts] == [1.5, 0.0, 0.5]
    logged = {"longest": 8.0}
    assert [rollout.reward_breakdown for rollout in group.rollouts] == [
        {**logged, "length": 3.0, "of_long_ones": 0.5, "is_right": 1.0},
        {**logged, "length": 2.0, "is_right": 0.0},
        {**logged, "length": 8.0, "of_long_ones": 0.5, "is_right": 0.0},
    ]


async def test_rollout_without_any_reward_value_has_no_advantage(tmp_path: Path) -> None:
    task = sums(tmp_path, "of_long_ones", "never")
    group = await play(task, {"prompt": ""}, lambda _: "yes", lambda _: "no", lambda _: "never")
    assert [rollout.reward for rollout in group.rollouts] == [0.5, None, 0.5]
    assert [rollout.advantage for rollout in group.rollouts] == [0.0, None, 0.0]


async def test_async_reward_functions_run_concurrently(tmp_path: Path) -> None:
    task = sums(tmp_path, "judge", "same_judge", reward_weights=(1.0, -1.0))
    (rollout,) = (await play(task, {"prompt": ""}, lambda _: "yes")).rollouts
    assert rollout.reward_breakdown == {"Judge": 1.0, "Judge_2": 1.0}
    assert rollout.reward == 0.0


async def test_reward_functions_can_run_in_threads(tmp_path: Path) -> None:
    task = sums(tmp_path, "thread", reward_funcs_in_thread=True)
    (rollout,) = (await play(task, {"prompt": ""}, lambda _: "yes")).rollouts
    assert rollout.reward not in (None, float(threading.get_ident()))


async def test_trl_reward_functions_work_unmodified(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "1 + 1?"}]
    functions = ("trl.rewards:think_format_reward",)
    task = TRLTask(dataset=rows(tmp_path, [{"prompt": prompt}]), reward_funcs=functions, held_out=0)
    row = task.train_sample(0, 0)
    group = await play(task, row, lambda _: "<think>\nhm\n</think>\n2", lambda _: "2")
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]


class TestEnvironments:
    """Environment class with `reset` and tool methods."""

    def task(self, folder: Path, *functions: str, **settings: Any) -> TRLTask:
        prompt = [{"role": "user", "content": "Use your tools."}]
        path = rows(folder, [{"prompt": prompt, "target": 3, "environment": "counter"}])
        (factory,) = named("Counter")
        given = {"environment_factory": factory, "held_out": 0, **settings}
        return TRLTask(dataset=path, reward_funcs=named(*functions), **given)

    async def test_methods_are_tools_and_get_reward_is_used(self, tmp_path: Path) -> None:
        task = self.task(tmp_path, "counted", "remembered")
        row = task.train_sample(0, 0)

        def counts(messages: Sequence[Message]) -> str | Message:
            return [calling("add", number=3), calling("look"), "Done."][sum(m["role"] == "tool" for m in messages)]

        def fails(messages: Sequence[Message]) -> str | Message:
            return "I cannot." if messages[-1]["role"] == "tool" else calling("add", number=-1)

        group = await play(task, row, counts, fails, max_turns=4)
        first, second = group.rollouts
        assert first.messages[0]["content"] == "Use your tools. Count to 3."
        assert [message["content"] for message in first.messages if message["role"] == "tool"] == ["3", "It is 3"]
        assert "only upwards" in second.messages[2]["content"]
        assert first.reward_breakdown == {"counted": 0.3, "remembered": 0.0, "Counter": 1.0}
        assert [rollout.reward for rollout in group.rollouts] == [1.3, 0.0]

        (given,) = trl_functions.calls
        mine, other = given["environments"]
        assert (mine.count, other.count) == (3, 0)
        assert (mine.closed, mine.rewards_asked) == (1, 1)
        assert mine.columns["prompt"] == row["prompt"]
        assert [message["role"] for message in given["completions"][0]] == ["assistant", "tool"] * 2 + ["assistant"]

    async def test_tools_are_offered_to_the_policy(self, tmp_path: Path) -> None:
        env = self.task(tmp_path).env({"target": 0})
        observation = await env.reset()
        assert observation.tools is not None
        assert [tool["function"]["name"] for tool in observation.tools] == ["add", "look"]  # pyright: ignore
        assert observation.messages == [{"role": "user", "content": ""}]
        await env.close()

    async def test_environment_is_rewarded_without_a_valid_call(self, tmp_path: Path) -> None:
        task = self.task(tmp_path, "counted")
        row = task.train_sample(0, 0)
        group = await play(task, row, lambda _: calling("add", number=3), lambda _: calling("add"), max_turns=1)
        assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.TRUNCATED_TURNS] * 2
        assert [rollout.reward for rollout in group.rollouts] == [1.3, 0.0]

    async def test_environment_is_rewarded_when_the_first_reply_is_truncated(self, tmp_path: Path) -> None:
        renderer = pytest.importorskip("renderers.qwen3").Qwen3Renderer(byte_tokenizer())

        async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
            return Completion(request_id, [65, 66], [0.0] * 2, FinishReason.LENGTH, [VersionSpan(0, 2)])

        task = self.task(tmp_path, "counted", tools=())
        row = {**task.train_sample(0, 0), "target": 0}
        rollouter = Rollouter(lambda sample: task.make_env(sample, renderer), task.rubric(), max_context=4000)
        group = await rollouter.run_group(
            generate, row, group_id="g", group_size=2, sampling=SamplingParams(max_tokens=2)
        )
        assert [rollout.reward_breakdown for rollout in group.rollouts] == [{"counted": 0.0, "Counter": 1.0}] * 2

    async def test_cancelled_scoring_can_be_repeated(self, tmp_path: Path) -> None:
        task = self.task(tmp_path, "counted_later")
        unjudged = SimpleNamespace(env=task.env, rubric=lambda: Rubric([Reward(lambda rollout: 0.0, name="none")]))
        group = await play(unjudged, task.train_sample(0, 0), lambda _: calling("add", number=2), max_turns=1)
        rubric = task.rubric()
        judging = asyncio.create_task(rubric.score(group))
        await trl_functions.at_counting.wait()
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        await rubric.score(group)
        assert group.rollouts[0].reward_breakdown == {"counted_later": 0.2, "Counter": 0.0}

    async def test_rows_select_the_environment(self, tmp_path: Path) -> None:
        counter, plain = named("Counter", "Plain")
        task = self.task(tmp_path, "kinds", environment_factory={"counter": counter, "plain": plain})
        row = task.train_sample(0, 0)
        (first,) = (await play(task, row, lambda _: "Done.")).rollouts
        (second,) = (await play(task, {**row, "environment": "plain"}, lambda _: "Done.")).rollouts
        assert first.reward_breakdown == {"kinds": 0.0, "Counter": 0.0}
        assert second.reward_breakdown == {"kinds": 1.0}

    async def test_environment_without_a_dataset(self) -> None:
        (plain,) = named("Plain")
        task = TRLTask(environment_factory=plain, reward_funcs=named("kinds"))
        task.check_settings()
        group = await play(task, task.train_sample(0, 5), lambda _: calling("wait"), max_turns=1)
        assert [rollout.reward for rollout in group.rollouts] == [1.0]
        assert len(task.validation_samples(2)) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"prompt": "questions"},
            r"task.prompt = 'questions': row 0 .* has no column 'questions'.*prompt, answer, level",
        ),
        ({"prompt": "{question}"}, r"row 0 .* has no column 'question'"),
        ({"reward_weights": (1.0, 2.0)}, "task.reward_weights has 2 values for 1 task.reward_funcs"),
        ({"reward_funcs": ()}, "task.reward_funcs is not set"),
        ({"reward_funcs": named("nothing")}, "no function nothing; it has: .*is_right"),
        ({"dataset": None}, "task.dataset is not set"),
        ({"split": "test"}, "Unknown split"),
        ({"held_out": 1e-9}, "has 100 rows for training and 0 held out"),
        ({"dataset": "no/such.jsonl"}, "no/such.jsonl"),
        ({"environment_factory": named("NoReset")[0]}, "NoReset has no method reset"),
        ({"environment_factory": {"a": named("Plain")[0]}}, "the column environment = 'None' is not one of"),
    ],
)
def test_check_settings_rejects_invalid_settings(
    settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    given = {"dataset": rows(tmp_path, SUMS), "reward_funcs": named("is_right"), **settings}
    with pytest.raises(ConfigError, match=said):
        TRLTask(**given).check_settings()
