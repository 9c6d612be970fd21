"""Environments of chat messages as environments of tokens: growing prompts, `MessageTokenEnv` and `MessageGame`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import DataError, PromptTooLongError
from titan_rl.core.plain_data import safe_repr, snapshot
from titan_rl.rollout.environment.threaded import EnvMethods, require_methods
from titan_rl.rollout.environment.types import (
    MessageEnv,
    MessageObservation,
    MessagePlayer,
    MessageSeat,
    MessageStep,
    Player,
    SeatedMessageEnv,
    TokenObservation,
    TokenSeat,
    TokenStep,
)
from titan_rl.rollout.policy_text import with_prefix_marked, with_written
from titan_rl.rollout.prompt_length import is_surely_longer, num_characters
from titan_rl.rollout.renderer.text import extended_ids, prompt_ids, split_prefix, written_text
from titan_rl.rollout.renderer.types import Renderer, message_of, require_tool_support
from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.types import Completion, FinishReason


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A completion as a message.

    Args:
        message: The message.
        is_complete: Whether the message is complete, with its reasoning closed and all tool calls well-formed.
    """

    message: Message
    is_complete: bool


_WELL_FORMED = ("ok", "unknown_tool")
"""Statuses of tool calls that are passed to the environment. Only some renderers check the names of tools."""


MAX_CONTEXT: ContextVar[int | None] = ContextVar("MAX_CONTEXT", default=None)
"""Largest number of tokens in the current rollout's prompts, if known."""

LONG_TEXT = 20_000
"""Number of characters from which on tokenizing takes longer than starting a thread."""


class GrowingPrompt:
    """Conversation of messages and completions. Each prompt begins with exactly the previous prompt and completion.

    Example:

        completion = await generate(prompt.after([{"role": "user", "content": "Hello"}]), ...)
        answer = prompt.read(completion)
        completion = await generate(prompt.after([{"role": "user", "content": "Go on"}]), ...)
    """

    def __init__(self, renderer: Renderer, tools: Sequence[Mapping[str, object]] | None = None) -> None:
        self._renderer = renderer
        self._tools = None if tools is None else list(tools)
        self._prompt: list[int] = []
        self._completion: list[int] | None = None  # completion of the prompt

    async def next(self, messages: Sequence[Message], whose: str) -> list[int]:
        """Next prompt after messages of any length. A long text is tokenized off the event loop, and only its beginning
        if that does not fit into the rollout's context.

        Args:
            messages: New messages.
            whose: Source of the messages, for the error.

        Raises:
            PromptTooLongError: the messages have more than `MAX_CONTEXT` tokens, and are long.
        """
        size = num_characters(messages)
        if size < LONG_TEXT:
            return self.after(messages)
        most = MAX_CONTEXT.get()
        if most is not None and await in_thread(is_surely_longer, self._renderer, messages, self._tools, most):
            raise PromptTooLongError(
                f"{whose} returned messages of {size:,} characters, which cannot fit into max_context = {most} tokens"
            )
        return await in_thread(self.after, messages)

    def after(self, messages: Sequence[Message]) -> list[int]:
        """The next prompt. If the messages end with the beginning of the answer, so does the prompt.
        # [num_prompt_tokens]

        Raises:
            DataError: the renderer cannot extend the tokens so far, or not continue the beginning of an answer.
            ModelError: the renderer does not show the tools, or does not parse their calls.
        """
        if self._completion is None:
            if self._tools:
                require_tool_support(self._renderer, split_prefix(messages)[0], self._tools)
            self._prompt = prompt_ids(self._renderer, messages, self._tools)
        else:
            self._prompt = self._bridge(self._completion, messages)
            self._completion = None
        return list(self._prompt)

    def read(self, completion: Completion) -> ParsedAnswer | None:
        """Message in a completion of the last prompt; None if the completion cannot be parsed, and its text is unknown.

        Raises:
            TypeError: the result of the renderer's parser breaks the renderer protocol.
        """
        self._completion = list(completion.token_ids)
        try:
            parsed = self._renderer.parse_response(
                list(completion.token_ids), tools=self._tools, prompt_ids=list(self._prompt)
            )
        except Exception:  # a parser may raise any error on malformed output of the model
            text = written_text(self._renderer, completion.token_ids)
            return None if text is None else ParsedAnswer({"role": "assistant", "content": text}, is_complete=False)
        if wrong := [call for call in parsed.tool_calls if not hasattr(call, "status")]:
            raise TypeError(
                f"parse_response of the renderer returned {safe_repr(wrong[0])} among its tool_calls; each must be "
                "an object with name, arguments, status and id, see titan_rl.rollout.renderer.ParsedToolCall"
            )
        is_complete = parsed.reasoning_complete is not False and all(
            call.status in _WELL_FORMED for call in parsed.tool_calls
        )
        message, text = message_of(parsed), written_text(self._renderer, completion.token_ids, parsed)
        return ParsedAnswer(message if text is None else with_written(message, text), is_complete)

    def _bridge(self, completion: list[int], messages: Sequence[Message]) -> list[int]:
        extended = extended_ids(self._renderer, self._prompt, completion, messages, self._tools)
        if extended is None:
            raise DataError(
                f"{type(self._renderer).__name__} cannot extend this conversation without rendering it again; "
                "set the renderer to keep earlier reasoning (thinking_retention='all') or to leave it out"
            )
        return extended


class MessageTokenEnv:
    """A `TokenEnv` over a `MessageEnv`. Each prompt extends the previous prompt and completion by the new messages.

    A completion ends the rollout without a step of the environment if it

    - cannot be parsed, ends inside its reasoning, or has a malformed tool call: ERROR_PARSE;
    - used up its token budget: TRUNCATED_LENGTH. The transcript has its text.

    Messages too long to fit into the context are not tokenized: TRUNCATED_PROMPT.

    `reset` fails if the environment has tools that the renderer does not show, or whose calls it does not parse.

    The environment's methods may be plain functions, which run in a thread of the environment; see `EnvMethods`.

    Raises:
        TypeError: the environment lacks a method.

    Example:

        rollouter = Rollouter(lambda sample: MessageTokenEnv(SortEnv(sample), renderer), rubric, max_context=512)
    """

    def __init__(self, env: MessageEnv, renderer: Renderer) -> None:
        require_methods(env)
        self.env = env
        self._methods = EnvMethods(env)
        self._renderer = renderer
        self._prompt = GrowingPrompt(renderer)

    @property
    def _name(self) -> str:
        return type(self.env).__name__

    async def reset(self) -> TokenObservation:
        observation = await self._methods.call("reset", MessageObservation)
        self._prompt = GrowingPrompt(self._renderer, observation.tools)
        prompt = await self._prompt.next(observation.messages, self._name)
        return TokenObservation(prompt, with_prefix_marked(observation.messages))

    async def step(self, completion: Completion) -> TokenStep:
        cut_off = completion.finish_reason is FinishReason.LENGTH
        answer = self._prompt.read(completion)
        answers = [] if answer is None else [answer.message]
        if cut_off:
            return TokenStep(status=RolloutStatus.TRUNCATED_LENGTH, messages=answers)
        if answer is None or not answer.is_complete:
            return TokenStep(status=RolloutStatus.ERROR_PARSE, messages=answers)

        step = await self._methods.call("step", MessageStep, snapshot(answer.message))
        if step.status is not None:
            return TokenStep(status=step.status, rewards=step.rewards, messages=[answer.message, *step.messages])
        messages = [answer.message, *with_prefix_marked(step.messages)]
        try:
            prompt = await self._prompt.next(step.messages, self._name)
        except PromptTooLongError as error:
            ended = RolloutStatus.TRUNCATED_PROMPT
            return TokenStep(status=ended, rewards=step.rewards, messages=messages, error=str(error))
        return TokenStep(prompt, rewards=step.rewards, messages=messages)

    async def close(self) -> None:
        await self._methods.close()


class MessageGame:
    """A `SeatedEnv` over a `SeatedMessageEnv`. Each seat has its own conversation, whose prompts extend the previous
    prompt and completion.

    Example: two seats, the second played by a script:

        MessageGame(KuhnHand(sample), renderer, {"first": "policy", "second": MessagePlayer(always_pass)})

    Args:
        env: Game.
        renderer: Renderer of the conversations.
        players: Player of each seat, or a function from the number of a sibling to its players.
    """

    def __init__(
        self,
        env: SeatedMessageEnv,
        renderer: Renderer,
        players: Mapping[str, Player] | Callable[[int], Mapping[str, Player]],
    ) -> None:
        self._env = env
        self._renderer = renderer
        self._players = players

    def players(self, sibling: int) -> Mapping[str, Player]:
        return self._players(sibling) if callable(self._players) else self._players

    async def play_seats(self, seats: Mapping[str, TokenSeat]) -> None:
        chats = {name: _Chat(seat, self._renderer) for name, seat in seats.items()}
        given: dict[str, MessageSeat] = dict(chats)
        try:
            await self._env.play_seats(given)
        finally:
            for chat in chats.values():
                chat.end()

    async def close(self) -> None:
        await self._env.close()


class _Chat:
    """Seat of chat messages over a seat of tokens."""

    def __init__(self, seat: TokenSeat, renderer: Renderer) -> None:
        self._seat = seat
        self._prompt = GrowingPrompt(renderer)
        self._messages: list[Message] = []  # conversation so far, for a `MessagePlayer`
        self._unseen: list[Message] = []  # messages of `tell` since the last question

    @property
    def name(self) -> str:
        return self._seat.name

    @property
    def player(self) -> Player:
        return self._seat.player

    async def ask(self, messages: Sequence[Message]) -> Message:
        new_messages = [*self._unseen, *map(snapshot, with_prefix_marked(messages))]
        self._unseen = []
        self._seat.record(new_messages)
        self._messages.extend(new_messages)
        if isinstance(self.player, MessagePlayer):
            answer = await self._seat.reply([snapshot(message) for message in self._messages])
        else:
            answer = await self._ask_in_tokens(new_messages)
        self._messages.append(answer)
        self._seat.record([answer])
        return snapshot(answer)

    def tell(self, messages: Sequence[Message]) -> None:
        self._unseen.extend(map(snapshot, messages))

    def reward(self, name: str, value: float) -> None:
        self._seat.reward(name, value)

    def end(self) -> None:
        """Record the remaining messages of `tell` in the transcript."""
        self._seat.record(self._unseen)
        self._unseen = []

    async def _ask_in_tokens(self, new_messages: Sequence[Message]) -> Message:
        try:
            prompt = await self._prompt.next(new_messages, f"the game of seat {self.name!r}")
        except PromptTooLongError as error:
            raise self._seat.leave(RolloutStatus.TRUNCATED_PROMPT, str(error)) from None
        completion = await self._seat.generate(prompt)
        answer = self._prompt.read(completion)
        if answer is not None and answer.is_complete and completion.finish_reason is not FinishReason.LENGTH:
            return answer.message
        if answer is not None:
            self._seat.record([answer.message])
        if completion.finish_reason is FinishReason.LENGTH:
            raise self._seat.leave(RolloutStatus.TRUNCATED_LENGTH, "its answer used up the token budget")
        raise self._seat.leave(RolloutStatus.ERROR_PARSE, "its answer cannot be parsed")
