"""Base classes of tasks, and the demonstrations that they make:

MessageTask    samples drawn at random, each with an environment in chat messages
PromptTask     one prompt and one answer with a reward, and optionally tools
demonstrated   conversations made by playing environments with scripted players
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import random
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, cast

from pydantic import Field

from titan_rl.core.calls.bounded import OutOfTimeError, bounded
from titan_rl.core.calls.threads import DaemonThreads
from titan_rl.core.calls.user_code import Failure, is_async, source_location, thread_location
from titan_rl.core.errors import ConfigError, DataError, TitanRLError
from titan_rl.core.plain_data import plain_json, snapshot
from titan_rl.core.settings import Section
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.threaded import expected
from titan_rl.rollout.environment.types import MessageEnv, MessageObservation, MessageStep, TokenEnv
from titan_rl.rollout.group.user_code_boundary import EnvCalls, RolloutEnded, UserCodeBoundary
from titan_rl.rollout.policy_text import PolicyText, text_of, with_prefix_marked
from titan_rl.rollout.prompt_length import PromptLimit
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import FailurePolicy, Reward
from titan_rl.rollout.rewards.rubric import Rubric, TextRubric
from titan_rl.rollout.task import DEMONSTRATED_CALL_S, Demonstration
from titan_rl.rollout.types import Message, Rollout, RolloutStatus
from titan_rl.tasks.tools import ToolEnv, messages_of, tools_of

Player = Callable[[Sequence[Message]], str | Message]
"""Function from the conversation so far to the assistant's answer."""

MOST_DRAWS = 1000
"""Largest number of draws for one training or held-out sample."""

PROBED = 256
"""Number of prompts that are drawn before a run, to count those that are too long."""

PROBED_S = 2.0
"""Longest time for that, in seconds."""

CARELESS = 1 / 6
"""Share of the demonstrations that `demonstrate_carelessly` makes. They are the last ones."""


class MessageTask(Section):
    """Base class of a `Task` in chat messages: subclasses define `sample`, `env` and `rubric`.

    The fields of a subclass are settings of `[task]`.

    Example:

        class Guess(MessageTask):
            largest: int = 16

            def sample(self, rng):
                return rng.randint(1, self.largest)

            def env(self, sample):
                return GuessEnv(sample)  # a MessageEnv

            def rubric(self):
                return Rubric([env_reward("won")])
    """

    held_out: float = Field(default=0.1, ge=0, lt=1)
    """Share of all different samples that only validation sees. With 0 validation uses training samples."""

    @abstractmethod
    def sample(self, rng: random.Random) -> Any:
        """Draw one sample, with no other randomness than `rng`."""

    @abstractmethod
    def env(self, sample: Any) -> MessageEnv:
        """Make a fresh environment for one rollout."""

    @abstractmethod
    def rubric(self) -> Rubric:
        """Make the rubric that scores the rollouts."""

    def key(self, sample: Any) -> str:
        """Identity of a sample: equal keys are held out together. By default its `repr`."""
        return repr(sample)

    def demonstrate(self, sample: Any, messages: Sequence[Message], rng: random.Random) -> str | Message:
        """Next answer of a demonstration, which `titan-rl sft` teaches: text, or a whole message, for instance with
        tool calls (see `call_of`).

        If demonstrations are always right, nothing is left for reinforcement learning to improve. So either this method
        or `demonstrate_carelessly` should be right only sometimes.

        Args:
            sample: Sample of the conversation.
            messages: Conversation so far.
            rng: Source of all randomness.
        """
        raise NotImplementedError

    def demonstrate_carelessly(self, sample: Any, messages: Sequence[Message], rng: random.Random) -> str | Message:
        """Next answer of a careless demonstration; by default that of `demonstrate`. The last `CARELESS` share of all
        demonstrations is careless. With `sft.shuffle = false` a model first learns a skill, and then to use it rarely,
        which reinforcement learning soon corrects."""
        return self.demonstrate(sample, messages, rng)

    def demonstrations(self, count: int) -> Iterator[Demonstration]:
        """Make demonstrations by playing environments of training samples with `demonstrate`.

        Raises:
            ConfigError: `demonstrate` is not defined.
        """
        if type(self).demonstrate is MessageTask.demonstrate:
            raise ConfigError(
                f"{type(self).__name__} has no demonstrations; define demonstrate(self, sample, messages, rng), "
                "which returns the assistant's answer"
            )
        careful = count - int(CARELESS * count)
        yield from demonstrated(self._demonstration(number, careless=number >= careful) for number in range(count))

    def _demonstration(self, number: int, *, careless: bool) -> tuple[MessageEnv, Player]:
        sample = self._draw(f"demonstration/{number}", held_out=False)
        rng = random.Random(f"demonstrated/{number}")
        answer = self.demonstrate_carelessly if careless else self.demonstrate
        return self.env(sample), lambda messages: answer(sample, messages, rng)

    def train_sample(self, seed: int, index: int) -> Any:
        return self._draw(f"train/{seed}/{index}", held_out=False)

    def validation_samples(self, count: int) -> list[Any]:
        return [self._draw(f"validation/{index}", held_out=True) for index in range(count)]

    def make_env(self, sample: Any, renderer: Renderer) -> TokenEnv:
        return MessageTokenEnv(self.env(sample), renderer)

    def is_held_out(self, sample: Any) -> bool:
        """Whether a sample is for validation only, decided by a hash of its key.

        Raises:
            DataError: the key contains an address, which differs in each process.
        """
        key = self.key(sample)
        if re.search(r" at 0x[0-9a-f]+>", key):
            raise DataError(
                f"the key of a sample is {key!r}, which is not the same in each process; make samples dataclasses, "
                f"or define {type(self).__name__}.key"
            )
        digest = hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.held_out * 2**64

    def leaves_room(self, sample: Any) -> bool:
        """Whether a sample's prompt leaves room for an answer, as far as that is known before a rollout."""
        return True

    def _draw(self, key: str, *, held_out: bool) -> Any:
        """Draw samples until one is held out, or until one is not, and leaves room for an answer.

        Raises:
            DataError: no such sample was found.
        """
        rng = random.Random(key)  # seeded with a string, so the same in every process
        num_long = 0
        for _ in range(MOST_DRAWS):
            sample = self.sample(rng)
            if not self.held_out or self.is_held_out(sample) == held_out:
                if self.leaves_room(sample):
                    return sample
                num_long += 1
        side = "held-out" if held_out else "training"
        if num_long:
            raise DataError(
                f"the prompts of {num_long} {side} samples in a row leave no room for an answer; raise "
                f"model.max_context, or have {type(self).__name__}.prompt return shorter ones"
            )
        raise DataError(
            f"{type(self).__name__}.sample returned no {side} sample in {MOST_DRAWS} draws with held_out = "
            f"{self.held_out}; have it draw from more different ones, or set held_out = 0"
        )


class OpeningTask(MessageTask):
    """Base class of message tasks whose opening messages are known before a rollout begins."""

    long_prompts: Literal["leave_out", "error"] = "leave_out"
    """Prompts that leave no room for an answer in model.max_context: leave_out runs without them, and says how many
    there are; error refuses to run."""

    @functools.cached_property  # not a private attribute, which would count in comparisons of settings
    def _limit(self) -> PromptLimit | None:
        return None

    @abstractmethod
    def opening(self, sample: Any) -> Sequence[Message]:
        """Opening messages of a sample."""

    def offered_tools(self, sample: Any) -> object:
        """Tools of one rollout; see `tools_of`."""
        return ()

    def env(self, sample: Any) -> MessageEnv:
        return ToolEnv(self.opening(sample), self.offered_tools(sample))

    @abstractmethod
    def count_long_prompts(self, limit: PromptLimit) -> str:
        """Describe how many prompts leave no room for an answer; empty if none is found."""

    def leave_out_long_prompts(self, renderer: Renderer, max_context: int) -> str:
        """Leave prompts that leave no room for an answer out of all samples; see `PromptedTask`."""
        if not type(self).env.__module__.startswith("titan_rl."):
            return ""  # an environment of the user's may shorten its prompts
        tools = tools_of(self.offered_tools(self.train_sample(0, 0)))
        limit = PromptLimit(renderer, max_context, [tool.schema for tool in tools])
        vars(self)["_limit"] = limit
        return self.count_long_prompts(limit)

    def leaves_room(self, sample: Any) -> bool:
        if self._limit is None:
            return True
        try:
            return self._limit.fits(self.opening(sample))
        except Exception:  # the rollout will report it
            return True


AnswerReward = Callable[[Any, PolicyText], float | Awaitable[float]]
"""Function `reward(sample, text)`: reward of an answer to the prompt of a sample. The text is the whole answer as the
policy wrote it, with its thought; `answer_of(text)` and `thought_of(text)` are its parts."""


class PromptTask(OpeningTask):
    """Base class of a `Task` of one prompt and one answer. This one is complete:

        class Sums(PromptTask):
            def sample(self, rng):
                return rng.randint(0, 99), rng.randint(0, 99)

            def prompt(self, sample):
                return f"What is {sample[0]} + {sample[1]}?"

            def reward(self, sample, text):
                return answer_of(text).strip() == str(sum(sample))

    If there are `tools`, the policy may call them before it answers, as in a `ToolEnv`; override `env` for other
    limits. Samples with equal prompts are held out together.
    """

    @abstractmethod
    def sample(self, rng: random.Random) -> Any:
        """Draw one sample, with no other randomness than `rng`. It contains what `prompt` and `reward` need."""

    @abstractmethod
    def prompt(self, sample: Any) -> str | Sequence[Message]:
        """The user's message, or all opening messages."""

    @abstractmethod
    def reward(self, sample: Any, text: PolicyText) -> float | Awaitable[float]:
        """Reward of an answer. The method may be async. It is not called for an answer that is cut off, has a malformed
        tool call, or is missing after tool calls: such an answer has reward 0. Override `rubric` to change that.

        Args:
            sample: Sample of the rollout.
            text: The whole answer as the policy wrote it, with its thought, even if that does not end.
                `answer_of(text)` and `thought_of(text)` are its parts.
        """

    def tools(self, sample: Any) -> object:
        """Tools of one rollout: functions, or a fresh object whose public methods are the tools."""
        return ()

    @property
    def is_single_turn(self) -> bool:
        """Whether no rollout has a second turn, because the task has neither tools nor its own environment."""
        kind = type(self)
        return kind.tools is PromptTask.tools and kind.env is PromptTask.env and kind.make_env is PromptTask.make_env

    def rubric(self) -> Rubric:
        return answer_rubric(self.reward)

    def key(self, sample: Any) -> str:
        return json.dumps(plain_json(self.opening(sample)), sort_keys=True)

    def opening(self, sample: Any) -> Sequence[Message]:
        return messages_of(self.prompt(sample))

    def offered_tools(self, sample: Any) -> object:
        return self.tools(sample)

    def count_long_prompts(self, limit: PromptLimit) -> str:
        ends = time.monotonic() + PROBED_S
        for index in range(PROBED):
            self.train_sample(0, index)
            if time.monotonic() > ends:
                break
        return f"{limit.num_long} of the first {limit.num_tested} prompts" if limit.num_long else ""


def answer_rubric(reward: AnswerReward, *, in_thread: bool = False) -> Rubric:
    """Make a rubric of one reward. A rollout whose answer is cut off or has a malformed tool call has reward 0.

    Args:
        reward: Function of the sample and the text of the answer.
        in_thread: Whether a sync function runs in a worker thread; see `Reward`.
    """

    def value(rollout: Rollout) -> float | Awaitable[float]:
        return reward(rollout.sample, text_of(rollout))

    name = getattr(reward, "__name__", type(reward).__name__)
    on_failure = FailurePolicy() if is_async(reward) else None  # `value` itself is not async
    judge = Reward(value, name=name, in_thread=in_thread, on_failure=on_failure)
    return TextRubric([judge], truncated_reward=0.0, error_reward=0.0)


MOST_TURNS = 64
"""Largest number of turns of a demonstration."""

GRACE_S = 5.0
"""Seconds that the event loop has to end a call after its time limit. After that the loop is considered blocked."""


def demonstrated(games: Iterable[tuple[MessageEnv, Player]]) -> Iterator[Demonstration]:
    """Play environments with scripted players, one after the other, and yield the conversations.

    They are played on a separate event loop, in a thread that ends with the iterator, so the caller's event loop may be
    running.

    Raises:
        DataError: a conversation does not end, or a call of its environment or player fails or takes too long. Names
            the line.
    """
    limit_s = DEMONSTRATED_CALL_S.get()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run, args=(loop,), name="demonstrations", daemon=True)
    thread.start()
    try:
        for env, player in games:
            game = _Game(env, player, limit_s)
            yield game.result(asyncio.run_coroutine_threadsafe(game.play(), loop), thread)
    finally:
        loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Game:
    """Game of one environment with a scripted player."""

    def __init__(self, env: MessageEnv, player: Player, limit_s: float) -> None:
        self._calls = EnvCalls(env)
        self._player = player
        self._limit_s = limit_s
        self._ends_by = time.monotonic() + limit_s  # time limit of the current call

    def result(self, playing: Future[Demonstration], thread: threading.Thread) -> Demonstration:
        """Wait for the demonstration, in another thread than that of the event loop.

        A call that blocks the event loop also blocks the timer that limits it, so the limit is checked here, too.
        """
        while not wait([playing], max(0.0, self._ends_by + GRACE_S - time.monotonic())).done:
            if time.monotonic() >= self._ends_by + GRACE_S:
                raise DataError(
                    f"a demonstration failed: the environment took longer than {self._limit_s:g} s: "
                    f"{thread_location(thread.ident)} blocks the event loop; await there, or make it a plain method"
                )
        return playing.result()

    async def play(self) -> Demonstration:
        try:
            played = await self._play()
        except RolloutEnded as end:
            await self._close()
            if isinstance(end.__cause__, TitanRLError):
                raise end.__cause__ from None
            raise DataError(f"a demonstration failed: {end.failure or end.error}") from end.__cause__
        except BaseException:
            await self._close()
            raise
        if (wrong := await self._close()) is not None:  # closing would fail in each of thousands of demonstrations
            raise DataError(f"a demonstration failed: closing {type(self._calls.env).__name__}: {wrong}")
        return played

    async def _close(self) -> Failure | None:
        self._ends_by = time.monotonic() + self._limit_s
        return await self._calls.close(self._limit_s)

    async def _play(self) -> Demonstration:
        async with self._within():
            observation = expected(await self._calls.reset(), MessageObservation, self._calls.env, "reset")
        messages: list[Message] = list(map(snapshot, with_prefix_marked(observation.messages)))
        for _ in range(MOST_TURNS):
            answer = await self._answer(messages)
            async with self._within():
                step = expected(await self._calls.step(snapshot(answer)), MessageStep, self._calls.env, "step")
            if step.status is not None:
                return Demonstration([*messages, answer, *map(snapshot, step.messages)], observation.tools)
            messages += [answer, *map(snapshot, with_prefix_marked(step.messages))]
        raise DataError(f"a demonstration has not ended after {MOST_TURNS} turns: {messages[-4:]}")

    async def _answer(self, messages: Sequence[Message]) -> Message:
        async with UserCodeBoundary(RolloutStatus.ERROR_ENV):
            self._ends_by = time.monotonic() + self._limit_s
            try:
                answer: Any = await DaemonThreads(1, "player").run(
                    lambda: self._player(snapshot(messages)), self._limit_s
                )
                if inspect.isawaitable(answer):
                    self._ends_by = time.monotonic() + self._limit_s
                    answer = await bounded(answer, self._limit_s, "the player")
            except OutOfTimeError as error:
                raise OutOfTimeError("the player took longer than env_timeout_s") from error
            if isinstance(answer, str):
                return {"role": "assistant", "content": answer}
            if not isinstance(answer, Mapping):
                raise TypeError(
                    f"the player of {source_location(self._player)} returned {answer!r}; text or a message is expected"
                )
        return cast("Message", answer)

    def _within(self) -> AbstractAsyncContextManager[None]:
        self._ends_by = time.monotonic() + self._limit_s
        return UserCodeBoundary(RolloutStatus.ERROR_ENV, asyncio.get_running_loop().time() + self._limit_s)
