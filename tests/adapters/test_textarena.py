"""Games of the textarena package."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from adapters.playing import play
from byte_tokenizer import byte_tokenizer

from titan_rl import ChatTemplateRenderer, Completion, FinishReason, Rollouter, SamplingParams, VersionSpan
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.types import Message, RolloutGroup, RolloutStatus
from titan_rl.tasks.adapters.textarena import TextArena

if importlib.util.find_spec("textarena") is None:
    pytest.skip("textarena is not installed", allow_module_level=True)

from textarena.envs.registration import ENV_REGISTRY

TOKENIZER = byte_tokenizer()

# By line: games that need an OpenRouter key, a word list from the network, files that the package lacks, or a newer
# Python. The last one fails at its first move.
UNAVAILABLE = """
    Debate GuessWho ScenarioPlanning TwentyQuestions
    Codenames DontSayIt Hangman LetterAuction SpellingBee WordChains WordLadder WordSearch Wordle
    ScorableGames UsedCar UsedCarNegotiation
    Checkers Chess IteratedStagHunt Klondike ReverseTicTacToe UltimateTexasHoldem
    CharacterConclave
""".split()  # noqa: SIM905
GAMES = {ENV_REGISTRY[name].entry_point: name for name in reversed(ENV_REGISTRY) if name.endswith("-raw")}


def halving() -> Callable[[Sequence[Message]], str]:
    """Make a policy that guesses a number by bisection."""
    low, high = 1, 20

    def guess(messages: Sequence[Message]) -> str:
        nonlocal low, high
        middle = (low + high) // 2
        last = messages[-1]["content"] if len(messages) > 1 else ""
        if "higher" in last:
            low = middle + 1
        elif "lower" in last:
            high = middle - 1
        return f"[{(low + high) // 2}]"

    return guess


@pytest.mark.parametrize("name", [name for name in GAMES.values() if name.partition("-")[0] not in UNAVAILABLE])
def test_every_game_starts_and_accepts_a_move(name: str) -> None:
    task = TextArena(env_id=name)
    task.check_settings()
    sample = task.train_sample(0, 0)
    assert task.seat_names == tuple(f"player_{number}" for number in range(len(task.seat_names)))
    game = task.begin(sample)
    player, seen = game.observe()
    assert seen
    game.move(player, "[0]")
    assert game.done or game.observe()[1]


async def play_in_tokens(task: TextArena, sample: Any, policy: Callable[[str], str], size: int = 2) -> RolloutGroup:
    """Play a group with a policy that reads the whole conversation as text."""

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        said = policy(TOKENIZER.decode(prompt_token_ids))
        tokens = [*TOKENIZER.encode(said), TOKENIZER.eos_token_id]
        return Completion(request_id, tokens, [0.0] * len(tokens), FinishReason.STOP, [VersionSpan(0, len(tokens))])

    renderer = ChatTemplateRenderer(TOKENIZER)
    rollouter = Rollouter(lambda sample: task.make_env(sample, renderer), task.rubric(), max_context=20_000)
    return await rollouter.run_group(
        generate, sample, group_id="g", group_size=size, sampling=SamplingParams(max_tokens=100)
    )


@pytest.mark.parametrize("game", ["GuessTheNumber-v0-raw", "GuessTheNumber-v0"])
async def test_single_player_game_is_played_to_its_end(game: str) -> None:
    task = TextArena(env_id=game)
    task.check_settings()
    group = await play(task, task.train_sample(0, 0), halving(), lambda _: "[21]")
    won, lost = group.rollouts
    assert (won.status, won.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert won.reward_breakdown == {"reward": 1.0, "invalid_moves": 0.0, "ended_by_invalid_move": 0.0}
    assert "between 1 and 20" in won.messages[0]["content"]
    assert all("between 1 and 20" not in message["content"] for message in won.messages[1:])  # nothing is repeated
    assert lost.status is RolloutStatus.COMPLETED
    assert "invalid move" in lost.messages[2]["content"]
    assert lost.reward_breakdown["invalid_moves"] == 1.0
    assert lost.reward_breakdown["ended_by_invalid_move"] == 1.0
    assert lost.reward is not None
    assert lost.reward < won.reward


async def test_unfinished_game_is_lost() -> None:
    task = TextArena(env_id="GuessTheNumber-v0-raw", lost_reward=-0.5)
    group = await play(task, task.train_sample(0, 0), halving(), max_turns=1)
    assert (group.rollouts[0].status, group.rollouts[0].reward) == (RolloutStatus.TRUNCATED_TURNS, -0.5)


async def test_siblings_play_the_same_game_concurrently() -> None:
    task = TextArena(env_id="GuessTheNumber-v0-raw")
    sample = task.train_sample(0, 1)
    random.seed(5)
    expected = random.Random(5).random()
    groups = await asyncio.gather(*(play(task, sample, *[halving() for _ in range(8)]) for _ in range(3)))
    assert len({str(rollout.messages) for group in groups for rollout in group.rollouts}) == 1
    assert random.random() == expected  # the global random state is unchanged
    other = await play(task, task.train_sample(0, 2), halving())
    assert other.rollouts[0].messages != groups[0].rollouts[0].messages


async def test_policy_plays_all_seats() -> None:
    task = TextArena(env_id="TicTacToe-v0-raw")
    task.check_settings()
    group = await play_in_tokens(task, task.train_sample(0, 0), lambda text: re.findall(r"'(\[\d\])'", text)[-1])
    assert len(group.rollouts) == 4  # two siblings, two seats
    by_seat = {rollout.seat: rollout for rollout in group.rollouts}
    assert sorted(by_seat) == ["player_0", "player_1"]
    assert sum(rollout.reward or 0.0 for rollout in by_seat.values()) == 0.0
    assert {rollout.reward for rollout in group.rollouts} <= {1.0, -1.0, 0.0}
    first, second = by_seat["player_0"].messages, by_seat["player_1"].messages
    assert "You are Player 0" in first[0]["content"]
    assert "You are Player 1" in second[0]["content"]
    assert "[Player 0]" in second[0]["content"]  # it sees the other player's moves
    assert "has won" in str(first[-1]) or first[-1]["role"] == "user"


async def test_function_plays_the_other_seats() -> None:
    task = TextArena(env_id="TicTacToe-v0-raw", seats={"player_1": "adapters.playing:free_square"}, rotate="sample")
    seats = []
    for index in range(6):
        group = await play_in_tokens(
            task, task.train_sample(0, index), lambda text: re.findall(r"'(\[\d\])'", text)[-1]
        )
        seats += [rollout.seat for rollout in group.rollouts]
        assert all(rollout.status is RolloutStatus.COMPLETED for rollout in group.rollouts)
    assert len(seats) == 12  # one rollout of each of the two siblings
    assert set(seats) == {"player_0", "player_1"}


async def test_wrappers_are_applied_to_the_game() -> None:
    task = TextArena(env_id="GuessTheNumber-v0-raw", wrappers=("ActionFormattingWrapper",))
    bare = halving()
    group = await play(task, task.train_sample(0, 0), lambda messages: bare(messages).strip("[]"))
    assert group.rollouts[0].reward == 1.0


def test_training_and_validation_have_different_seeds() -> None:
    task = TextArena(env_id="GuessTheNumber-v0-raw")
    trained = {task.train_sample(seed, index)["seed"] for seed in range(2) for index in range(100)}
    held_out = {sample["seed"] for sample in task.validation_samples(100)}
    assert len(trained) == 200
    assert len(held_out) == 100
    assert not trained & held_out
    assert task.validation_samples(5) == task.validation_samples(100)[:5]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"env_id": "TicTacTo-v0"},
            r"task.env_id = 'TicTacTo-v0' is not one of the \d+ games of textarena; .*TicTacToe-v0",
        ),
        ({"options": {"nothing": 3}}, "cannot be made: TypeError"),
        ({"wrappers": ("ActionFormatting",)}, "not one of .* wrappers of textarena.*ActionFormattingWrapper"),
        ({"seats": {"player_1": "adapters.playing:free_square"}}, "task.seats has player_1; the seats are player_0"),
        ({"num_players": 3}, "3 players with seed 0 cannot begin"),
        ({"env_id": "Debate-v0"}, "OPENROUTER_API_KEY"),
    ],
)
def test_check_settings_rejects_invalid_settings(
    settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=said):
        TextArena(**{"env_id": "GuessTheNumber-v0", **settings}).check_settings()
