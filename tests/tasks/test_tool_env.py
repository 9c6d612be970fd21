"""Tool calls of `ToolEnv`: results, errors, limits, and rewards."""

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from background import HANG_S

from titan_rl import MessageStep, RolloutStatus, ToolEnv
from titan_rl.core.errors import DataError


def call(name: str, arguments: object = None, id: str | None = None) -> dict[str, Any]:
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def calls(*made: dict[str, Any]) -> Mapping[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(made)}


def contents(step: MessageStep) -> list[str]:
    assert step.status is None
    return [message["content"] for message in step.messages]


def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


async def later(word: str) -> dict[str, Any]:
    """Answer after other tasks have run."""
    await asyncio.sleep(0)
    return {"word": word, "right": True, "left": None}


async def test_tool_calls_are_answered_until_a_final_answer() -> None:
    env = ToolEnv("What is 6 / 3?", [divide, later])
    observation = await env.reset()
    assert observation.messages == [{"role": "user", "content": "What is 6 / 3?"}]
    assert observation.tools is not None
    assert [tool["function"]["name"] for tool in observation.tools] == ["divide", "later"]  # type: ignore
    step = await env.step(calls(call("divide", {"a": 6, "b": 3}, "c1"), call("later", {"word": "hi"})))
    assert step.messages == [
        {"role": "tool", "name": "divide", "content": "2.0", "tool_call_id": "c1"},
        {"role": "tool", "name": "later", "content": '{"word":"hi","right":true,"left":null}'},
    ]
    assert step.rewards == {"tool_calls": 2.0, "tool_errors": 0.0}
    last = await env.step({"role": "assistant", "content": "2"})
    assert (last.status, last.rewards) == (RolloutStatus.COMPLETED, {"tool_calls": 0.0, "tool_errors": 0.0})


class Opaque:
    """Object that JSON cannot represent."""


async def test_tool_result_is_deterministic_json() -> None:
    step = await ToolEnv("go", lookup).step(calls(call("lookup"), call("lookup", {"known": True})))
    assert contents(step) == ['{"score":null}', '[null,"<test_tool_env.Opaque object>"]']


def lookup(known: bool = False) -> object:
    """Look it up."""
    return [float("inf"), Opaque()] if known else {"score": float("nan")}


async def test_policy_mistakes_become_tool_messages() -> None:
    env = ToolEnv("go", divide)
    step = await env.step(
        calls(call("divide", {"a": 1, "b": 0}), call("divide", {"a": "x", "b": 1}), call("multiply"), call("divide"))
    )
    assert contents(step) == [
        "Error: ZeroDivisionError: float division by zero",
        "Error: a: Input should be a valid number, unable to parse string as a number",
        "Error: there is no tool 'multiply'; there are divide",
        "Error: a: Field required; b: Field required",
    ]
    assert step.rewards == {"tool_calls": 4.0, "tool_errors": 4.0}


async def test_tool_exception_is_logged_once_with_its_location(caplog: pytest.LogCaptureFixture) -> None:
    def odd(a: int) -> int:
        raise KeyError(a)

    env = ToolEnv("go", odd)
    with caplog.at_level(logging.WARNING, "titan_rl.tasks.tools"):
        await env.step(calls(call("odd", {"a": 1}), call("odd", {"a": 2})))
    assert [record.getMessage() for record in caplog.records] == [
        f"tool 'odd' raised KeyError: 1 (tests/tasks/test_tool_env.py:{odd.__code__.co_firstlineno + 1} in odd); "
        "the policy gets this as the result"
    ]


@pytest.mark.parametrize("error", [NameError("undefined name"), ImportError("no package"), DataError("bad")])
async def test_author_mistakes_end_the_rollout(error: Exception) -> None:
    def broken() -> None:
        raise error

    with pytest.raises(type(error)):
        await ToolEnv("go", broken).step(calls(call("broken")))


async def test_fault_exceptions_are_configurable() -> None:
    def remote() -> None:
        raise ConnectionError("the service is down")

    assert contents(await ToolEnv("go", remote).step(calls(call("remote"))))[0].startswith("Error: ConnectionError")
    with pytest.raises(ConnectionError):
        await ToolEnv("go", remote, faults=(OSError,)).step(calls(call("remote")))


async def test_async_tool_call_times_out() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    step = await ToolEnv("go", hang, timeout_s=0.01).step(calls(call("hang")))
    assert contents(step) == ["Error: the call took longer than 0.01 s"]


async def test_threaded_tool_call_times_out_without_blocking_others() -> None:
    release, threads = threading.Event(), list[str]()

    def block() -> None:
        threads.append(threading.current_thread().name)
        release.wait(HANG_S)

    env = ToolEnv("go", [block, divide, later], timeout_s=1.0, in_thread=True)
    step = await env.step(calls(call("block"), call("divide", {"a": 1, "b": 2}), call("later", {"word": "w"})))
    release.set()
    assert contents(step)[:2] == ["Error: the call took longer than 1 s", "0.5"]
    assert contents(step)[2].startswith('{"word":"w"')
    assert threads != [threading.current_thread().name]


async def test_limits_on_calls_and_result_length() -> None:
    def spell(letters: int) -> str:
        """Letters."""
        return "x" * letters

    env = ToolEnv("go", spell, max_calls=2, max_result_chars=4)
    first = await env.step(calls(call("spell", {"letters": 6}), call("spell", {"letters": 4})))
    assert contents(first) == ["xxxx ... (2 more characters)", "xxxx"]
    assert contents(await env.step(calls(call("spell", {"letters": 1}))))[0].startswith("Erro")
    for limits in ({"max_calls": 0}, {"timeout_s": 0}, {"max_result_chars": -1}):
        with pytest.raises(ValueError, match=next(iter(limits))):
            ToolEnv("go", spell, **limits)


class Account:
    """State of one rollout."""

    def __init__(self) -> None:
        self.balance, self.closed = 10, 0

    def pay(self, coins: int) -> int:
        """Pay coins."""
        self.balance -= coins
        return self.balance

    async def close(self) -> None:
        self.closed += 1


async def test_subclass_can_reward_tool_state() -> None:
    class Paying(ToolEnv):
        def __init__(self, account: Account) -> None:
            super().__init__("Pay 3.", account)
            self.account = account

        async def answered(self, message: Mapping[str, Any]) -> MessageStep:
            if self.account.balance == 10:
                return MessageStep([{"role": "user", "content": "You have not paid."}])
            return MessageStep(status=RolloutStatus.COMPLETED, rewards={"paid": float(self.account.balance == 7)})

    account = Account()
    env = Paying(account)
    assert contents(await env.step({"role": "assistant", "content": "Done."})) == ["You have not paid."]
    assert contents(await env.step(calls(call("pay", '{"coins": 3}')))) == ["7"]
    last = await env.step({"role": "assistant", "content": "Done."})
    assert last.rewards == {"tool_calls": 0.0, "tool_errors": 0.0, "paid": 1.0}
    await env.close()
    assert account.closed == 1


async def test_first_answer_ends_an_environment_without_tools() -> None:
    env = ToolEnv([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}])
    observation = await env.reset()
    assert (len(observation.messages), observation.tools) == (2, None)
    assert (await env.step(calls(call("divide")))).status is RolloutStatus.COMPLETED
    await env.close()
    with pytest.raises(TypeError, match="the prompt is 3"):
        ToolEnv(3)  # type: ignore
