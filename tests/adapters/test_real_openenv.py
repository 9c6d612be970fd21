"""OpenEnv's own server, in a separate virtual environment. Run with `make test-clients`."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters.playing import calling, play
from own_venv import asked_for, python_with

from titan_rl.rollout.types import RolloutStatus
from titan_rl.tasks.adapters.openenv import OpenEnv, Session

PROGRAM = Path(__file__).parent / "programs" / "openenv_server.py"

pytestmark = asked_for


@pytest.fixture(scope="module")
def ports(request: pytest.FixtureRequest) -> Iterator[tuple[int, ...]]:
    """Ports of the guessing game and of the environment with tools."""
    python = python_with(request.config.cache, "openenv", "openenv-core==0.3.0")
    server = subprocess.Popen([python, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield tuple(map(int, server.stdout.readline().split()))
    finally:
        server.kill()
        server.wait()


def guessing(port: int, **settings: Any) -> OpenEnv:
    return OpenEnv(url=f"http://127.0.0.1:{port}", action="json", reset={"largest": 4}, **settings)


def halving(messages: Any) -> str:
    low, high = 1, 4
    for said, answer in zip(messages[1::2], messages[2::2], strict=False):
        guess = int(re.findall(r"\d+", said["content"])[0])
        low, high = (guess + 1, high) if "higher" in answer["content"] else (low, guess - 1)
    return f'{{"guess": {(low + high) // 2}}}'


async def test_concurrent_episodes_close_their_sessions(ports: tuple[int, ...]) -> None:
    task = guessing(ports[0])
    for index in range(3):
        group = await play(task, task.train_sample(0, index), *[halving] * 3)
        assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED] * 3
        assert len({str(rollout.messages[1::2]) for rollout in group.rollouts}) == 1  # the same number to guess
        turns = len(group.rollouts[0].turns)
        assert group.rollouts[0].reward == pytest.approx(1 - 0.1 * (turns - 1))
        assert "between 1 and 4" in group.rollouts[0].messages[0]["content"]
    session = Session(task.url, open_timeout_s=10, answer_timeout_s=10)
    assert (await session.open(seed=1)).observation["open_sessions"] == 1
    assert not (await session.step({"guess": 0})).done
    await session.close()


async def test_rejected_actions_are_reported_and_server_errors_are_faults(ports: tuple[int, ...]) -> None:
    task = guessing(ports[0], max_invalid_actions=1)
    replies = iter(['{"gues": 3}', '{"guess": "three"}'])
    (refused,) = (await play(task, task.train_sample(0, 0), lambda _: next(replies))).rollouts
    assert refused.reward_breakdown == {"reward": 0.0, "invalid_actions": 2.0}
    assert "guess" in refused.messages[-1]["content"]
    (broken,) = (await play(task, task.train_sample(0, 0), lambda _: '{"guess": 99}')).rollouts
    assert broken.status is RolloutStatus.ERROR_ENV
    assert "the environment broke" in str(broken.error)


async def test_waits_for_a_full_server(ports: tuple[int, ...]) -> None:
    task = guessing(ports[0])
    group = await play(task, task.train_sample(0, 0), *[halving] * 8)
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.COMPLETED] * 8
    sessions = [Session(task.url, open_timeout_s=0.2, answer_timeout_s=10) for _ in range(4)]
    for session in sessions[:3]:
        await session.open()
    with pytest.raises(ConnectionError, match="max_concurrent_envs"):
        await sessions[3].open()
    await asyncio.gather(*(session.close() for session in sessions))


async def test_mcp_environment_tools(ports: tuple[int, ...]) -> None:
    task = OpenEnv(url=f"http://127.0.0.1:{ports[1]}", action="tools", prompt="Echo.")
    env = task.env(task.train_sample(0, 0))
    observation = await env.reset()
    assert observation.tools is not None
    (tool,) = observation.tools
    assert tool["function"]["name"] == "echo"  # pyright: ignore
    assert set(tool["function"]["parameters"]["properties"]) == {"text", "times"}  # pyright: ignore
    await env.close()
    replies = iter([calling("echo", text="ab", times=2), calling("echo", txt="ab"), calling("ech"), "Done."])
    (rollout,) = (await play(task, task.train_sample(0, 0), lambda _: next(replies))).rollouts
    answers = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert rollout.status is RolloutStatus.COMPLETED
    assert answers[0] == "abab"
    assert answers[1].startswith("Error:")
    assert answers[2].startswith("Error:")
    assert rollout.reward_breakdown == {"reward": 0.0, "invalid_actions": 2.0}
