"""Random games, with answers in any order and a fault at any seat."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from table import BOTH, Seats, Table

from titan_rl import Completion, FinishReason, Player, RolloutConfig, RolloutGroup, SamplingParams, VersionSpan
from titan_rl.generation.continuation import Generation, request_fn
from titan_rl.run.journal.run_journal import RunJournal

SEATS = ("first", "second", "third")
PLAYERS: dict[str, Player] = {**BOTH, "third": "policy"}
Round = frozenset[str]
"""Seats that are asked concurrently."""

rounds = st.lists(st.frozensets(st.sampled_from(SEATS), min_size=1), min_size=1, max_size=4)
two_orders = st.tuples(st.integers(), st.integers())
ends = st.sampled_from(["answers", "raises", "aborts", "is cut off"])


class Answers:
    """`GenerateFn` whose answers depend on prompt and seed, and arrive in an order that depends on `order`. The request
    whose id ends with `struck` has the outcome `end`."""

    def __init__(self, order: int, struck: str, end: str) -> None:
        self.requests: Counter[str] = Counter()
        self._random = random.Random(order)
        self._struck, self._end = struck, end

    async def __call__(
        self, prompt_token_ids: Sequence[int], *, request_id: str, session_id: Any = None, sampling: SamplingParams
    ) -> Completion:
        assert request_id.startswith(f"{session_id}/")
        self.requests[request_id] += 1
        for _ in range(self._random.randrange(5)):
            await asyncio.sleep(0)
        reason = FinishReason.STOP
        if request_id.endswith(self._struck):
            if self._end == "raises":
                raise ConnectionError("gone")
            reason = {"aborts": FinishReason.ABORT, "is cut off": FinishReason.LENGTH}.get(self._end, reason)
        token = (sum(prompt_token_ids) * 31 + (sampling.seed or 0)) % 997
        return Completion(request_id, [token, 1], [-0.5, -0.1], reason, (VersionSpan(0, 2),))


def course_of(plan: Sequence[Round]) -> Any:
    """Make a game in which the next prompt of each seat contains all answers of the previous round."""

    async def play(seats: Seats) -> None:
        prompts: dict[str, list[int]] = {name: [number + 2] for number, name in enumerate(SEATS)}
        for asked in plan:
            names = sorted(asked)
            said = await asyncio.gather(*(seats[name].generate(prompts[name]) for name in names))
            heard = sum(completion.token_ids[0] for completion in said) % 101
            for name, completion in zip(names, said, strict=True):
                prompts[name] += [*completion.token_ids, heard]
        for name in SEATS:
            seats[name].reward("won", float(len(prompts[name])))

    return play


def same(one: RolloutGroup, other: RolloutGroup) -> bool:
    def fields(group: RolloutGroup) -> list[Any]:
        return [
            (r.rollout_id, r.status, r.turns, r.messages, r.reward, r.advantage) for r in group.rollouts
        ]  # fmt: skip

    return fields(one) == fields(other)


@settings(max_examples=examples(60), deadline=None)
@given(
    plan=rounds,
    struck=st.sampled_from(SEATS),
    at=st.integers(0, 3),
    end=ends,
    orders=st.tuples(st.integers(), st.integers()),
)
async def test_random_games_with_a_fault_keep_consistent_records(
    plan: list[Round], struck: str, at: int, end: str, orders: tuple[int, int]
) -> None:
    hit = f"g/1/{struck}/{at}"
    is_hit = end != "answers" and sum(struck in asked for asked in plan) > at
    table = Table(course_of(plan), PLAYERS, limits=RolloutConfig(max_turns=8))
    generate = Answers(orders[0], hit, end)
    group = await table.group(generate, 3)

    assert [rollout.rollout_id for rollout in group.rollouts] == [f"g/{i}/{name}" for i in range(3) for name in SEATS]
    assert Counter(table.finished) == Counter(rollout.rollout_id for rollout in group.rollouts)
    assert all(hand.closed == 1 for hand in table.hands)
    assert set(generate.requests.values()) == {1}
    for rollout in group.rollouts:
        so_far: list[int] = []
        for number, turn in enumerate(rollout.turns):
            assert turn.completion.request_id == f"{rollout.rollout_id}/{number}"
            assert list(turn.prompt_token_ids[: len(so_far)]) == so_far
            so_far = [*turn.prompt_token_ids, *turn.completion.token_ids]

    of_game = [{r.status.value for r in group.rollouts if r.sibling == sibling} for sibling in range(3)]
    assert of_game[0] | of_game[2] <= {"completed", "undecided"}
    if is_hit and end in ("raises", "aborts"):
        assert of_game[1] == {"error_generate" if end == "raises" else "aborted"}
    for rollouts in group.by_seat.values():
        played = [r for r in rollouts if r.sibling != 1]
        asked = sum(rollouts[0].seat in round for round in plan)
        if end != "aborts" or not is_hit:
            assert [r.reward is not None for r in played] == [asked > 0] * 2
            assert [r.advantage is not None for r in played] == [asked > 0] * 2

    again = await table.group(Answers(orders[1], hit, end), 3)
    assert same(group, again) or is_hit  # then the result depends on the order of the answers


@settings(max_examples=examples(40), deadline=None)
@given(plan=rounds, kept=st.sets(st.integers(0, 40)), orders=two_orders)
async def test_game_replayed_from_recorded_answers_is_the_same(
    plan: list[Round], kept: set[int], orders: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any subset of its answers that was recorded before the run was killed."""
    journal = RunJournal(tmp_path_factory.mktemp("journal"))
    generate = Generation(request_fn(Answers(orders[0], "none", "answers")), around_attempt=[journal.recorder(0).step])
    group = await Table(course_of(plan), PLAYERS).group(generate, 2)

    answers = journal.state.completions.get(0, {})
    known = {key: answer for number, (key, answer) in enumerate(answers.items()) if number in kept}
    journal.state.completions[0] = dict(known)
    live = Answers(orders[1], "none", "answers")
    generate = Generation(request_fn(live), around_attempt=[journal.recorder(0).step])
    again = await Table(course_of(plan), PLAYERS).group(generate, 2)
    journal.close()
    assert same(group, again)
    assert not live.requests.keys() & {request_id for request_id, _ in known}
