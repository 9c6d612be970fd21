"""Sources of demonstrations, and errors about unusable ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from titan_rl import Demonstration
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.sft.demonstration_sources import best_rollouts, read_chats, task_demonstrations
from titan_rl.tasks.message_task import demonstrated

CHAT = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]


class NumberedTask:
    """Task whose demonstrations are its name and a running number."""

    def __init__(self, name: str, most: int = 10_000) -> None:
        self.name = name
        self.most = most

    def train_sample(self, seed: int, index: int) -> int: ...

    def validation_samples(self, count: int) -> list[int]: ...

    def make_env(self, sample: int, renderer: object) -> Any: ...

    def rubric(self) -> Any: ...

    def demonstrations(self, count: int) -> Iterable[Any]:
        for number in range(min(count, self.most)):
            yield Demonstration([{"role": "user", "content": self.name}, {"role": "assistant", "content": str(number)}])


def questions_and_answers(found: list[tuple[str, Demonstration]]) -> list[tuple[str, str]]:
    return [(one.messages[0]["content"], one.messages[1]["content"]) for _, one in found]


def test_tasks_are_interleaved_by_weight_in_their_own_order() -> None:
    found = questions_and_answers(task_demonstrations([(NumberedTask("a"), 3.0), (NumberedTask("b"), 1.0)], 400))
    for at in range(4, 401, 4):
        assert Counter(name for name, _ in found[:at]) == {"a": at * 3 // 4, "b": at // 4}
    assert [number for name, number in found if name == "a"] == [str(number) for number in range(300)]


def test_exhausted_task_leaves_the_rest_to_the_others() -> None:
    found = questions_and_answers(task_demonstrations([(NumberedTask("a", most=2), 1.0), (NumberedTask("b"), 1.0)], 10))
    assert Counter(name for name, _ in found) == {"a": 2, "b": 5}


def test_task_without_demonstrations_is_rejected() -> None:
    class Loud(NumberedTask):
        def demonstrations(self, count: int) -> Iterable[Any]:
            yield "5"

    with pytest.raises(ConfigError, match=r"int has no demonstrations: give it a method demonstrations\(count\)"):
        task_demonstrations([(3, 1.0)], 5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="NumberedTask gave no demonstration"):
        task_demonstrations([(NumberedTask("a", most=0), 1.0)], 5)
    with pytest.raises(
        DataError,
        match=r"demonstrations\(5\) of the task failed: .*number 0 is '5'; it must be a .*test_sources.py:\d+ in dem",
    ):
        task_demonstrations([(Loud("a"), 1.0)], 5)


def test_slow_demonstration_times_out_and_names_its_line() -> None:
    gate = threading.Event()

    class Slow(NumberedTask):
        def demonstrations(self, count: int) -> Iterable[Any]:
            yield from super().demonstrations(2)
            gate.wait()

    limits = RolloutConfig(rollout_timeout_s=0.05)
    with pytest.raises(
        DataError,
        match=r"demonstrations\(5\) of the task failed: .*one demonstration took longer than 0.05 s; raise "
        r"rollout.rollout_timeout_s .*test_sources.py:\d+ in demonstrations\)",
    ):
        task_demonstrations([(Slow("a"), 1.0)], 5, limits)
    gate.set()


class StopError(BaseException):
    """Raised by the signal handler."""


def test_signal_interrupts_the_wait_for_demonstrations() -> None:
    gate = threading.Event()

    class Slow(NumberedTask):
        def demonstrations(self, count: int) -> Iterable[Any]:
            os.kill(os.getpid(), signal.SIGUSR1)
            gate.wait()
            return super().demonstrations(count)

    def stop(*_: object) -> None:
        raise StopError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(StopError):
            task_demonstrations([(Slow("a"), 1.0)], 5)
    finally:
        signal.signal(signal.SIGUSR1, before)
        gate.set()


def test_hanging_environment_of_a_demonstration_times_out() -> None:
    class Env:
        async def reset(self) -> Any:
            await asyncio.Event().wait()

        async def step(self, message: Any) -> Any: ...

        async def close(self) -> None: ...

    class Waits(NumberedTask):
        def demonstrations(self, count: int) -> Iterable[Any]:
            yield from demonstrated([(Env(), lambda messages: "5")])

    limits = RolloutConfig(env_timeout_s=0.05)
    with pytest.raises(DataError, match=r"longer than env_timeout_s \(.*test_sources.py:\d+ in reset\)"):
        task_demonstrations([(Waits("a"), 1.0)], 5, limits)


def chats(folder: Path, *rows: Any) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_read_chats_returns_tools_and_line_numbers(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    file = chats(tmp_path, {"messages": CHAT}, "", {"messages": [CHAT[0], call], "tools": tools})
    (first, one), (second, other) = read_chats(file, 10)
    assert (first, second) == (f"{file}:1", f"{file}:3")
    assert one == Demonstration(CHAT)
    assert other.tools == tools
    assert other.messages[1]["content"] == ""
    assert len(read_chats(file, 1)) == 1


def read(folder: Path, row: Any) -> Demonstration:
    ((_, demonstration),) = read_chats(chats(folder, row), 10)
    return demonstration


ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}


def test_sharegpt_chats_with_function_calls_are_read(tmp_path: Path) -> None:
    call = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
    said = [("human", "2 + 3?"), ("gpt", "Let me see."), ("function_call", call), ("function_call", f"[{call}]")]
    said += [("observation", "5"), ("observation", "5"), ("gpt", "It is 5.")]
    conversations = [{"from": source, "value": value} for source, value in said]
    row = {"id": "c1", "conversations": conversations, "system": "Be brief.", "tools": json.dumps([ADD])}
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    assert read(tmp_path, row) == Demonstration(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [called, called]},
            {"role": "tool", "content": "5"},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ],
        [{"type": "function", "function": ADD}],
    )
    assert read(tmp_path, {"conversations": conversations[:2], "tools": "", "system": ""}).tools is None


def test_older_functions_of_openai_become_tools(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": '{"a": 2}'}
    messages = [
        CHAT[0],
        {"role": "assistant", "content": None, "function_call": call, "refusal": None, "annotations": []},
        {"role": "function", "name": "add", "content": "5"},
        {"role": "assistant", "content": [{"type": "text", "text": "It "}, {"type": "text", "text": "is 5."}]},
    ]
    found = read(tmp_path, {"messages": messages, "functions": [ADD], "parallel_tool_calls": False})
    assert found.tools == [{"type": "function", "function": ADD}]
    assert found.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]


def test_messages_that_must_not_be_learned_are_marked(tmp_path: Path) -> None:
    answers = [{"weight": 0}, {"train": False}, {"weight": 1}, {"train": True}, {}]
    messages = [message for marks in answers for message in (CHAT[0], {**CHAT[1], **marks})]
    learned = [message.get("weight", 1) for message in read(tmp_path, {"messages": messages}).messages[1::2]]
    assert learned == [0, 0, 1, 1, 1]


def test_chats_are_read_from_every_format_of_rows(tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text("\ufeff" + json.dumps([{"messages": CHAT}] * 3), encoding="utf-8")
    assert read_chats(tmp_path / "chats.json", 2) == [
        (f"{tmp_path}/chats.json[{number}]", Demonstration(CHAT)) for number in range(2)
    ]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", ":2 is not valid JSON"),
        ([1], ":2 is not a JSON object: [1]"),
        ({"id": 7}, ":2: messages must be a list of messages, not null"),
        ({"conversations": "Hi"}, ':2: conversations must be a list of messages, not "Hi"'),
        ({"mesages": CHAT, "odd": 1}, ":2: mesages, odd has no meaning in a chat here, which has messages, conv"),
        ({"messages": CHAT, "tool": []}, ":2: tool has no meaning in a chat here, which has messages, conversations"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "wieght": 0}]},
            ":2: messages[1]: wieght has no meaning in a chat here, wh",
        ),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, ":2: messages[1].weight is 0.5; it must be 1 to learn"),
        ({"messages": [CHAT[0], {**CHAT[1], "train": "no"}]}, ':2: messages[1].train is "no"; it must be 1 to learn'),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, ":2: messages has no assistant message with a weight"),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            ':2: messages[0].role is "human"; it must be one of system',
        ),
        (
            {"conversations": [{"from": "bot", "value": "a"}]},
            ':2: conversations[0].from is "bot"; it must be one of hum',
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add(1)"}]},
            ":2: conversations[0].value is not valid JSON",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"arguments": {}}'}]},
            ":2: conversations[0].value must be an object with the name and the arguments of a call",
        ),
        ({"messages": CHAT, "functions": "["}, ":2: functions is not valid JSON"),
        ({"messages": ["a"]}, ':2: messages[0] must be an object with role and content, not "a"'),
        ({"messages": [{"role": "bot", "content": "a"}]}, ':2: messages[0].role is "bot"; it must be one of system,'),
        ({"messages": [*CHAT, {"role": "user", "content": 5}]}, ":2: messages[2].content must be a string, not 5"),
        ({"messages": CHAT[:1]}, ":2: messages has no assistant message"),
        ({"messages": CHAT, "tools": {"a": 1}}, ':2: tools must be a list of objects, not {"a": 1}'),
    ],
)
def test_invalid_chat_row_error_names_file_line_and_field(tmp_path: Path, row: Any, complaint: str) -> None:
    file = chats(tmp_path, {"messages": CHAT}, row)
    with pytest.raises(DataError) as caught:
        read_chats(file, 10)
    assert str(caught.value).startswith(f"{file}{complaint}")


def rollout(group: str, reward: float | None, answer: str, **more: Any) -> dict[str, Any]:
    messages = [CHAT[0], {"role": "assistant", "content": answer}]
    record = {"rollout_id": f"{group}/0", "group_id": group, "reward": reward, "messages": messages}
    return {"step": 1, "phase": "train", "status": "completed", **record, **more}


def test_best_rollouts_of_each_group_are_selected(tmp_path: Path) -> None:
    rows = [rollout("g0", 0.1, "a"), rollout("g1", 0.2, "b"), rollout("g0", 0.9, "c"), rollout("g0", 0.5, "d")]
    rows += [
        rollout("g2", 1.0, "e", status="error_env"),
        rollout("g3", None, "f"),
        rollout("v", 1.0, "g", phase="validation"),
    ]
    chats(tmp_path, *rows, '{"cut sho').rename(tmp_path / "rollouts.jsonl")

    def answers(**how: Any) -> list[str]:
        how = {"top_k": 1, "min_reward": None, **how}
        return [answer for _, answer in questions_and_answers(best_rollouts(tmp_path, 10, **how))]

    assert answers() == ["c", "b"]
    assert answers(top_k=2) == ["c", "d", "b"]
    assert answers(top_k=9, min_reward=0.5) == ["c", "d"]
    with pytest.raises(DataError, match=r"no completed rollout of messages with a reward of sft\.min_reward = 2 or"):
        answers(min_reward=2.0)


def test_rollouts_with_tool_calls_are_rejected_without_their_tools(tmp_path: Path) -> None:
    row = rollout("g0", 0.1, "a")
    row["messages"][1]["tool_calls"] = [{"function": {"name": "add"}}]
    chats(tmp_path, row).rename(tmp_path / "rollouts.jsonl")
    with pytest.raises(DataError, match="does not record the tools that were offered"):
        best_rollouts(tmp_path, 10, top_k=1, min_reward=None)
