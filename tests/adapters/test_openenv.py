"""OpenEnv's protocol against a fake server; `test_real_openenv.py` uses OpenEnv's own server."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from adapters.fake_openenv import Answer, error, observed, serving
from adapters.playing import calling, play

from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.tasks.adapters.openenv import OpenEnv


def guess_number(message: Message) -> dict[str, Any]:
    return {"guess": int(message["content"])}


def hint(observation: Any) -> str:
    return f"It is {observation['hint']}."


def at_step(*answers: Any) -> Answer:
    """Answer the first step, the second and so on with these."""
    left = list(answers)
    return lambda message: left.pop(0) if message["type"] == "step" else None


async def one(task: OpenEnv, *said: str | Message, **limits: Any) -> Any:
    replies = iter(said)
    group = await play(task, task.train_sample(0, 0), lambda _: next(replies), **limits)
    return group.rollouts[0]


async def test_rollout_is_one_episode_with_summed_rewards() -> None:
    steps = at_step(observed({"echo": "a"}, reward=0.5), observed({"echo": "b"}, reward=1, done=True))
    async with serving(steps) as server:
        task = OpenEnv(url=server.url, reset={"level": 2}, prompt="Echo!", system="Be brief.")
        rollout = await one(task, " hello ", "you")
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.5)
    seed = task.train_sample(0, 0)["seed"]
    assert server.heard == [
        {"type": "reset", "data": {"seed": seed, "level": 2}},
        {"type": "step", "data": {"message": "hello"}},
        {"type": "step", "data": {"message": "you"}},
        {"type": "close"},
    ]
    said = [(message["role"], message["content"]) for message in rollout.messages]
    assert said[:2] == [("system", "Be brief."), ("user", f'Echo!\n\n{{"seed":{seed},"level":2}}')]
    assert said[3:] == [("user", '{"echo":"a"}'), ("assistant", "you"), ("user", '{"echo":"b"}')]
    assert server.num_open == 0


async def test_functions_map_actions_and_observations() -> None:
    def answer(message: dict[str, Any]) -> dict[str, Any]:
        return observed({"hint": str(message["data"].get("guess"))}, done=message["type"] == "step")

    async with serving(answer) as server:
        here = "adapters.test_openenv"
        task = OpenEnv(url=server.url, action=f"{here}:guess_number", observation=f"{here}:hint")
        task.check_settings()
        rollout = await one(task, "no number", "7")
    assert rollout.messages[0]["content"] == "It is None."
    assert "That is not an action: invalid literal" in rollout.messages[2]["content"]
    assert rollout.messages[-1]["content"] == "It is 7."
    assert rollout.reward_breakdown == {"reward": 0.0, "invalid_actions": 1.0}


async def test_rejected_actions_are_reported_and_eventually_end_the_rollout() -> None:
    async with serving(at_step(*[error("VALIDATION_ERROR")] * 2)) as server:
        task = OpenEnv(url=server.url, action="json", max_invalid_actions=2)
        rollout = await one(task, '{"move": 1}', '{"move": 2}', "[]")
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.reward_breakdown["invalid_actions"] == 3.0
    assert [message["data"] for message in server.heard[1:3]] == [{"move": 1}, {"move": 2}]
    assert "JSON object" in rollout.messages[-1]["content"]


async def test_environment_tools_are_offered_to_the_policy() -> None:
    tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        action = message["data"]
        if action.get("type") == "list_tools":
            return observed({"tools": [tool]})
        if action.get("type") == "call_tool" and action["tool_name"] == "add":
            result = {"content": [{"type": "text", "text": "3"}], "data": action["arguments"]["a"] + 1}
            return observed({"tool_name": "add", "result": result, "error": None}, reward=0.25)
        if action.get("type") == "call_tool":
            return observed({"tool_name": "?", "result": None, "error": {"message": "no such tool"}})
        return observed({})

    async with serving(answer) as server:
        task = OpenEnv(url=server.url, action="tools", prompt="Add up.", observation="adapters.test_openenv:nothing")
        env = task.env(task.train_sample(0, 0))
        observation = await env.reset()
        assert observation.tools == [
            {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": tool["input_schema"]}}
        ]
        await env.close()
        rollout = await one(task, calling("add", a=2), calling("sub"), "3")
    assert rollout.messages[0]["content"] == "Add up."
    answers = [message for message in rollout.messages if message["role"] == "tool"]
    assert [message["content"] for message in answers] == ["3", "Error: no such tool"]
    assert answers[0]["tool_call_id"] == "1"
    assert rollout.reward_breakdown == {"reward": 0.25, "invalid_actions": 1.0}


def nothing(observation: Any) -> str:
    return ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("drop", "failed at a step: ConnectionClosed"),
        ("hang", "has not answered a step in 0.1 s"),
        (error("EXECUTION_ERROR"), "reports an error of a step: it was EXECUTION_ERROR"),
        ({"type": "state", "data": {}}, "answered a step with"),
        ({"type": "observation", "data": {"observation": 3}}, "observation that is not a table: 3"),
    ],
)
async def test_server_faults_are_environment_errors(fault: Any, said: str) -> None:
    async with serving(at_step(fault)) as server:
        rollout = await one(OpenEnv(url=server.url, answer_timeout_s=0.1), "hello")
        assert rollout.status is RolloutStatus.ERROR_ENV
        assert said in str(rollout.error)
        while server.num_open:  # noqa: ASYNC110  the connection is closed in every case
            await asyncio.sleep(0)


async def test_unreachable_server_is_an_environment_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    rollout = await one(OpenEnv(url=f"http://127.0.0.1:{port}"), "hello")
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert "cannot be reached: ConnectionRefusedError" in str(rollout.error)


async def test_waits_for_a_full_server_until_the_timeout() -> None:
    async with serving(at_step(*[observed({}, done=True)] * 4), places=1) as server:
        task = OpenEnv(url=server.url, open_timeout_s=10.0)
        group = await play(task, task.train_sample(0, 0), *[lambda _: "hello"] * 4)
        assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED] * 4
        assert server.most_open == 1
        server.places = 0
        rollout = await one(OpenEnv(url=server.url, open_timeout_s=0.1), "hello")
    assert "set scheduling.max_running_rollouts" in str(rollout.error)


async def test_training_and_validation_have_different_seeds() -> None:
    task = OpenEnv(url="https://host/env")
    assert {task.train_sample(0, index)["seed"] % 2 for index in range(50)} == {0}
    assert {sample["seed"] % 2 for sample in task.validation_samples(50)} == {1}


def test_rejects_an_invalid_url() -> None:
    with pytest.raises(ValueError, match="not a server address"):
        OpenEnv(url="localhost:8000")
