"""Environments that show what happens in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_rl.rollout.environment.methods import EnvMethods
from titan_rl.rollout.environment.types import (
    MessageEnv,
    MessageObservation,
    MessageStep,
    TokenEnv,
    TokenObservation,
    TokenStep,
)
from titan_rl.rollout.types import Message
from titan_rl.run.playing.screen import Screen
from titan_rl.types import Completion


class ShownTokenEnv:
    """A `TokenEnv`, turn by turn."""

    def __init__(self, env: TokenEnv, screen: Screen) -> None:
        self._env = env
        self._methods = EnvMethods(env)
        self._screen = screen

    @property
    def tools(self) -> Sequence[Mapping[str, object]] | None:
        """That the policy may call, where the environment has some."""
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


class ShownMessageEnv:
    """A `MessageEnv`, turn by turn."""

    def __init__(self, env: MessageEnv, screen: Screen) -> None:
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
