"""`titan-rl play` with input from a pipe."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from cli.test_eval import Adder, adder, config

from titan_rl.cli.main import main
from titan_rl.run.process.environment import process_scratch

__all__ = ["adder", "config"]

BASE = Path(__file__).parents[2] / "examples" / "alphabet_sort" / "base"

TOOLS = """
from titan_rl import MessageObservation, MessageStep, MessageTokenEnv, RolloutStatus, Rubric, env_reward
from titan_rl.core.settings import Section

LOOK = {"type": "function", "function": {"name": "look", "description": "See.", "parameters": {
    "type": "object", "properties": {"at": {"type": "integer"}}}}}

class Env:
    async def reset(self): return MessageObservation([{"role": "user", "content": "Look at 3."}], [LOOK])
    async def step(self, message):
        if not message.get("tool_calls"):
            return MessageStep([{"role": "user", "content": "Use your tool."}], rewards={"looked": 0.0})
        right = message["tool_calls"][0]["function"]["arguments"] == {"at": 3}
        return MessageStep(status=RolloutStatus.COMPLETED, rewards={"looked": float(right)})
    async def close(self): ...

class Sums(Section):
    def train_sample(self, seed, index): return index
    def validation_samples(self, count): return list(range(min(count, 2)))
    def make_env(self, sample, renderer): return MessageTokenEnv(Env(), renderer)
    def rubric(self): return Rubric([env_reward("looked")])
"""


def play(typed: str | None, *arguments: str) -> int:
    before, sys.stdin = sys.stdin, None if typed is None else io.StringIO(typed)
    try:
        return main(["play", "sums.toml", *arguments])
    finally:
        sys.stdin = before


def test_typed_reply_is_tokenized_parsed_and_scored(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play("/tokens\nAl\n/tokens\n", "--model.path", str(BASE), "--sample", "4", "--validation") == 0
    out = capfd.readouterr().out
    assert "--- held-out sample 4 of sums\n[user] 4 + 1\n" in out
    assert "    prompt: " in out
    assert ":'<|im_start|>'" in out
    assert "[assistant] Al\n    reward right = 0\n=== completed: reward 0 (right 0); 1 turn, 3 tokens written\n" in out


def test_plays_several_samples_until_end_of_input(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play('/nonsense\n"""\n2\n"""\n2\n', "--sample", "1", "--count", "9") == 0
    out, err = capfd.readouterr()
    assert "does not exist, so this is played in messages, without tokens" in err
    assert "titan-rl: there is no command /nonsense" in err
    assert "a line is a reply" in err
    assert "a line is a reply" not in out
    assert out.count("=== completed") == 2
    assert "=== completed: reward 1 (right 1)" in out
    assert out.endswith(
        "--- training sample 3 of sums\n[user] 3 + 1\n=== aborted: no reward; 1 turn, 0 tokens written\n"
    )
    assert play("5\n/quit\n7\n", "--count", "2") == 0
    assert capfd.readouterr().out.count("=== ") == 2


def test_folder_of_the_task_is_removed_even_if_the_process_is_killed(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder of the process is removed however the process ends."""
    (config.parent / "own_sums.py").write_text(
        f"import contextlib\n{TOOLS}    @contextlib.asynccontextmanager\n"
        "    async def open(self, run):\n        print('in', run.folder)\n        yield\n"
    )
    assert play("") == 0
    folder = re.search(r"^in (.*)$", capfd.readouterr().out, re.MULTILINE)
    assert folder is not None
    assert Path(folder[1]).parent == process_scratch()


def test_suggested_next_command_plays_the_following_samples(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--count", "2", "--validation", "--task", "sums", "--temperature=0.5", "--sampling.max_tokens=9"]
    assert play("1\n2\n", "--sample", "1", *options) == 0
    last_line = capfd.readouterr().err.splitlines()[-1]
    assert last_line == f"titan-rl: next: titan-rl play sums.toml --sample 3 {' '.join(options)}"


def test_unfinished_block_aborts_and_invalid_bytes_are_escaped(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play('"""\n1\n4\n') == 0
    out, err = capfd.readouterr()
    assert "the input ends within" in err
    assert "=== aborted" in out
    assert play("\udcff\n", "--model.path", str(BASE)) == 0
    out = capfd.readouterr().out
    assert "[assistant] \\udcff\n" in out
    assert "=== completed" in out


@pytest.mark.parametrize("typed", ["", None])
def test_empty_or_closed_standard_input_ends_the_game(
    config: Path, capfd: pytest.CaptureFixture[str], typed: str | None
) -> None:
    assert play(typed) == 0
    assert "titan-rl: played" in capfd.readouterr().err


def test_tools_are_listed_and_called(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (config.parent / "own_sums.py").write_text(TOOLS)
    assert play('What?\n/call look {"at"\n/call look {"at": 3}\n') == 0
    out, err = capfd.readouterr()
    assert "[tool] look(at: integer)  See.\n[user] Look at 3.\n" in out
    assert "[assistant] What?\n[user] Use your tool.\n    reward looked = 0\n" in out
    assert "is not valid JSON" in err
    assert '[assistant]\n    calls look {"at": 3}\n    reward looked = 1\n=== completed: reward 1' in out
    assert play("", "--validation", "--sample", "7") == 2
    assert "sums has 2 held-out samples" in capfd.readouterr().err


def test_token_environment_is_played_in_token_ids(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (config.parent / "own_sums.py").write_text("from run.test_controller import Counting\nclass Sums(Counting): ...\n")
    assert play("x\n1\n0\n", "--model.path", str(BASE)) == 0
    out, err = capfd.readouterr()
    assert "[prompt, 1 tokens] '#'\n" in out
    assert "type token ids, such as: 5 9 2\n" in err
    assert "=== completed: reward 2 (turns 2); 2 turns, 2 tokens written\n" in out


GAME = """
import asyncio
from titan_rl import MessageGame, Rubric, env_reward
from titan_rl.core.settings import Section

class Match:
    async def play_seats(self, seats):
        question = [{"role": "user", "content": "Heads or tails?"}]
        first, second = await asyncio.gather(*(seat.ask(question) for seat in seats.values()))
        for seat in seats.values():
            seat.reward("same", float(first["content"] == second["content"]))
    async def close(self): ...

class Sums(Section):
    def train_sample(self, seed, index): return index
    def validation_samples(self, count): return list(range(count))
    def make_env(self, sample, renderer): return MessageGame(Match(), renderer, {"a": "policy", "b": "policy"})
    def rubric(self): return Rubric([env_reward("same")])
"""


def test_person_plays_every_seat_of_a_message_game(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (config.parent / "own_sums.py").write_text(GAME)
    assert play("Al\nAl\n", "--model.path", str(BASE)) == 0
    out, err = capfd.readouterr()
    for seat in "ab":
        assert f"--- seat {seat}\n[user] Heads or tails?\n" in out
        assert f"--- seat {seat}\n[assistant] Al\n    reward same of {seat} = 1\n" in out
    assert "token ids" not in err
    assert "[prompt, " not in out
    assert out.count("=== completed: reward 1 (same 1); 1 turn, 3 tokens written\n") == 2


def test_policy_option_shows_a_policy_playing(adder: Adder, config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play("", "--policy", adder.url, "--sample", "6", "--max-tokens", "3") == 0
    out = capfd.readouterr().out
    assert (
        "[user] 6 + 1\n[assistant] 7\n    reward right = 1\n=== completed: reward 1 (right 1); 1 turn, 1 tokens" in out
    )
    assert adder.asked[0]["max_tokens"] == 3


def test_failing_reward_is_reported_once(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = TOOLS.replace('env_reward("looked")', "Reward(seen)").replace("import Message", "import Reward, Message", 1)
    Path("fails.py").write_text(task + "\ndef seen(rollout): return rollout.messages[7]\n")
    assert play('/call look {"at": 3}\n', "--task.type", "fails:Sums") == 0
    out = capfd.readouterr().out
    assert out.count("IndexError") == 1
    assert "no reward; 1 turn" in out
    assert "the rubric failed: RewardError: reward 'seen' failed" in out
