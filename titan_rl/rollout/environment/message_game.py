"""Makes a game of chat messages one of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from titan_rl.core.calls.plain import snapshot
from titan_rl.core.errors import PromptTooLongError
from titan_rl.rollout.environment.growing_prompt import GrowingPrompt
from titan_rl.rollout.environment.seats import (
    MessagePlayer,
    MessageSeat,
    Player,
    SeatedMessageEnv,
    TokenSeat,
)
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message, RolloutStatus
from titan_rl.types import FinishReason


class MessageGame:
    """A `SeatedEnv` over a `SeatedMessageEnv`. Each seat has a conversation, whose next prompt is the last one, the
    completion, and what comes after.

    Example: two seats, the second of which a script plays:

        MessageGame(KuhnHand(sample), renderer, {"first": "policy", "second": MessagePlayer(always_pass)})

    Args:
        players: who plays each seat; or a function from a sibling's number to that.
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
    """A `MessageSeat`."""

    def __init__(self, seat: TokenSeat, renderer: Renderer) -> None:
        self._seat = seat
        self._prompt = GrowingPrompt(renderer)
        self._messages: list[Message] = []  # so far, as a `MessagePlayer` is given them
        self._told: list[Message] = []

    @property
    def name(self) -> str:
        return self._seat.name

    @property
    def player(self) -> Player:
        return self._seat.player

    async def ask(self, messages: Sequence[Message]) -> Message:
        heard = [*self._told, *map(snapshot, messages)]
        self._told = []
        self._seat.record(heard)
        self._messages.extend(heard)
        if isinstance(self.player, MessagePlayer):
            answer = await self._seat.reply([snapshot(message) for message in self._messages])
        else:
            answer = await self._ask_in_tokens(heard)
        self._messages.append(answer)
        self._seat.record([answer])
        return snapshot(answer)

    def tell(self, messages: Sequence[Message]) -> None:
        self._told.extend(map(snapshot, messages))

    def reward(self, name: str, value: float) -> None:
        self._seat.reward(name, value)

    def end(self) -> None:
        """What it was told last is in its transcript."""
        self._seat.record(self._told)
        self._told = []

    async def _ask_in_tokens(self, heard: Sequence[Message]) -> Message:
        try:
            prompt = await self._prompt.next(heard, f"the game of seat {self.name!r}")
        except PromptTooLongError as error:
            raise self._seat.leave(RolloutStatus.TRUNCATED_PROMPT, str(error)) from None
        completion = await self._seat.generate(prompt)
        answer = self._prompt.read(completion)
        if answer is not None and answer.is_whole and completion.finish_reason is not FinishReason.LENGTH:
            return answer.message
        if answer is not None:
            self._seat.record([answer.message])
        if completion.finish_reason is FinishReason.LENGTH:
            raise self._seat.leave(RolloutStatus.TRUNCATED_LENGTH, "its answer used up the token budget")
        raise self._seat.leave(RolloutStatus.ERROR_PARSE, "its answer cannot be parsed")
