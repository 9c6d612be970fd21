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


@pytest.mark.parametrize(("at", "hint"), [("vlaue", "write value for vlaue"), ("form", "write from for form")])
def test_misspelt_key_of_sharegpt_is_answered_with_its_own_keys(tmp_path: Path, at: str, hint: str) -> None:
    message = {"from": "human", "value": "a"}
    message[at] = message.pop("value" if at == "vlaue" else "from")
    with pytest.raises(DataError, match=hint):
        read(tmp_path, {"conversations": [message, {"from": "gpt", "value": "b"}]})


def test_thinking_of_an_answer_is_its_thought(tmp_path: Path) -> None:
    found = read(tmp_path, {"messages": [CHAT[0], {**CHAT[1], "thinking": "2 and 3."}]})
    assert found.messages[1] == {**CHAT[1], "reasoning_content": "2 and 3."}


def test_text_as_it_was_written_is_read_with_its_parts(tmp_path: Path) -> None:
    answer = {**CHAT[1], "reasoning_content": "2 and 3.", "written": "<think>2 and 3.</think>5"}
    assert read(tmp_path, {"messages": [CHAT[0], answer]}).messages[1] == answer


def test_flat_calls_are_calls_of_functions(tmp_path: Path) -> None:
    call = {"id": "a", "name": "add", "arguments": {"a": 2}}
    found = read(tmp_path, {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [call]}]})
    function = {"name": "add", "arguments": {"a": 2}}
    assert found.messages[1]["tool_calls"] == [{"type": "function", "id": "a", "function": function}]


def test_nulls_of_a_call_are_left_out(tmp_path: Path) -> None:
    row = with_call({"name": "add", "arguments": "{}"}, index=None)
    function = {"name": "add", "arguments": "{}"}
    assert read(tmp_path, row).messages[1]["tool_calls"] == [{"type": "function", "id": "a", "function": function}]


def test_call_after_the_beginning_of_an_answer_stays_its_continuation(tmp_path: Path) -> None:
    begun = {"from": "gpt", "value": "So", "prefix": True}
    call = {"from": "function_call", "value": '{"name": "f"}'}
    found = read(tmp_path, {"conversations": [ASKED, begun, call]})
    assert [message.get("prefix", False) for message in found.messages] == [False, True, False]


def test_keys_of_a_schema_that_a_template_shows_are_kept(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {**ADD, "return": {"type": "number"}, "strict": True}}
    assert read(tmp_path, {"messages": CHAT, "tools": [tool]}).tools == [tool]


CALL = ":2: messages[1].tool_calls[0]"
ASKED = {"from": "human", "value": "2 + 3?"}


def with_call(function: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "id": "a", "function": function, **more}
    return {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}


def with_tool(function: Any) -> dict[str, Any]:
    return {"messages": CHAT, "tools": [{"type": "function", "function": function}]}


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
        ({"messages": CHAT, "conversations": CHAT}, ":2 has both messages and conversations; remove one of them"),
        ({"messages": CHAT, "tools": [ADD], "functions": [ADD]}, ":2 has both tools and functions; remove one of them"),
        (
            {"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"},
            ':2: system is "b", but messages begin with another system message; remove one of them',
        ),
        (with_call({"name": "add", "argumets": "{}"}), f"{CALL}.function: argumets has no meaning in a chat here"),
        (with_call({"name": "add", "arguments": "{"}), f"{CALL}.function.arguments is not valid JSON"),
        (with_call({"name": "add", "arguments": "[1]"}), f'{CALL}.function.arguments must be an object, not "[1]"'),
        (with_call({"arguments": "{}"}), f"{CALL}.function must be an object with the name and the arguments of a"),
        (with_call({"name": "add"}, functon=1), f"{CALL}: functon has no meaning in a chat here"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "tool_calls": {"name": "add"}}]},
            ':2: messages[1].tool_calls must be a list of calls, not {"name": "add"}',
        ),
        (
            {
                "messages": [
                    CHAT[0],
                    {"role": "assistant", "tool_calls": [{"name": "f"}], "function_call": {"name": "f"}},
                ]
            },
            ":2: messages[1] has both function_call and tool_calls; remove one of them",
        ),
        (
            {"conversations": [ASKED, {"from": "function_call", "value": '{"name": "add", "argumets": {}}'}]},
            ":2: conversations[1].value: argumets has no meaning in a chat here, which has name, arguments; write "
            "arguments for argumets",
        ),
        (
            {"messages": [{**CHAT[0], "tool_calls": [{"function": {"name": "add"}}]}, CHAT[1]]},
            ":2: messages[0].tool_calls has a meaning only in a message of the assistant; remove it, or change",
        ),
        (
            {"messages": [{**CHAT[0], "prefix": True}, CHAT[1]]},
            ":2: messages[0].prefix has a meaning only in a message of the assistant",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "tool_call_id": "a"}]},
            ":2: messages[1].tool_call_id has a meaning only in a message of a tool; remove it, or change the role",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "prefix": True}]},
            ":2: messages[1].prefix is true, but no message of the assistant follows; remove the mark, or add the rest",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "prefix": "yes"}, CHAT[1]]},
            ':2: messages[1].prefix is "yes"; it must be true',
        ),
        ({"messages": [*CHAT, CHAT[1]]}, ":2: messages[1] and [2] are both from the assistant"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "thinking": "2", "reasoning_content": "3"}]},
            ":2: messages[1] has both thinking and reasoning_content; remove one of them",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "written": "6"}]},
            ':2: messages[1].written is "6", which does not have the content, "5"; remove written, or correct it',
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "reasoning_content": "2", "written": "5"}]},
            ':2: messages[1].written is "5", which does not have the reasoning_content, "2"',
        ),
        ({"messages": [CHAT[0], {**CHAT[1], "reasoning_content": 2}]}, ":2: messages[1].reasoning_content must be a"),
        (with_tool({"name": "add", "descriptn": "a"}), ":2: tools[0]: write description for descriptn"),
        (with_tool({"description": "a"}), ':2: tools[0] must have a function with a name, not {"desc'),
        (
            {"messages": CHAT, "tools": [{"type": "function", "fucntion": ADD}]},
            ":2: tools[0]: write function for fucntion",
        ),
        (
            {"conversations": [{"from": "human", "vlaue": "a"}, {"from": "gpt", "value": "b"}]},
            ":2: conversations[0]: vlaue has no meaning in a chat here, which has from, value, name",
        ),
        (
            {"conversations": [{"form": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            ":2: conversations[0]: form has no meaning in a chat here, which has from, value, name",
        ),
        (
            {"conversations": [{"from": "human", "value": "a", "role": "user"}, {"from": "gpt", "value": "b"}]},
            ":2: conversations[0]: role has no meaning in a chat here, which has from, value, name",
        ),
        (
            {"instruction": "a", "input": "", "output": "b"},
            ':2: instruction and output are no chat; write {"messages": [{"role": "user", "content": instruction}, '
            '{"role": "assistant", "content": output}]}, with the input, if there is one, after the instruction',
        ),
        (
            {"prompt": "a", "completion": "b"},
            ':2: prompt and completion are no chat; write {"messages": [{"role": "user", "content": prompt}, '
            '{"role": "assistant", "content": completion}]}',
        ),
        (
            {"prompt": CHAT[:1], "completion": CHAT[1:]},
            ':2: prompt and completion are no chat; write {"messages": prompt + completion}',
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            ':2: prompt and chosen are no chat; write {"messages": [{"role": "user", "content": prompt}, ',
        ),
        ({"text": "a", "label": 1}, ":2: text, label has no meaning in a chat here"),
        (
            {"instruction": "a"},
            ":2: instruction has no meaning in a chat here, which has messages, conversations, system, tools, "
            "functions; remove it, or rename it",
        ),
        (
            {"messages": CHAT, "prompt": "a", "completion": "b"},
            ":2: prompt, completion has no meaning in a chat here",
        ),
        (
            {
                "conversations": [
                    ASKED,
                    {"from": "function_call", "value": '{"name": "f"}', "tool_calls": [{"name": "f"}]},
                ]
            },
            ":2: conversations[1] has both value and tool_calls; remove one of them",
        ),
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
