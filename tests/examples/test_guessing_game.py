"""Guessing game: turns, rewards, and demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from chatting import mean_demonstrated, play

from examples.guessing_game.task import GuessingGame, remaining
from titan_rl import Message, RolloutStatus


def halve(messages: Sequence[Message]) -> str:
    """Guess the middle of the remaining range."""
    return str(sum(remaining(messages)) // 2)


async def test_bisection_finds_every_number_in_time() -> None:
    games = [await play(GuessingGame(), secret, halve) for secret in range(1, 16)]
    assert [game.reward for game in games] == [1.0] * 15
    assert max(len(game.turns) for game in games) == 4


async def test_game_ends_after_its_guesses_and_every_answer_counts_as_one() -> None:
    guesses = iter(["eight", "3", "12", "10"])
    game = await play(GuessingGame(guesses=4), 9, lambda messages: next(guesses))
    said = [message["content"] for message in game.messages if message["role"] == "user"]
    assert said[1:] == ["It is from 1 to 15.", "It is from 4 to 15.", "It is from 4 to 11."]
    assert (game.status, game.reward) == (RolloutStatus.COMPLETED, 0.375)
    assert game.reward_breakdown == {"found": 0.0, "sensible": 0.75}


async def test_ruled_out_guess_is_not_sensible() -> None:
    guesses = iter(["8", "4", "12", "9"])
    assert (await play(GuessingGame(), 9, lambda messages: next(guesses))).reward_breakdown == {
        "found": 1.0,
        "sensible": 0.75,
    }


async def test_demonstration_accuracy_follows_careless() -> None:
    forgetful, sloppy = [
        await mean_demonstrated(GuessingGame(careless=share), 300, carelessly=True) for share in (1, 0.5)
    ]
    assert 0.35 < forgetful < sloppy - 0.1
    assert sloppy + 0.1 < await mean_demonstrated(GuessingGame(), 300) < 1.0
