"""Environments behind OpenEnv's wire protocol: JSON messages over a WebSocket, one session per environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, cast
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, PositiveFloat, field_validator
from pydantic_core import to_json

from titan_rl.core.calls.imports import find_function, require
from titan_rl.core.calls.retries import Backoff
from titan_rl.core.settings import FunctionName, Section
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.types import MessageEnv, MessageObservation, MessageStep, TokenEnv
from titan_rl.rollout.policy_text import answer_of
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.tasks.adapters.shared import train_seed, validation_seed
from titan_rl.tasks.tools import messages_of, tool_message

MAX_MESSAGE_BYTES = 100 << 20
LONGEST_PAUSE_S = 2.0  # longest pause between two attempts to get a session of a full server
CLOSE_S = 5.0


class OpenEnvError(ConnectionError):
    """An OpenEnv server cannot be reached, does not answer in time, or answers with an error.

    Attributes:
        code: OpenEnv's error code, such as "EXECUTION_ERROR"; empty if there is none.
    """

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Observed:
    """Result of a reset or a step."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """Session with one environment on a server, from `open` to `close`.

    Args:
        url: URL of the server, with the scheme http, https, ws or wss.
        open_timeout_s: Time limit for the connection, and for getting a free session on a full server.
        answer_timeout_s: Time limit for each answer.
    """

    def __init__(self, url: str, *, open_timeout_s: float, answer_timeout_s: float) -> None:
        self.url = socket_url(url)
        self._open_timeout_s = open_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._socket: Any = None

    async def open(self, **reset: Any) -> Observed:
        """Connect and begin an episode.

        Raises:
            OpenEnvError: the server gave no session within the time limit.
        """
        deadline = asyncio.get_running_loop().time() + self._open_timeout_s
        backoff = Backoff(0.05, LONGEST_PAUSE_S, limit_s=self._open_timeout_s)
        while True:
            try:
                await self._connect(deadline)
                return await self._ask("reset", reset)
            except OpenEnvError as error:
                await self.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                if backoff.is_over:
                    raise OpenEnvError(
                        f"{error}; have the server take more sessions (max_concurrent_envs), or set "
                        "scheduling.max_running_rollouts to what it accepts",
                        error.code,
                    ) from None
            await backoff.pause()

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Take an action.

        Raises:
            OpenEnvError: the step failed. The code is "VALIDATION_ERROR" if the environment refuses the action.
        """
        return await self._ask("step", action)

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await socket.send(json.dumps({"type": "close"}))
                await socket.wait_closed()  # the server closes the connection once the session is free
        except Exception:  # the connection is gone already
            socket.transport.abort()

    async def _connect(self, deadline: float) -> None:
        client = require("websockets.asyncio.client", "openenv")
        # Pings keep a connection open through proxies while the policy writes. They have no time limit, because an
        # environment that computes does not answer them.
        options = {"max_size": MAX_MESSAGE_BYTES, "ping_interval": 20.0, "ping_timeout": None}
        if urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1"):
            options["proxy"] = None
        left_s = max(0.001, deadline - asyncio.get_running_loop().time())
        try:
            self._socket = await client.connect(self.url, open_timeout=left_s, **options)
        except Exception as error:
            raise OpenEnvError(f"{self.url} cannot be reached: {type(error).__name__}: {error}") from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        """Send a message and return the observation in the answer."""
        closed = require("websockets.exceptions", "openenv").ConnectionClosed
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                with suppress(closed):  # a full server sends an error and closes before it reads anything
                    await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
                answer: Any = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise OpenEnvError(f"{self.url} has not answered a {kind} in {self._answer_timeout_s:g} s") from error
        except Exception as error:
            raise OpenEnvError(
                f"the connection to {self.url} failed at a {kind}: {type(error).__name__}: {error}"
            ) from error
        message = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if not isinstance(message.get("data"), dict) or message.get("type") not in ("error", "observation"):
            raise OpenEnvError(f"{self.url} answered a {kind} with {answer!r:.200}")
        given: dict[str, Any] = message["data"]
        if message["type"] == "error":
            about = given.get("errors") or given.get("message")
            raise OpenEnvError(f"{self.url} reports an error of a {kind}: {about}", str(given.get("code", "")))
        observation, reward = given.get("observation"), given.get("reward")
        if not isinstance(observation, dict):
            raise OpenEnvError(f"{self.url} sent an observation that is not a table: {observation!r:.200}")
        found = cast("dict[str, Any]", observation)
        return Observed(found, None if reward is None else float(reward), bool(given.get("done")))


def socket_url(url: str) -> str:
    """URL of the WebSocket of a server.

    >>> socket_url("https://host/env/")
    'wss://host/env/ws'

    Raises:
        ValueError: the URL is not the address of a server.
    """
    scheme, host, path, query, _ = urlsplit(url)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in schemes or not host:
        raise ValueError(f"{url!r} is not a server address; use one such as http://localhost:8000")
    return urlunsplit((schemes[scheme], host, f"{path.rstrip('/')}/ws", query, ""))


ToAction = Callable[[Message], Mapping[str, Any]]
"""Function from a message of the policy to an action. It raises ValueError if the message is not an action."""
ToText = Callable[[Mapping[str, Any]], str]
"""Function from an observation to the text for the policy."""


class OpenEnv(Section):
    """Task of an environment on an OpenEnv server. Each rollout has its own session.

    Example:

        [task]
        type = "titan_rl.tasks.adapters.openenv:OpenEnv"
        url = "http://localhost:8000"
        action = "actions:of_message"       # def of_message(message): return {"guess": int(message["content"])}
        observation = "actions:as_text"     # def as_text(observation): return observation["hint"]

    Samples are the arguments of `reset`: those of the setting, and a seed, which is even for training and odd for
    validation. The server leaves out arguments that an environment does not take.
    """

    url: str
    """URL of the server."""
    reset: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of each reset."""
    prompt: str = ""
    """Text before the first observation in the user's first message."""
    system: str = ""
    """System message, if any."""
    action: Annotated[str, FunctionName(("text", "json", "tools"))] = "text"
    """Conversion of the policy's messages to actions: text puts the text in the field action_field, json parses it as
    an object, tools makes them calls of the environment's own tools (MCP); or your function from a message to the
    action."""
    action_field: str = "message"
    """Field of the action for the text."""
    observation: Annotated[str, FunctionName(("json",))] = "json"
    """Function that makes the text of observations; by default JSON."""
    max_invalid_actions: int = Field(default=3, ge=0)
    """Invalid actions that are answered with the error; one more ends the rollout."""
    open_timeout_s: PositiveFloat = 20.0
    """Longest wait for the connection, and for a free session of a full server."""
    answer_timeout_s: PositiveFloat = 50.0
    """Longest wait for each answer of the server."""
    error_reward: float = 0.0
    """Reward of an answer that cannot be parsed."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        socket_url(url)
        return url

    def check_settings(self) -> None:
        """Look up the functions.

        Raises:
            ConfigError: a function does not exist.
            MissingExtraError: websockets is not installed.
        """
        require("websockets.asyncio.client", "openenv")
        self.env(self.train_sample(0, 0))

    def train_sample(self, seed: int, index: int) -> dict[str, Any]:
        return {"seed": train_seed(seed, index), **self.reset}

    def validation_samples(self, count: int) -> list[dict[str, Any]]:
        return [{"seed": validation_seed(index), **self.reset} for index in range(count)]

    def env(self, sample: Mapping[str, Any]) -> MessageEnv:
        return _ToolsEnv(self, sample) if self.action == "tools" else _ActionEnv(self, sample)

    def make_env(self, sample: Mapping[str, Any], renderer: Renderer) -> TokenEnv:
        return MessageTokenEnv(self.env(sample), renderer)

    def rubric(self) -> Rubric:
        """Rubric of the sum of the rewards of all steps. The number of invalid actions is recorded with it."""
        return Rubric([env_reward("reward"), env_reward("invalid_actions", 0.0)], error_reward=self.error_reward)


class _SessionEnv:
    """Base of environments: a session with the settings of a task, for one rollout of a sample."""

    def __init__(self, task: OpenEnv, sample: Mapping[str, Any]) -> None:
        self._task = task
        self._sample = sample
        self._session = Session(task.url, open_timeout_s=task.open_timeout_s, answer_timeout_s=task.answer_timeout_s)
        known: dict[str, ToText] = {"json": as_json}
        self._to_text = find_function("task.observation", task.observation, known)

    async def reset(self) -> MessageObservation:
        observed = await self._session.open(**self._sample)
        if observed.done:
            raise OpenEnvError(f"{self._session.url} began an episode that is already done")
        texts = [text for text in (self._task.prompt, self._to_text(observed.observation)) if text]
        return MessageObservation(messages_of("\n\n".join(texts), self._task.system))

    async def close(self) -> None:
        await self._session.close()


class _ActionEnv(_SessionEnv):
    """A `MessageEnv` in which each message of the policy is an action."""

    def __init__(self, task: OpenEnv, sample: Mapping[str, Any]) -> None:
        super().__init__(task, sample)
        known: dict[str, ToAction] = {"text": self._text_action, "json": object_of}
        self._to_action = find_function("task.action", task.action, known)
        self._invalid_left = task.max_invalid_actions

    async def step(self, message: Message) -> MessageStep:
        try:
            action = self._to_action(message)
        except ValueError as error:
            return self._refused(error)
        try:
            observed = await self._session.step(action)
        except OpenEnvError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return self._refused(error)
        return MessageStep(
            messages_of(self._to_text(observed.observation)),
            status=RolloutStatus.COMPLETED if observed.done else None,
            rewards={"reward": observed.reward or 0.0, "invalid_actions": 0.0},
        )

    def _text_action(self, message: Message) -> Mapping[str, Any]:
        return {self._task.action_field: answer_of(message).strip()}

    def _refused(self, error: Exception) -> MessageStep:
        self._invalid_left -= 1
        return MessageStep(
            messages_of(f"That is not an action: {error}"),
            status=RolloutStatus.COMPLETED if self._invalid_left < 0 else None,
            rewards={"reward": 0.0, "invalid_actions": 1.0},
        )


class _ToolsEnv(_SessionEnv):
    """A `MessageEnv` in which the policy calls the environment's tools, as in OpenEnv's MCP environments."""

    async def reset(self) -> MessageObservation:
        first = await super().reset()
        listed = (await self._session.step({"type": "list_tools"})).observation.get("tools")
        if not isinstance(listed, list) or not listed:
            raise OpenEnvError(f'{self._session.url} lists no tools; set task.action to "text", "json" or a function')
        return MessageObservation(first.messages, [_schema(tool) for tool in cast("list[dict[str, Any]]", listed)])

    async def step(self, message: Message) -> MessageStep:
        calls = cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())
        if not calls:
            return MessageStep(status=RolloutStatus.COMPLETED, rewards={"reward": 0.0, "invalid_actions": 0.0})
        answers: list[Message] = []
        reward = invalid = 0.0
        status: RolloutStatus | None = None
        for call in calls:
            name: str = call["function"]["name"]
            arguments: Any = call["function"].get("arguments") or {}
            observed = await self._session.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
            error = cast("Mapping[str, Any] | None", observed.observation.get("error"))
            text = f"Error: {error.get('message')}" if error else result_text(observed.observation.get("result"))
            answers.append(tool_message(call, text))
            reward += observed.reward or 0.0
            invalid += bool(error)
            if observed.done:
                status = RolloutStatus.COMPLETED
                break
        return MessageStep(answers, status=status, rewards={"reward": reward, "invalid_actions": invalid})


def object_of(message: Message) -> Mapping[str, Any]:
    """Parse the text of a message as a JSON object.

    Raises:
        ValueError: the text is not a JSON object.
    """
    action: Any = json.loads(answer_of(message))
    if not isinstance(action, dict):
        raise ValueError("it is not a JSON object")
    return cast("dict[str, Any]", action)


def as_json(observation: Mapping[str, Any]) -> str:
    return to_json(dict(observation)).decode()


def result_text(result: Any) -> str:
    """Convert the result of a tool to text. For an MCP client's result, this is its data or the texts of its parts."""
    if isinstance(result, dict):
        given = cast("dict[str, Any]", result)
        if given.get("data") is not None and "content" in given:
            return result_text(given["data"])
        parts = given.get("content")
        if isinstance(parts, list):
            return "\n".join(str(part.get("text", "")) for part in cast("list[dict[str, Any]]", parts))
    return result if isinstance(result, str) else to_json(result).decode()


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": described}
