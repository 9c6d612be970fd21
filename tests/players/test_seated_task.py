"""Players of a task's seats, from its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from titan_rl import (
    Completion,
    ConfigError,
    FinishReason,
    Message,
    MessagePlayer,
    MessageSeat,
    Player,
    Rubric,
    SamplingParams,
    SeatedTask,
    VersionSpan,
    env_reward,
    load_config,
)
from titan_rl.core.console import LOG
from titan_rl.core.errors import GenerationError
from titan_rl.rollout.task import RunContext
from titan_rl.rollout.types import Matched
from titan_rl.tasks.league import LeagueSeat
from titan_rl.tasks.players import Endpoint, FrozenPolicy
from titan_rl.tasks.policy_servers import PersistentGenerate, new_log


class Silence:
    async def play_seats(self, seats: Mapping[str, MessageSeat]) -> None: ...

    async def close(self) -> None: ...


class Trio(SeatedTask):
    seat_names = ("a", "b", "c")

    def train_sample(self, seed: int, index: int) -> int:
        return index

    def validation_samples(self, count: int) -> Sequence[int]:
        return range(count)

    def game(self, sample: Any) -> Silence:
        return Silence()

    def rubric(self) -> Rubric:
        return Rubric([env_reward("won")])


def echo(messages: Sequence[Message]) -> str:
    return str(messages[-1]["content"])


ECHO = f"{__name__}:echo"


def kinds(players: Mapping[str, Player]) -> str:
    return "".join("p" if player == "policy" else "s" for player in players.values())


def task_of(**fields: Any) -> Trio:
    return Trio.model_validate(fields)


def players_of(task: Trio, sibling: int = 0, sample: int = 0) -> Mapping[str, Player]:
    return task.make_env(sample, None).players(sibling)  # pyright: ignore[reportArgumentType]


def test_unassigned_seats_belong_to_the_policy() -> None:
    assert kinds(players_of(task_of())) == "ppp"
    players = players_of(task_of(seats={"b": ECHO}))
    assert kinds(players) == "psp"
    assert players["b"] == MessagePlayer(echo)


def test_players_rotate_by_sibling_or_by_sample() -> None:
    by_sibling = task_of(seats={"a": ECHO}, rotate="sibling")
    assert [kinds(players_of(by_sibling, sibling)) for sibling in range(4)] == ["spp", "pps", "psp", "spp"]
    by_sample = task_of(seats={"a": ECHO}, rotate="sample")
    assert {kinds(players_of(by_sample, sample=sample)) for sample in range(20)} == {"spp", "pps", "psp"}
    assert len({kinds(players_of(by_sample, sibling, 7)) for sibling in range(4)}) == 1


def test_seat_settings_accept_each_kind_of_player() -> None:
    task = task_of(seats={"a": "policy", "b": {"url": "http://x/v1", "model": "m"}, "c": {"policy": "runs/latest"}})
    assert task.seats == {
        "a": "policy", "b": Endpoint(url="http://x/v1", model="m"), "c": FrozenPolicy(policy="runs/latest"),
    }  # fmt: skip
    assert Trio.model_validate(task.model_dump(mode="json")) == task


def test_league_seat_is_played_by_the_matched_version() -> None:
    task = task_of(seats={"b": {"league": "even", "every": 5}})
    assert task.league == LeagueSeat(league="even", every=5)
    assert Trio.model_validate(task.model_dump(mode="json")) == task
    assert kinds(players_of(task)) == "ppp", "the policy plays the seat if no version is chosen"
    with pytest.raises(RuntimeError, match="version 5, which only answers in a run"):
        task.make_env(Matched(0, 5), None)  # pyright: ignore[reportArgumentType]
    two = task_of(seats={"a": {"league": "even"}, "b": {"league": "hard"}})
    with pytest.raises(ConfigError, match="two different leagues"):
        two.check_settings()
    with pytest.raises(ConfigError, match="gives the policy no seat"):
        task_of(seats={seat: {"league": "hard"} for seat in "abc"}).check_settings()


@pytest.mark.looptime
async def test_retries_when_the_server_of_a_version_fails() -> None:
    failures = [GenerationError("the connection is refused")] * 4

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        if failures:
            raise failures.pop()
        return Completion(request_id, [5], [0.0], FinishReason.STOP, (VersionSpan(0, 1),))

    sampling = SamplingParams(max_tokens=1)
    answer = await PersistentGenerate(generate, "step-000010")([1], request_id="r", sampling=sampling)
    assert list(answer.token_ids) == [5]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (7, 'must be "policy", "module:function" of a script'),
        ("polcy", 'must be one of policy, or your own as "module:function"'),
        ({"url": "http://x/v1"}, "model"),
        ({"policy": "runs/latest", "modle": "m"}, "modle"),
    ],
)
def test_rejects_invalid_players(setting: Any, said: str) -> None:
    with pytest.raises(ValidationError) as error:
        task_of(seats={"a": setting})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("seats", "said"),
    [
        ({"d": "policy"}, "task.seats has d; the seats are a, b, c"),
        (dict.fromkeys("abc", ECHO), "gives the policy no seat"),
    ],
)
def test_check_settings_rejects_invalid_seats(seats: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task_of(seats=seats).check_settings()


@pytest.mark.parametrize(
    ("seat", "said"),
    [
        (
            '{ league = "hard", settings = { "generation.kv_gib" = "1" } }',
            "task.seats.b.settings: generation.kv_gib = 1 is not a setting; nearest: generation.kv_cache_gib",
        ),
        (
            '{ policy = "old", settings = { "generation.max_running" = "none of many" } }',
            "task.seats.b.settings: generation.max_running = 'none of many' must be",
        ),
        ('{ league = "hard", every = 0 }', "config.toml: task.seats.b.every = 0 must be greater than 0"),
        ('{ league = "harder" }', "config.toml: task.seats.b.league = 'harder' must be 'hard', 'even' or 'uniform'"),
    ],
)
def test_invalid_seat_setting_error_names_its_toml_key(tmp_path: Path, seat: str, said: str) -> None:
    (tmp_path / "old").mkdir()
    toml = f'[model]\npath = "m"\nmax_context = 512\n[task]\ntype = "{__name__}:Trio"\nseats.b = {seat}\n'
    (tmp_path / "config.toml").write_text(toml)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(tmp_path / "config.toml", check_files=False)


def test_checkpoint_path_is_relative_to_its_config_file(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    toml = f'[model]\npath = "m"\nmax_context = 512\n[task]\ntype = "{__name__}:Trio"\nseats.b = {{ policy = "old" }}\n'
    (tmp_path / "config.toml").write_text(toml)
    (source,) = load_config(tmp_path / "config.toml", check_files=False).sources
    assert isinstance(source.task, Trio)
    assert source.task.seats == {"b": FrozenPolicy(policy=str(tmp_path / "old"))}


async def test_endpoint_answers_only_while_the_task_is_open(tmp_path: Path) -> None:
    task = task_of(seats={"b": {"url": "http://x/v1", "model": "m", "timeout_s": 9.0}})
    with pytest.raises(RuntimeError, match="answers while the task is open"):
        players_of(task)
    run = RunContext("model", None, 64, tmp_path, LOG)  # pyright: ignore[reportArgumentType]
    async with task.open(run):
        player = players_of(task)["b"]
        assert isinstance(player, MessagePlayer)
        assert player.timeout_s == 9.0


async def test_dry_run_replaces_endpoints_and_checkpoints_with_the_policy(tmp_path: Path) -> None:
    task = task_of(seats={"a": ECHO, "b": {"url": "http://x/v1", "model": "m"}, "c": {"policy": str(tmp_path)}})
    run = RunContext("model", None, 64, tmp_path, LOG, dry=True)  # pyright: ignore[reportArgumentType]
    async with task.open(run):
        players = players_of(task)
    assert isinstance(players["a"], MessagePlayer)
    assert (players["b"], players["c"]) == ("policy", "policy")


def test_servers_of_the_same_name_get_separate_logs(tmp_path: Path) -> None:
    logs = [new_log(tmp_path / "logs", "teacher-export-7") for _ in range(3)]
    assert [log.name for log in logs] == ["teacher-export-7.log", "teacher-export-7-2.log", "teacher-export-7-3.log"]
    assert all(log.is_file() for log in logs)
