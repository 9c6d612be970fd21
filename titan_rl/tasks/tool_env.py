"""A prompt, tools that the policy may call, and its answer."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic_core import to_json

from titan_rl.core.calls.bounded import OutOfTimeError, bounded
from titan_rl.core.calls.plain import plain_json, safe_text
from titan_rl.core.calls.threads import DaemonThreads
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import TitanRLError
from titan_rl.rollout.environment.types import MessageObservation, MessageStep
from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.tasks.tools import ArgumentsError, Tool, tools_of

T = TypeVar("T")

FAULTS = (ImportError, NameError, NotImplementedError, MemoryError, TitanRLError)
"""What a tool raises by its author's mistake, whatever the policy gave it."""

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")

_threads = DaemonThreads(64, "tool")
_told: set[tuple[str, str]] = set()  # tools and what they raised


class ToolEnv:
    """A `MessageEnv` of one prompt: calls of tools are answered until the policy answers without one.

    What becomes of a call:

    - its result is the content of a message of role "tool": text as it is, anything else as JSON;
    - wrong arguments, a name that no tool has, an exception, too long a time: the policy's doing. The message says
      what was wrong, after "Error: ";
    - an exception of `faults` is the author's mistake, and ends the rollout as an error of its environment.

    The calls of one message are made in their order, one after the other, so that those that change something do it
    the same way again. Where there are tools each step has the rewards "tool_calls" and "tool_errors", how many there
    were of each: `env_reward("tool_errors", weight=0)` in a rubric records them.

    Example: a bank account for each rollout, whose methods are the tools:

        ToolEnv("Pay 3 coins to Ada.", Account(balance=10))

    Args:
        prompt: the user's message, or all opening messages.
        tools: a function, an object whose public methods are the tools, or a list of these; see `tools_of`. An
            object's `close`, if it has one, is called at the end of the rollout. Without tools any answer is the last.
        max_calls: that are answered in a rollout; the policy is told of the others that there are none left.
        timeout_s: that an async call may take, or one in a thread.
        in_thread: call functions that are not async in a thread, which suits those that wait or compute for more than
            some milliseconds. One that is too late is left behind there.
        max_result_chars: of a result; the rest is left out, and the policy is told how much.
        faults: exceptions that are not the policy's doing.

    Raises:
        ValueError: a tool cannot be described, as `Tool.of` says, or a limit is not positive.
    """

    def __init__(
        self,
        prompt: str | Sequence[Message],
        tools: object = (),
        *,
        max_calls: int = 64,
        timeout_s: float = 30.0,
        in_thread: bool = False,
        max_result_chars: int = 10_000,
        faults: tuple[type[Exception], ...] = FAULTS,
    ) -> None:
        for name, limit in (("max_calls", max_calls), ("timeout_s", timeout_s), ("max_result_chars", max_result_chars)):
            if not limit > 0:
                raise ValueError(f"ToolEnv {name} is {limit!r}; it must be positive")
        self.messages: list[Message] = messages_of(prompt)
        self.tools: dict[str, Tool] = {tool.name: tool for tool in tools_of(tools)}
        self._given = cast("list[object]", [*tools] if isinstance(tools, list | tuple) else [tools])
        self._calls_left = max_calls
        self._timeout_s = timeout_s
        self._in_thread = in_thread
        self._max_result_chars = max_result_chars
        self._faults = faults

    async def reset(self) -> MessageObservation:
        return MessageObservation(self.messages, [tool.schema for tool in self.tools.values()] or None)

    async def step(self, message: Message) -> MessageStep:
        calls: Sequence[Mapping[str, Any]] = (message.get("tool_calls") or ()) if self.tools else ()
        if not calls:
            ended = await self.answered(message)
            none = {"tool_calls": 0.0, "tool_errors": 0.0} if self.tools else {}
            return MessageStep(ended.messages, ended.status, {**none, **ended.rewards})
        answers = [await self._answer(call) for call in calls]
        errors = sum(failed for _, failed in answers)
        counts = {"tool_calls": float(len(calls)), "tool_errors": float(errors)}
        return MessageStep([answer for answer, _ in answers], rewards=counts)

    async def answered(self, message: Message) -> MessageStep:
        """The policy has answered without a call. A subclass may judge that, with what its tools have changed by now,
        or ask on."""
        return MessageStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None:
        for given in self._given:
            close = None if isinstance(given, Tool) or inspect.isroutine(given) else getattr(given, "close", None)
            if callable(close) and inspect.isawaitable(closing := close()):
                await closing

    async def _answer(self, call: Mapping[str, Any]) -> tuple[Message, bool]:
        """The tool's message, and whether the call failed."""
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        self._calls_left -= 1
        failed = True
        if self._calls_left < 0:
            text = "Error: no calls are left; answer without one"
        elif (tool := self.tools.get(name)) is None:
            text = f"Error: there is no tool {name!r}; there are {', '.join(self.tools)}"
        else:
            text, failed = await self._result(tool, arguments)
        if (over := len(text) - self._max_result_chars) > 0:
            text = f"{text[: self._max_result_chars]} ... ({over} more characters)"
        answer = {"role": "tool", "name": name, "content": text}
        return (answer if call.get("id") is None else {**answer, "tool_call_id": call["id"]}), failed

    async def _result(self, tool: Tool, arguments: object) -> tuple[str, bool]:
        try:
            return as_text(await self._made(tool, tool.checked(arguments))), False
        except ArgumentsError as error:
            return f"Error: {error}", True
        except self._faults:
            raise
        except OutOfTimeError:
            return f"Error: the call took longer than {self._timeout_s:g} s", True
        except Exception as error:
            failure = Failure.of(error)
            if (kind := (tool.name, failure.kind)) not in _told:
                _told.add(kind)
                logger.warning("tool %r raised %s; the policy is told", tool.name, failure)
            return f"Error: {failure.error}", True

    async def _made(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        def call() -> Any:
            return tool.function(**arguments)

        is_async = inspect.iscoroutinefunction(tool.function)
        result = await _threads.run(call, self._timeout_s) if self._in_thread and not is_async else call()
        if not inspect.isawaitable(result):
            return result
        return await bounded(_awaited(result), self._timeout_s, f"tool {tool.name!r}")


def messages_of(prompt: str | Sequence[Message]) -> list[Message]:
    """A text is what the user says.

    Raises:
        TypeError: it is neither text nor messages.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the prompt is {safe_text(prompt, repr)}; it must be text, or a list of messages such as "
            '{"role": "user", "content": "..."}'
        )
    return list(prompt)


def as_text(result: Any) -> str:
    """Text as it is, anything else as JSON, in which what is no finite number is null, and an object its text.

    >>> as_text({"right": True, "left": None})
    '{"right":true,"left":null}'
    """
    if isinstance(result, str):
        return result
    try:
        return to_json(result, inf_nan_mode="null").decode()
    except ValueError:  # what pydantic knows no JSON for; an address would be another one at each replay
        return _ADDRESS.sub("", to_json(plain_json(result)).decode())


async def _awaited(result: Awaitable[T]) -> T:
    return await result
