"""Environments with several seats: rollouts of the policy's seats, and the end of a game."""

import asyncio
import contextlib
from typing import Any

import pytest
from table import BOTH, Answers, Seats, Table, turn

from titan_rl import (
    Completion,
    FinishReason,
    MessagePlayer,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    SeatOutError,
    TokenPlayer,
    VersionSpan,
)
from titan_rl.core.calls import stopwatch
from titan_rl.scheduling.filters import too_few_siblings, zero_variance
from titan_rl.training.data.sample_builder import build_samples

pytestmark = pytest.mark.looptime


async def one_each(seats: Seats) -> None:
    for number, seat in enumerate(seats.values()):
        await turn(seat, [10 + number])
    seats["first"].reward("won", 1.0)
    seats["second"].reward("won", -1.0)


def statuses(rollouts: list[Rollout]) -> dict[str | None, str]:
    return {rollout.seat: rollout.status.value for rollout in rollouts}


async def test_each_policy_seat_is_a_rollout_with_its_own_session() -> None:
    table, generate = Table(one_each), Answers()
    ended: list[str] = []
    group = await table.group(generate, 2, on_finished=lambda rollout: ended.append(rollout.rollout_id))
    ids = ["g/0/first", "g/0/second", "g/1/first", "g/1/second"]
    assert [rollout.rollout_id for rollout in group.rollouts] == ids
    assert sorted(generate.requests) == [f"{name}/0" for name in ids]
    assert generate.sessions == set(ids) == set(table.finished) == set(ended)
    assert len(ended) == len(table.finished) == 4
    assert [hand.closed for hand in table.hands] == [1, 1]
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.COMPLETED}
    assert list(group.by_seat) == ["first", "second"]
    seeds = {turn.sampling.seed for rollout in group.rollouts for turn in rollout.turns if turn.sampling}
    assert len(seeds) == 4


async def test_advantages_compare_the_rollouts_of_one_seat() -> None:
    chips = iter([1.0, 3.0, -1.0, -3.0])  # siblings take turns

    async def play(seats: Seats) -> None:
        for seat in seats.values():
            seat.reward("won", next(chips))  # before its first turn
            await turn(seat, [1])

    group = await Table(play, advantage=lambda rewards: [reward - min(rewards) for reward in rewards]).group(
        Answers(), 2
    )
    assert [(r.seat, r.reward, r.advantage) for r in group.rollouts] == [
        ("first", 1.0, 0.0), ("second", -1.0, 2.0), ("first", 3.0, 2.0), ("second", -3.0, 0.0),
    ]  # fmt: skip
    assert len(build_samples(group)) == 4


async def test_filters_compare_the_rollouts_of_one_seat() -> None:
    group = await Table(one_each).group(Answers(), 2)
    assert zero_variance(group) == "zero_variance"  # 1 and -1, but each seat has one reward
    assert too_few_siblings(group) is None
    single = await Table(one_each).group(Answers(), 1)
    assert too_few_siblings(single) == "too_few_siblings"  # each seat has one rollout, although the group has two


async def test_rewards_of_one_name_add_up() -> None:
    async def play(seats: Seats) -> None:
        prompt = await turn(seats["first"], [1])
        seats["first"].reward("won", 0.25)
        seats["first"].reward("won", 0.5)
        await turn(seats["first"], prompt)
        seats["first"].reward("won", 1.0)

    first, second = (await Table(play).group(Answers())).rollouts
    assert [turn.rewards for turn in first.turns] == [{"won": 0.75}, {"won": 1.0}]
    assert first.reward == 1.75
    assert (second.status, second.reward, second.advantage) == (RolloutStatus.UNDECIDED, None, None)  # never asked


async def test_seats_answer_concurrently_with_one_request_each() -> None:
    async def at_once(seats: Seats) -> None:
        await asyncio.gather(*(turn(seat, [1]) for seat in seats.values()))
        for seat in seats.values():
            seat.reward("won", 1.0)

    rollouts = (await Table(at_once).group(Answers(delay_s=2.0))).rollouts
    assert statuses(rollouts) == {"first": "completed", "second": "completed"}
    assert rollouts[0].metrics["seconds"] == pytest.approx(2.0, abs=0.1)

    async def twice(seats: Seats) -> None:
        await asyncio.gather(turn(seats["first"], [1]), turn(seats["first"], [1]))

    rollouts = (await Table(twice).group(Answers(delay_s=2.0))).rollouts
    assert statuses(rollouts) == {"first": "error_env", "second": "error_env"}
    assert "received a request before it answered" in str(rollouts[0].error)


@pytest.mark.parametrize(
    ("failure", "status"),
    [(KeyError("k"), "error_generate"), (FinishReason.ABORT, "aborted")],
)
async def test_fault_of_one_seat_ends_the_game_for_all(failure: Any, status: str) -> None:
    async def stubborn(seats: Seats) -> None:
        for seat in seats.values():
            with contextlib.suppress(Exception):  # errors of generation do not reach the game
                await turn(seat, [1])
        seats["first"].reward("won", 1.0)

    table = Table(stubborn)
    group = await table.group(Answers({"second/0": failure}))
    assert statuses(group.rollouts) == {"first": status, "second": status}
    assert [len(rollout.turns) for rollout in group.rollouts] == [1, int(status == "aborted")]
    assert table.hands[0].cancelled
    assert group.rollouts[0].advantage is None


async def test_concurrent_request_is_cancelled_when_the_game_ends() -> None:
    caught: list[Exception] = []
    answers = Answers({"first/0": RuntimeError("broken")})

    async def generate(prompt_token_ids: Any, *, request_id: str, **arguments: Any) -> Completion:
        if "second" in request_id:
            await asyncio.sleep(20.0)
        return await answers(prompt_token_ids, request_id=request_id, **arguments)

    async def play(seats: Seats) -> None:
        async def ask(name: str) -> None:
            try:
                await turn(seats[name], [1])
            except Exception as error:
                caught.append(error)

        await asyncio.gather(ask("first"), ask("second"))

    table = Table(play, limits=RolloutConfig(max_retries=0))
    group = await table.group(generate)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.ERROR_GENERATE}
    assert table.hands[0].cancelled
    assert caught == []


async def test_game_error_ends_all_its_rollouts_and_is_retried() -> None:
    plays = 0

    async def play(seats: Seats) -> None:
        nonlocal plays
        plays += 1
        await turn(seats["first"], [1])
        if plays == 1:
            raise KeyError("card")
        await one_each(seats)

    limits = RolloutConfig(max_retries=1)
    table = Table(play, limits=limits)
    group = await table.group(Answers())
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0~1/first", "g/0~1/second"]
    assert {rollout.metrics["retries"] for rollout in group.rollouts} == {1.0}
    assert sorted(table.finished) == ["g/0/first", "g/0/second", "g/0~1/first", "g/0~1/second"]

    plays = 0
    (first, second) = (await Table(play).group(Answers())).rollouts
    assert first.status is second.status is RolloutStatus.ERROR_ENV
    assert first.error == "KeyError: 'card'"


async def test_seat_that_cannot_continue_leaves_the_others_undecided() -> None:
    generate = Answers({"first/0": FinishReason.LENGTH})

    async def continues(seats: Seats) -> None:
        prompt = await turn(seats["first"], [1])  # the game sees the partial answer
        await turn(seats["second"], [1])
        await turn(seats["first"], prompt)

    table = Table(continues)
    first, second = (await table.group(generate)).rollouts
    assert (first.status, second.status) == (RolloutStatus.TRUNCATED_LENGTH, RolloutStatus.UNDECIDED)
    assert (first.reward, second.reward) == (0.0, None)
    assert len(second.turns) == 1
    assert "seat 'first' cannot continue (truncated_length)" in str(second.error)


async def test_game_can_continue_without_a_seat() -> None:
    async def forfeit(seats: Seats) -> None:
        prompt = [1] * 95
        try:
            while True:
                prompt = await turn(seats["first"], prompt)
        except* SeatOutError as outs:  # as a task group raises it
            (out,) = outs.exceptions
            assert isinstance(out, SeatOutError)
            assert (out.seat, out.status) == ("first", RolloutStatus.TRUNCATED_PROMPT)
        await turn(seats["second"], [1])
        seats["second"].reward("won", 1.0)

    first, second = (await Table(forfeit).group(Answers())).rollouts
    assert (first.status, len(first.turns)) == (RolloutStatus.TRUNCATED_PROMPT, 2)
    assert (second.status, second.reward) == (RolloutStatus.COMPLETED, 1.0)


async def test_max_turns_applies_to_each_seat() -> None:
    async def endless(seats: Seats) -> None:
        prompts = {name: [1] for name in seats}
        while True:
            for name, seat in seats.items():
                prompts[name] = await turn(seat, prompts[name])

    rollouts = (await Table(endless, limits=RolloutConfig(max_turns=3)).group(Answers())).rollouts
    assert statuses(rollouts) == {"first": "truncated_turns", "second": "undecided"}
    assert [len(rollout.turns) for rollout in rollouts] == [3, 3]


async def test_finished_turns_are_judged_when_time_is_up() -> None:
    async def long(seats: Seats) -> None:
        await turn(seats["first"], [1])
        seats["first"].reward("won", 0.5)
        while True:
            await asyncio.sleep(4.8)  # shorter than env_timeout_s
            await turn(seats["first"], [1])

    table = Table(long, limits=RolloutConfig(rollout_timeout_s=10.0, env_timeout_s=5.0))
    first, second = (await table.group(Answers(delay_s=1.0))).rollouts
    assert (first.status, first.reward, len(first.turns)) == (RolloutStatus.TRUNCATED_TIME, 0.5, 2)
    assert second.status is RolloutStatus.UNDECIDED
    assert first.metrics["seconds"] == pytest.approx(11.0, abs=0.2)  # plus a second to process the last answer
    assert first.error == "its own time is up: rollout_timeout_s is 10"


async def test_request_cut_off_by_the_time_limit_ends_the_game() -> None:
    async def at_once(seats: Seats) -> None:
        await asyncio.gather(*(turn(seat, [1]) for seat in seats.values()))

    rollouts = (await Table(at_once, limits=RolloutConfig(rollout_timeout_s=3.0)).group(Answers(delay_s=50.0))).rollouts
    assert statuses(rollouts) == {"first": "error_timeout", "second": "error_timeout"}  # no seat has answered
    assert rollouts[0].metrics["seconds"] == pytest.approx(3.0, abs=0.1)


async def test_partial_answers_are_kept_when_time_is_up() -> None:
    async def cut(prompt: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        is_up = asyncio.Event()
        with stopwatch.ending_with(is_up.set):
            await is_up.wait()
        if "first" in request_id:
            return Completion(request_id, [], [], FinishReason.ABORT, ())
        await asyncio.sleep(1.0)
        return Completion(request_id, [5], [-0.5], FinishReason.ABORT, [VersionSpan(0, 1)])

    async def at_once(seats: Seats) -> None:
        await asyncio.gather(*(turn(seat, [1]) for seat in seats.values()))

    rollouts = (await Table(at_once, limits=RolloutConfig(rollout_timeout_s=3.0)).group(cut)).rollouts
    assert statuses(rollouts) == {"first": "undecided", "second": "truncated_time"}
    assert rollouts[1].turns[0].completion.finish_reason is FinishReason.LENGTH


async def test_game_that_stops_asking_seats_times_out_as_a_fault() -> None:
    async def hangs(seats: Seats) -> None:
        await turn(seats["first"], [1])
        await asyncio.Event().wait()

    table = Table(hangs)
    rollouts = (await table.group(Answers(delay_s=9.0))).rollouts
    assert statuses(rollouts) == {"first": "error_timeout", "second": "error_timeout"}
    assert rollouts[0].metrics["seconds"] == pytest.approx(14.0, abs=0.1)
    assert "(env_timeout_s)" in str(rollouts[0].error)
    assert table.hands[0].closed == 1


async def test_tasks_left_behind_by_a_game_are_cancelled() -> None:
    left: list[asyncio.Task[Any]] = []

    async def leaves(seats: Seats) -> None:
        async def later() -> None:
            await asyncio.sleep(0.5)
            await turn(seats["second"], [1])

        left.append(asyncio.create_task(later()))
        await turn(seats["first"], [1])
        seats["first"].reward("won", 1.0)

    generate = Answers({}, delay_s=1.0)
    first, second = (await Table(leaves).group(generate)).rollouts
    await asyncio.sleep(5.0)
    assert left[0].done()
    assert first.status is RolloutStatus.COMPLETED
    assert (second.status, second.turns) == (RolloutStatus.UNDECIDED, [])


async def test_cancelling_a_group_closes_its_games() -> None:
    table, generate = Table(one_each), Answers(delay_s=3.0)
    running = asyncio.create_task(table.group(generate, 2))
    await asyncio.sleep(4.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [hand.closed for hand in table.hands] == [1, 1]
    assert len(table.finished) == 4
    assert sorted(generate.cancelled) == ["g/0/second/0", "g/1/second/0"]


async def test_players_other_than_the_policy_are_not_rollouts() -> None:
    async def frozen(prompt: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        await asyncio.sleep(20.0)  # does not count as the game's own time
        return await Answers()(prompt, request_id=request_id, session_id=session_id, sampling=sampling)

    async def play(seats: Seats) -> None:
        await turn(seats["first"], [1])
        await turn(seats["frozen"], [2])
        said = await seats["script"].reply([{"role": "user", "content": "go"}])
        seats["first"].reward("won", float(said == {"role": "assistant", "content": "go"}))
        seats["script"].reward("won", 0.0)

    players = {
        "first": "policy",
        "frozen": TokenPlayer(frozen),
        "script": MessagePlayer(lambda messages: messages[-1]["content"]),
    }
    generate = Answers()
    (rollout,) = (await Table(play, players).group(generate)).rollouts  # pyright: ignore[reportArgumentType]
    assert (rollout.seat, rollout.status, rollout.reward) == ("first", RolloutStatus.COMPLETED, 1.0)
    assert generate.requests == ["g/0/first/0"]
    assert rollout.metrics["own_seconds"] == pytest.approx(0.0, abs=0.1)


def raises(messages: Any) -> str:
    raise KeyError("move")


async def hangs(messages: Any) -> str:
    return await asyncio.Event().wait() and ""


@pytest.mark.parametrize(
    ("reply", "status", "error"),
    [
        (raises, "error_env", "the player of seat 'second': KeyError: 'move'"),
        (hangs, "error_timeout", "the player of seat 'second': OutOfTimeError: it took longer than 7 s"),
        (lambda messages: 7, "error_env", "it returned 7; a reply must be text or a message"),
    ],
)
async def test_error_of_another_player_is_a_fault(reply: Any, status: str, error: str) -> None:
    async def play(seats: Seats) -> None:
        await turn(seats["first"], [1])
        await seats["second"].reply([])

    table = Table(play, {"first": "policy", "second": MessagePlayer(reply)}, limits=RolloutConfig(env_timeout_s=7.0))
    (rollout,) = (await table.group(Answers())).rollouts
    assert rollout.status == status
    assert error in str(rollout.error)
    assert rollout.status.is_fault


@pytest.mark.parametrize(
    ("players", "error"),
    [
        (None, "must map the names of seats"),
        ({}, "the policy plays none"),
        ({"a/b": "policy"}, "a seat is called 'a/b'"),
        ({"0": "policy"}, "a seat is called '0'"),
        ({"first": "me"}, 'it must be "policy", a TokenPlayer or a MessagePlayer'),
    ],
)
async def test_invalid_seats_are_an_environment_error(players: Any, error: str) -> None:
    (rollout,) = (await Table(one_each, players).group(Answers())).rollouts
    assert (rollout.rollout_id, rollout.status) == ("g/0", RolloutStatus.ERROR_ENV)
    assert error in str(rollout.error)


@pytest.mark.looptime(False)
async def test_game_cannot_run_in_a_thread() -> None:
    (rollout,) = (await Table(one_each, BOTH, limits=RolloutConfig(env_in_thread=True)).group(Answers())).rollouts
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert "set rollout.env_in_thread = false" in str(rollout.error)
