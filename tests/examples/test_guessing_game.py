"""The guessing game, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatting import mean_demonstrated, play

from examples.guessing_game.task import GuessingGame
from titan_rl import Message, RolloutStatus


def halving(largest: int) -> Callable[[Sequence[Message]], str]:
    """Guesses the middle of what is left."""

    def say(messages: Sequence[Message]) -> str:
        low, high = 1, largest
        for guess, hint in zip(messages[1::2], messages[2::2], strict=True):
            if hint["content"] == "higher":
                low = int(guess["content"]) + 1
            else:
                high = int(guess["content"]) - 1
        return str((low + high) // 2)

    return say


async def test_halving_finds_every_number_in_time() -> None:
    games = [await play(GuessingGame(), secret, halving(15)) for secret in range(1, 16)]
    assert [game.reward for game in games] == [1.0] * 15
    assert max(len(game.turns) for game in games) == 4


async def test_a_game_ends_with_its_guesses_and_every_answer_is_one() -> None:
    guesses = iter(["eight", "3", "12", "10"])
    game = await play(GuessingGame(), 9, lambda messages: next(guesses))
    said = [message["content"] for message in game.messages if message["role"] == "user"]
    assert said[1:] == ["Say a number from 1 to 15.", "higher", "lower"]
    assert (game.status, game.reward) == (RolloutStatus.COMPLETED, 0.0)


async def test_demonstrations_guess_at_random() -> None:
    assert 0.15 < await mean_demonstrated(GuessingGame(), 200) < 0.4
