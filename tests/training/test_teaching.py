"""Teachers that score finished rollouts: the tokens they read, outages, and the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import GenerationError, RequestError, TrainingError
from titan_rl.generation.scripted_engine import scripted_logprobs
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.run.journal.records import GroupRecord, decode, encode
from titan_rl.training.data.sample_builder import Distillation, build_samples
from titan_rl.training.teacher import MOST_IN_FLIGHT, Teacher
from titan_rl.types import Completion, FinishReason, PromptScores, SamplingParams, VersionSpan

SAMPLING = SamplingParams(max_tokens=8)


def turn(prompt: Sequence[int], answer: Sequence[int], logprob: float = -1.0) -> Turn:
    spans = [VersionSpan(0, len(answer))]
    completion = Completion("r", list(answer), [logprob] * len(answer), FinishReason.STOP, spans)
    return Turn(list(prompt), completion, sampling=SAMPLING)


def group_of(*rollouts: Sequence[Turn]) -> RolloutGroup:
    made = [
        Rollout(f"g/{i}", "g", i, None, turns=list(turns), reward=1.0, advantage=0.5)
        for i, turns in enumerate(rollouts)
    ]
    return RolloutGroup("g", None, made)


class ScriptedTeacher:
    """A teacher that scores prompts like `ScriptedEngine`.

    Args:
        fails: Called before each answer; it may raise.
    """

    def __init__(self, fails: Callable[[], None] = lambda: None, top_k: int = 0) -> None:
        self.prompts: list[list[int]] = []
        self.ids: list[str] = []
        self._fails = fails

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        self._fails()
        self.prompts.append(list(prompt_token_ids))
        self.ids.append(request_id)
        count, top_k = len(prompt_token_ids) - 1, sampling.prompt_logprobs or 0
        scores = PromptScores(
            scripted_logprobs(prompt_token_ids, 0, 0), top_k, list(range(top_k)) * count, [-2.0] * (top_k * count)
        )
        return Completion(request_id, [1], [-1.0], FinishReason.LENGTH, [VersionSpan(0, 1)], prompt_scores=scores)


async def test_turns_that_extend_each_other_are_scored_with_one_request():
    generate = ScriptedTeacher()
    group = group_of([turn([7, 8], [5, 1]), turn([7, 8, 5, 1, 9], [6])], [turn([7, 8], [3]), turn([4], [2, 1])])
    await Teacher("t", generate, max_context=64).score(group)

    assert sorted(generate.prompts) == [[4, 2, 1], [7, 8, 3], [7, 8, 5, 1, 9, 6]]
    whole = scripted_logprobs([7, 8, 5, 1, 9, 6], 0, 0)
    first, second = group.rollouts[0].turns
    assert first.teacher is not None
    assert first.teacher.logprobs == whole[1:3]
    assert second.teacher is not None
    assert second.teacher.logprobs == whole[4:]
    assert group.rollouts[0].metrics["teacher_kl"] == pytest.approx(-1 - sum([*whole[1:3], whole[4]]) / 3)


async def test_identical_siblings_share_a_request():
    generate = ScriptedTeacher()
    group = group_of([turn([7, 8], [5, 1])], [turn([7, 8], [5, 1])], [turn([7, 8], [5, 2])])
    await Teacher("t", generate, max_context=64).score(group)

    assert sorted(generate.prompts) == [[7, 8, 5, 1], [7, 8, 5, 2]]
    first, second, third = (rollout.turns[0].teacher for rollout in group.rollouts)
    assert first == second != third


async def test_privileged_context_replaces_only_the_prompt():
    generate = ScriptedTeacher()
    before = [turn([7, 8], [5, 1]), turn([7, 8, 5, 1, 9], [6])]
    group = group_of(before)
    await Teacher("t", generate, max_context=64, prompt=lambda rollout: [7, 42, 43, 8]).score(group)

    assert generate.prompts == [[7, 42, 43, 8, 5, 1, 9, 6]]
    whole = scripted_logprobs([7, 42, 43, 8, 5, 1, 9, 6], 0, 0)
    first, second = group.rollouts[0].turns
    assert first.teacher is not None
    assert first.teacher.logprobs == whole[3:5]
    assert second.teacher is not None
    assert second.teacher.logprobs == whole[6:]
    for old, new in zip(before, group.rollouts[0].turns, strict=True):
        assert replace(new, teacher=None) == old  # the student's turns are otherwise unchanged


async def test_privileged_context_precedes_an_edited_history():
    generate = ScriptedTeacher()
    edited, other = (
        turn([7, 8, 3, 2], [6]),
        turn([9, 8], [4]),
    )  # the first shortens an answer, the second drops the first prompt
    group = group_of([turn([7, 8], [5, 1]), edited, other])
    await Teacher("t", generate, max_context=64, prompt=lambda rollout: [7, 42, 8]).score(group)

    assert generate.prompts == [[7, 42, 8, 5, 1], [7, 42, 8, 3, 2, 6]]
    _, second, third = group.rollouts[0].turns
    assert second.teacher is not None
    assert second.teacher.logprobs == scripted_logprobs([7, 42, 8, 3, 2, 6], 0, 0)[4:]
    assert third.teacher is None


async def test_first_token_that_a_teacher_reads_has_no_score():
    group = group_of([turn([7], [5, 6]), turn([7, 5, 6, 9], [8])])
    await Teacher("t", ScriptedTeacher(), max_context=64, prompt=lambda rollout: []).score(group)
    first, second = group.rollouts[0].turns
    assert first.teacher is None
    assert second.teacher is not None


async def test_aborted_group_is_not_scored():
    group, generate = group_of([turn([7], [5])]), ScriptedTeacher()
    group.rollouts[0].status = RolloutStatus.ABORTED
    group.rollouts.append(replace(group.rollouts[0], rollout_id="g/1", status=RolloutStatus.COMPLETED))
    await Teacher("t", generate, max_context=64).score(group)
    assert generate.prompts == []


async def test_tokens_beyond_the_teacher_context_are_unscored():
    generate = ScriptedTeacher()
    group = group_of([turn([7, 8], [5, 1, 2, 3])])
    await Teacher("t", generate, max_context=5).score(group)

    assert generate.prompts == [[7, 8, 5, 1]]
    (scored,) = group.rollouts[0].turns
    assert scored.teacher is not None
    assert len(scored.teacher.logprobs) == 2
    (sample,) = build_samples(group, distillation=Distillation("sampled", 1.0))
    assert sample.advantages[-2:] == [0.5, 0.5]
    assert sample.advantages[2] == pytest.approx(0.5 + scored.teacher.logprobs[0] + 1.0)


@pytest.mark.looptime
async def test_short_outage_delays_scores_without_losing_any():
    clock = asyncio.get_running_loop().time
    back_at = clock() + 60

    def down() -> None:
        if clock() < back_at:
            raise GenerationError("the teacher's server is down")

    generate = ScriptedTeacher(down)
    group = group_of([turn([7], [5])], [turn([7], [6])])
    await Teacher("t", generate, max_context=64).score(group)

    assert 60 <= clock() - back_at + 60 < 75
    assert all(rollout.turns[0].teacher is not None for rollout in group.rollouts)
    assert len(set(generate.ids)) == 2


@pytest.mark.looptime
async def test_each_attempt_at_a_score_has_a_request_id_of_its_own():
    """The engine may still work on the attempt that failed here, and refuses an id that is in flight."""
    ids = list[str]()
    scripted = ScriptedTeacher()

    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **asked: Any) -> Completion:
        ids.append(request_id)
        if len(ids) < 3:
            raise GenerationError("the connection was lost")
        return await scripted(prompt_token_ids, request_id=request_id, **asked)

    await Teacher("t", generate, max_context=64).score(group_of([turn([7], [5])]))
    assert len(set(ids)) == len(ids) == 3


@pytest.mark.looptime
async def test_long_outage_or_refusal_raises_with_the_reason():
    def down() -> None:
        raise GenerationError("no route to host")

    def refused() -> None:
        raise RequestError("the prompt is too long")

    group = group_of([turn([7], [5])])
    with pytest.raises(TrainingError, match=r"the teacher t has failed for 120 s: no route to host"):
        await Teacher("t", ScriptedTeacher(down), max_context=64, outage_s=120).score(group)
    with pytest.raises(TrainingError, match=r"the teacher t refuses to score 'g/0/teacher/0': the prompt is too long"):
        await Teacher("t", ScriptedTeacher(refused), max_context=64).score(group)


@pytest.mark.looptime
async def test_console_shows_start_and_end_of_an_outage_once():
    clock, console = asyncio.get_running_loop().time, ConsoleLines()
    back_at = clock() + 60

    def down() -> None:
        if clock() < back_at:
            raise GenerationError("no route to host")

    groups = [group_of([turn([7], [5])]), group_of([turn([7], [6])])]
    teacher = Teacher("t", ScriptedTeacher(down), max_context=64, console=console)
    await asyncio.gather(*map(teacher.score, groups))
    failed, answers = console
    assert failed.startswith("the teacher t fails: no route to host; requests are repeated for up to 30 min")
    assert answers.startswith("the teacher t answers again, after 6")

    back_at = clock() + 3
    await teacher.score(group_of([turn([7], [8])]))
    assert len(console) == 2


def scoring(*logprobs: float) -> Any:
    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
        scores = PromptScores(list(logprobs))
        return Completion(request_id, [1], [-1.0], FinishReason.LENGTH, [VersionSpan(0, 1)], prompt_scores=scores)

    return generate


@pytest.mark.parametrize(
    ("logprobs", "problem"),
    [
        (
            (-9000.0, -9000.0, -9000.0),
            "returned logprobs with a median of -9000 for 'g/0/teacher/0', which no language",
        ),
        ((-1.0, 0.7, -1.0), "returned a logprob of 0.7 for"),
        ((-1.0, float("nan"), -1.0), "returned a logprob of nan for"),
        ((-1.0,), "returned 1 logprobs for a prompt of 4 tokens"),
        ((-1.0, -1.0, -1.0, -1.0), "returned 4 logprobs for a prompt of 4 tokens"),
    ],
)
async def test_implausible_logprobs_are_refused(logprobs: tuple[float, ...], problem: str):
    with pytest.raises(TrainingError, match=f"the teacher t {problem}"):
        await Teacher("t", scoring(*logprobs), max_context=64).score(group_of([turn([7, 8], [5, 1])]))


async def test_single_improbable_tokens_are_accepted():
    group = group_of([turn([7, 8], [5, 1])])
    await Teacher("t", scoring(-9999.0, -1.0, 1e-3), max_context=64).score(group)
    assert group.rollouts[0].turns[0].teacher is not None


@pytest.mark.looptime
async def test_console_shows_a_teacher_that_hangs_within_two_minutes():
    clock, console, scripted = asyncio.get_running_loop().time, ConsoleLines(), ScriptedTeacher()
    hangs_until = clock() + 90

    async def hanging(prompt_token_ids: Sequence[int], **asked: Any) -> Completion:
        await asyncio.sleep(max(0.0, hangs_until - clock()))
        return await scripted(prompt_token_ids, **asked)

    group = group_of([turn([7], [5])], [turn([7], [6])])
    await Teacher("t", hanging, max_context=64, console=console).score(group)
    hangs, answers = console
    assert hangs.startswith("the teacher t fails: it has answered none of 2 requests for 60 s; requests are repeated")
    assert answers == "the teacher t answers again, after 90 s"


@pytest.mark.looptime
async def test_slow_teacher_that_answers_others_is_not_reported():
    console, scripted = ConsoleLines(), ScriptedTeacher()

    async def slow(prompt_token_ids: Sequence[int], **asked: Any) -> Completion:
        await asyncio.sleep(20 * len(prompt_token_ids))
        return await scripted(prompt_token_ids, **asked)

    group = group_of(*[[turn([7], [5] * size)] for size in range(1, 8)])
    await Teacher("t", slow, max_context=64, console=console).score(group)
    assert not console


@pytest.mark.looptime
async def test_queueing_at_a_slow_teacher_is_not_an_outage():
    scripted = ScriptedTeacher()
    failures = iter([*[False] * 2 * MOST_IN_FLIGHT, True])

    async def slow(prompt_token_ids: Sequence[int], **asked: Any) -> Completion:
        await asyncio.sleep(100)
        if next(failures, False):
            raise GenerationError("a single failure")
        return await scripted(prompt_token_ids, **asked)

    group = group_of(*[[turn([7], [5, number])] for number in range(2 * MOST_IN_FLIGHT + 1)])
    await Teacher("t", slow, max_context=64, outage_s=120).score(group)
    assert all(rollout.turns[0].teacher is not None for rollout in group.rollouts)


async def test_warns_once_when_privileged_context_leaves_no_room():
    console, generate = ConsoleLines(), ScriptedTeacher()
    group = group_of([turn([7], [5, 6])], [turn([7], [5, 8])])
    teacher = Teacher("t", generate, max_context=8, prompt=lambda rollout: list(range(9)), console=console)
    await teacher.score(group)
    (shown,) = console
    assert "has 9 tokens, and 11 with the policy's; those after model.max_context = 8 have no score" in shown
    assert all(rollout.turns[0].teacher is None for rollout in group.rollouts)


async def test_journaled_scores_are_not_requested_again():
    generate = ScriptedTeacher()
    group = group_of([turn([7, 8], [5, 1])])
    teacher = Teacher("t", generate, max_context=64, top_k=2)
    await teacher.score(group)
    record = decode(encode(GroupRecord(3, "", 0, group.rollouts)))
    assert isinstance(record, GroupRecord)
    assert record.rollouts[0].turns[0].teacher == group.rollouts[0].turns[0].teacher

    await teacher.score(RolloutGroup("g", None, record.rollouts))
    assert len(generate.prompts) == 1


def scored_group(teacher: Sequence[float], top: PromptScores | None = None) -> RolloutGroup:
    group = group_of([turn([7, 8], [5, 1])])
    rollout = group.rollouts[0]
    rollout.turns[0] = replace(rollout.turns[0], teacher=top or PromptScores(list(teacher)))
    return group


@pytest.mark.parametrize(
    ("distillation", "expected"),
    [
        (Distillation("sampled", 2.0), [0.0, 0.0, 0.5 + 2 * (-0.25 + 1), 0.5 + 2 * (-3 + 1)]),
        (Distillation("sampled", 0.0), [0.0, 0.0, 0.5, 0.5]),
        (Distillation("reverse", 2.0), [0.0, 0.0, 0.5, 0.5]),
        (None, [0.0, 0.0, 0.5, 0.5]),
    ],
)
def test_sampled_reverse_kl_is_added_to_the_advantage(distillation: Distillation | None, expected: Sequence[float]):
    (sample,) = build_samples(scored_group([-0.25, -3.0]), distillation=distillation)
    assert sample.advantages == expected
    assert sample.teacher is None


def test_sample_contains_the_top_tokens_of_the_teacher():
    top = PromptScores([-1.0, -2.0], 2, [5, 9, 1, 4], [-0.5, -1.5, -0.25, -2.5])
    (sample,) = build_samples(scored_group([], top), distillation=Distillation("forward", 1.0))

    assert sample.teacher is not None
    assert sample.teacher.top_ids == [0, 0, 0, 0, 5, 9, 1, 4]
    assert sample.teacher.top_logprobs[4:] == [-0.5, -1.5, -0.25, -2.5]
    assert all(value != value for value in sample.teacher.top_logprobs[:4])
