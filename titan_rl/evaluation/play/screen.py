"""Text output of `titan-rl play`, and environments that show their turns on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from titan_rl.core.calls.user_code import Failure
from titan_rl.core.plain_data import printable
from titan_rl.rollout.environment.threaded import EnvMethods, require_methods
from titan_rl.rollout.environment.types import (
    MessageEnv,
    MessageObservation,
    MessageStep,
    Player,
    SeatedEnv,
    SeatOutError,
    TokenEnv,
    TokenObservation,
    TokenSeat,
    TokenStep,
)
from titan_rl.rollout.group.transcript import error_text
from titan_rl.rollout.types import Message, Rollout, RolloutGroup, RolloutStatus
from titan_rl.types import Completion

WriteLine = Callable[[str], object]


class Screen:
    """Text output of what happens in an environment.

    Args:
        write_line: Function that shows text of one line or more.
        decode: Function that returns the text of tokens, including special ones; None if there is no tokenizer.
    """

    def __init__(self, write_line: WriteLine, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self.write_line = write_line
        self._decode = decode
        self.has_shown = False  # whether messages of the policy's next request were shown

    def messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.write_line(shown_message(message))
        self.has_shown = self.has_shown or bool(messages)

    def tools(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        for tool in tools or ():
            function = tool.get("function", tool)
            arguments = ", ".join(
                f"{name}: {kind.get('type', 'any')}"
                for name, kind in function.get("parameters", {}).get("properties", {}).items()
            )
            self.write_line(f"[tool] {function.get('name')}({arguments})  {function.get('description', '')}".rstrip())

    def rewards(self, rewards: Mapping[str, float]) -> None:
        for name, reward in rewards.items():
            self.write_line(f"    reward {name} = {reward:g}")

    def prompt(self, token_ids: Sequence[int]) -> None:
        """Show the tokens of a prompt. This is for a request of which no messages were shown."""
        self.write_line(f"[prompt, {len(token_ids)} tokens] {self.text(token_ids)}")

    def tokens(self, prompt_token_ids: Sequence[int], completion: Completion | None) -> None:
        """Show each token of a prompt and of a completion with its text."""
        self.write_line(f"    prompt: {self._pieces(prompt_token_ids)}")
        if completion is not None:
            self.write_line(f"    reply: {self._pieces(completion.token_ids)}")

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids)) if self._decode is None else repr(self._decode(list(token_ids)))

    def _pieces(self, token_ids: Sequence[int]) -> str:
        if self._decode is None:
            return " ".join(map(str, token_ids))
        return " ".join(f"{token}:{self._decode([token])!r}" for token in token_ids)

    def group(self, group: RolloutGroup) -> None:
        for rollout in group.rollouts:
            self.write_line(shown_end(rollout, group.failure))
            if rollout.status is RolloutStatus.ERROR_PARSE and rollout.turns:
                self.write_line(f"    not parsed: {self.text(rollout.turns[-1].completion.token_ids)}")
        if group.failure is not None:
            self.write_line(f"the rubric failed: {group.failure}")


def shown_message(message: Message) -> str:
    """Format a message: `[assistant] Let me see.` and below it `    calls look {"at": 1}`."""
    content: Any = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    lines = [f"[{message.get('role', '?')}] {text}".rstrip()]
    if reasoning := message.get("reasoning_content"):
        lines.insert(0, f"[{message.get('role', '?')}, thinking] {reasoning}")
    for call in message.get("tool_calls") or ():
        function: Any = cast("Mapping[str, Any]", call).get("function", {})
        arguments = function.get("arguments")
        shown_arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
        lines.append(f"    calls {function.get('name')} {shown_arguments}")
    return printable("\n".join(lines))


def shown_end(rollout: Rollout, group_failure: Failure | None = None) -> str:
    """Format the end of a rollout and its reward.

    Args:
        group_failure: Failure of the group, which is shown once for all of its rollouts and therefore left out here.
    """
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:.4g}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in rollout.reward_breakdown.items())
    turns = f"{len(rollout.turns)} turn{'' if len(rollout.turns) == 1 else 's'}"
    tokens = rollout.metrics.get("completion_tokens", float(rollout.num_completion_tokens))
    lines = [f"=== {rollout.status}: {reward}{f' ({parts})' if parts else ''}; {turns}, {tokens:.0f} tokens written"]
    if rollout.error is not None and (group_failure is None or rollout.failure is not group_failure):
        lines.append(f"    {error_text(rollout)}")
    return printable("\n".join(lines))


class ShownTokenEnv:
    """`TokenEnv` that shows each of its turns."""

    def __init__(self, env: TokenEnv, screen: Screen) -> None:
        self._env = env
        self._methods = EnvMethods(env)
        self._screen = screen

    @property
    def tools(self) -> Sequence[Mapping[str, object]] | None:
        """Tools that the policy may call, if the environment has any."""
        return getattr(self._env, "tools", None)

    async def reset(self) -> TokenObservation:
        observation = await self._methods.call("reset", TokenObservation)
        self._screen.tools(self.tools)
        self._screen.messages(observation.messages)
        return observation

    async def step(self, completion: Completion) -> TokenStep:
        step = await self._methods.call("step", TokenStep, completion)
        self._screen.messages(step.messages)
        self._screen.rewards(step.rewards)
        return step

    async def close(self) -> None:
        await self._methods.close()


class ShownGame:
    """`SeatedEnv` that shows the turns of its seats. One seat is asked at a time, because one person may play several
    seats."""

    def __init__(self, env: SeatedEnv, screen: Screen) -> None:
        self._env = env
        self._screen = screen
        self._turn = asyncio.Lock()

    def players(self, sibling: int) -> Mapping[str, Player]:
        return self._env.players(sibling)

    async def play_seats(self, seats: Mapping[str, TokenSeat]) -> None:
        shown = {name: _ShownSeat(seat, self._screen, self._turn) for name, seat in seats.items()}
        await self._env.play_seats(shown)
        for seat in shown.values():
            seat.show()

    async def close(self) -> None:
        await self._env.close()


class _ShownSeat:
    """`TokenSeat` that shows its conversation before each answer, and the answer."""

    def __init__(self, seat: TokenSeat, screen: Screen, turn: asyncio.Lock) -> None:
        self._seat = seat
        self._screen = screen
        self._turn = turn
        self._unshown: list[Message] = []

    @property
    def name(self) -> str:
        return self._seat.name

    @property
    def player(self) -> Player:
        return self._seat.player

    async def generate(self, prompt_token_ids: Sequence[int]) -> Completion:
        async with self._turn:
            self._screen.has_shown = False  # the messages that were shown are those of another seat
            self.show()
            return await self._seat.generate(prompt_token_ids)

    async def reply(self, messages: Sequence[Message]) -> Message:
        return await self._seat.reply(messages)

    def leave(self, status: RolloutStatus, why: str) -> SeatOutError:
        return self._seat.leave(status, why)

    def record(self, messages: Sequence[Message]) -> None:
        self._seat.record(messages)
        self._unshown += messages

    def reward(self, name: str, value: float) -> None:
        self._seat.reward(name, value)
        self.show()
        self._screen.rewards({f"{name} of {self.name}": value})

    def show(self) -> None:
        """Show the messages since the last call."""
        if self._unshown:
            self._screen.write_line(f"--- seat {self.name}")
            self._screen.messages(self._unshown)
        self._unshown = []


class ShownMessageEnv:
    """`MessageEnv` that shows each of its turns."""

    def __init__(self, env: MessageEnv, screen: Screen) -> None:
        require_methods(env)
        self._methods = EnvMethods(env)
        self._screen = screen

    async def reset(self) -> MessageObservation:
        observation = await self._methods.call("reset", MessageObservation)
        self._screen.tools(observation.tools)
        self._screen.messages(observation.messages)
        return observation

    async def step(self, message: Message) -> MessageStep:
        self._screen.messages([message])
        step = await self._methods.call("step", MessageStep, message)
        self._screen.messages(step.messages)
        self._screen.rewards(step.rewards)
        return step

    async def close(self) -> None:
        await self._methods.close()
