"""Evaluation of held-out prompts by a scripted policy: results, failures, resuming, and the table."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_readme_examples import CountDown, count_down

from titan_rl import (
    Completion,
    DataError,
    GenerationError,
    Reward,
    RewardError,
    Rollouter,
    RolloutGroup,
    Rubric,
    SamplingParams,
)
from titan_rl.evaluation.results import Evaluation, TaskResult, read_evaluation, task_result
from titan_rl.evaluation.suites import Suite, digest, finished_lines, play_suites
from titan_rl.evaluation.table import table

Line = dict[str, Any]


def suite(prompts: list[int], samples: int = 2, rubric: Rubric | None = None, name: str = "counting") -> Suite:
    rubric = rubric or Rubric([Reward(lambda rollout: len(rollout.turns) - rollout.sibling, name="turns")])
    rollouter = Rollouter(CountDown, rubric, max_context=16)
    return Suite(name, prompts, samples, SamplingParams(max_tokens=1), rollouter, group_ids=name)


async def play(*suites: Suite, generate: Any = count_down, done: Any = (), in_flight: int = 8) -> list[Line]:
    lines: list[Line] = [*done]

    def note(group: RolloutGroup, played: Sequence[Line]) -> None:
        assert [rollout.group_id for rollout in group.rollouts] == [line["group_id"] for line in played]
        lines.extend(played)

    await play_suites(suites, generate, version=3, in_flight=in_flight, max_lost=2, done=done, on_prompt=note)
    return lines


def result(lines: list[Line], samples: int = 2, success: float = 2.0) -> TaskResult:
    return task_result(lines, samples_per_prompt=samples, success=success)


async def fails_at_two(prompt_token_ids: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
    if prompt_token_ids[0] == 2:
        raise GenerationError("down")
    return await count_down(prompt_token_ids, request_id=request_id, sampling=sampling)


async def test_result_figures_match_the_transcripts() -> None:
    lines = await play(suite([1, 2, 3]))
    assert [line["phase"] for line in lines] == ["evaluation"] * 6
    assert {(line["task"], line["step"]) for line in lines} == {("counting", 3)}
    found = result(lines)
    assert sorted(found.rewards.values()) == [[1.0, 0.0], [2.0, 1.0], [3.0, 2.0]]
    assert found.reward is not None
    assert (found.reward.mean, found.reward.num_prompts, found.reward.num_samples) == (1.5, 3, 6)
    assert found.reward.standard_error == pytest.approx(1 / 3**0.5)
    assert found.avg_at[2].mean == 1.5
    assert {k: estimate.mean for k, estimate in found.pass_at.items()} == pytest.approx({1: 0.5, 2: 2 / 3})
    assert found.statuses == {"completed": 6}
    assert (found.num_unscored, found.breakdown, found.completion_tokens) == (0, {"turns": 1.5}, 2.0)


async def test_repeated_prompts_are_clustered_counted_and_warned_of() -> None:
    once = result(await play(suite([1, 2, 3])))
    often = result(await play(suite([1, 2, 3] * 8)))
    assert once.reward is not None
    assert often.reward is not None
    assert often.reward.standard_error == pytest.approx(once.reward.standard_error)
    assert often.pass_at[2].standard_error == pytest.approx(once.pass_at[2].standard_error)
    assert (often.num_prompts, often.num_distinct, often.to_json()["num_distinct"]) == (24, 3, 3)
    better = replace(often, rewards={key: [reward + 1.0 for reward in group] for key, group in often.rewards.items()})
    shown = table([Evaluation("base", 0, {"counting": often}, 1.0), Evaluation("last", 1, {"counting": better}, 1.0)])
    assert "task counting: 24 prompts (3 distinct), 2 samples each" in shown
    assert "(24 same prompts, 3 distinct)" in shown
    assert "base: the 24 held-out prompts are only 3 different ones" in shown
    assert "distinct" not in table([Evaluation("base", 0, {"counting": once}, 1.0)])
    assert TaskResult.from_json(json.loads(json.dumps(often.to_json()))) == often
    older = {key: value for key, value in often.to_json().items() if key != "clusters"}
    older["reward"] = {"mean": 1.5, "standard_error": 0.1, "num_prompts": 24, "num_samples": 48}
    assert TaskResult.from_json(older) == often, "errors of older results are computed again"


async def test_prompts_with_one_id_are_the_same_even_if_their_samples_differ() -> None:
    same = replace(suite([1, 2, 3, 4]), ids=["odd", "even", "odd", "even"])
    assert result(await play(same)).num_distinct == 2
    unknown = replace(suite([1, 2]), ids=["", ""])
    assert result(await play(unknown)).num_distinct == 2


async def test_unreached_success_threshold_is_reported() -> None:
    halves = [
        Reward(lambda rollout: float(rollout.sibling == 0), name="right"),
        Reward(lambda rollout: 0.2, name="brief"),
    ]
    lines = await play(suite([1, 2, 3], rubric=Rubric(halves)))
    found = result(lines, success=1.0)
    assert found.pass_at[2].mean == 0.0
    assert found.unreached_success is not None
    assert "no sample reached success = 1" in found.unreached_success
    assert "the greatest reward is 0.6 (right 1, brief 0.2)" in found.unreached_success
    assert found.unreached_success in table([Evaluation("base", 0, {"counting": found}, 1.0)])
    assert TaskResult.from_json(json.loads(json.dumps(found.to_json()))) == found
    reached = result(lines, success=0.6)
    assert reached.unreached_success is None
    assert reached.pass_at[2].mean == 1.0
    assert "no sample reached" not in table([Evaluation("base", 0, {"counting": reached}, 1.0)])


async def test_failed_rollouts_are_counted_but_not_averaged() -> None:
    found = result(await play(suite([1, 2, 3]), generate=fails_at_two))
    assert found.statuses == {"completed": 4, "error_generate": 2}
    assert found.num_unscored == 2
    assert found.reward is not None
    assert (found.reward.mean, found.reward.num_prompts) == (1.5, 2)
    ((error, count),) = found.errors
    assert error.startswith("error_generate: GenerationError: down (")
    assert count == 2


async def test_turns_and_tokens_of_faults_are_left_out_and_faults_are_counted() -> None:
    lines = await play(suite([3, 3]))
    lost = {"status": "error_env", "reward": 0.0, "turns": [], "num_completion_tokens": 0}
    found = result([{**line, **lost} if line["sibling"] else line for line in lines])
    assert (found.turns, found.completion_tokens, found.num_faults) == (3.0, 3.0, 2)
    assert re.search(r"\nfaults +2 of 4\n", table([Evaluation("policy", 0, {"counting": found}, 1.0)]))
    assert "faults" not in table([Evaluation("policy", 0, {"counting": result(lines)}, 1.0)])


async def test_unparsed_answers_are_noted_below_the_table() -> None:
    lines = await play(suite([1, 2, 3]))
    assert "parsed" not in table([Evaluation("policy", 0, {"counting": result(lines)}, 1.0)])
    unread = [{**line, "status": "error_parse", "reward": None} if line["prompt"] == 0 else line for line in lines]
    found = result(unread)
    assert (found.num_unparsed, found.num_unscored, found.errors) == (2, 2, [])
    shown = table([Evaluation("policy", 0, {"counting": found}, 1.0)])
    assert "policy: 2 of 6 answers could not be parsed" in shown
    scored = [{**line, "reward": 0.0} if line["reward"] is None else line for line in unread]
    assert result(scored).num_unparsed == 0


async def test_failing_rubric_leaves_its_prompt_unscored() -> None:
    def broken(rollout: Any) -> float:
        if rollout.sample == 2:
            raise KeyError("answer")
        return 1.0

    found = result(await play(suite([1, 2, 3], rubric=Rubric([Reward(broken)]))))
    assert (found.num_unscored, found.num_prompts) == (2, 3)
    assert found.reward is not None
    assert found.reward.num_prompts == 2
    assert found.errors[0][0].startswith("a reward that failed: ")
    assert "KeyError: 'answer'" in found.errors[0][0]


async def test_repeated_failures_end_the_evaluation_with_the_reason() -> None:
    with pytest.raises(BaseExceptionGroup) as failed:
        await play(suite([2, 2, 2]), generate=fails_at_two, in_flight=1)
    assert failed.group_contains(GenerationError, match="2 prompts in a row .* GenerationError: down")

    def broken(rollout: Any) -> float:
        raise KeyError("answer")

    with pytest.raises(BaseExceptionGroup) as failed:
        await play(suite([1, 1, 1], rubric=Rubric([Reward(broken)])), in_flight=1)
    assert failed.group_contains(RewardError, match="KeyError")


async def test_concurrent_prompts_stay_within_in_flight() -> None:
    running = most = 0

    async def watched(prompt_token_ids: Any, **request: Any) -> Completion:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await count_down(prompt_token_ids, **request)

    await play(suite([2] * 9, samples=3), generate=watched, in_flight=7)
    assert most == 6
    await play(suite([2] * 3, samples=3), generate=watched, in_flight=1)


async def test_resume_skips_finished_prompts() -> None:
    first = await play(suite([1, 2]), suite([4], name="other"), generate=fails_at_two)
    suites = [suite([1, 2, 3]), suite([5], name="other")]
    kept = finished_lines([*first, {**first[0], "sibling": 7, "prompt": 9}], suites)
    assert {(line["task"], line["prompt"]) for line in kept} == {
        ("counting", 0)
    }  # one prompt failed, and one has changed
    asked: list[str] = []

    async def noted(prompt_token_ids: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        asked.append(request_id.split("/")[0])
        return await count_down(prompt_token_ids, request_id=request_id, sampling=sampling)

    lines = await play(*suites, generate=noted, done=kept)
    assert set(asked) == {"counting-1", "counting-2", "other-0"}
    assert result([line for line in lines if line["task"] == "counting"]) == result(await play(suite([1, 2, 3])))


def test_digest_identifies_prompts_by_content() -> None:
    assert digest({"a": 1}) == digest({"a": 1}) != digest({"a": 2})
    assert digest(object()) == ""


async def test_results_file_round_trips(tmp_path: Path) -> None:
    written = Evaluation("the model base", 0, {"counting": result(await play(suite([1, 3])))}, 1.5, True, tmp_path)
    written.write()
    assert read_evaluation(tmp_path) == read_evaluation(tmp_path / "results.json") == written
    assert written.reward == 1.5
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(DataError, match="is not an evaluation's results"):
        read_evaluation(tmp_path)
    with pytest.raises(DataError, match="name the folder of an evaluation"):
        read_evaluation(tmp_path / "none")


async def test_table_compares_evaluations() -> None:
    worse = Evaluation("base", 0, {"counting": result(await play(suite([1, 2])))}, 1.0)
    lines = await play(suite([1, 2], rubric=Rubric([Reward(lambda rollout: 4.0, name="turns")])))
    better = Evaluation("step 8", 8, {"counting": result(lines)}, 1.0, is_complete=False)
    shown = table([worse, better])
    title, *legend, _, header, reward = shown.splitlines()[:6]
    rest = shown.splitlines()[6:]
    assert legend == ["A: base", "B: step 8"]
    assert title == "task counting: 2 prompts, 2 samples each, right from a reward of 2"
    assert header.split() == ["A", "B", "B", "-", "A"]
    assert reward.split() == [
        *("reward", "1.000", "±", "0.500", "4.000", "±", "0.000", "+3.000", "±", "0.500", "(2", "same", "prompts)")
    ]
    assert "pass@2        0.500 ± 0.500  1.000 ± 0.000" in [line.rstrip() for line in rest]
    assert rest[-1] == "step 8: stopped early; only the finished prompts are shown"
    alone = table([worse])
    assert "B - A" not in alone
    other = Evaluation("c", 0, {"sorting": result(lines)}, 1.0)
    assert table([worse, other]).count("task ") == 2


async def test_seats_of_a_game_are_separate_samples_of_one_prompt() -> None:
    signs = {"first": 1.0, "second": -1.0}
    lines = [
        {**line, "seat": seat, "reward": sign * line["reward"]}
        for line in await play(suite([1, 2]))
        for seat, sign in signs.items()
    ]
    found = result(lines)
    assert sorted(found.rewards.values()) == [[-2.0, -1.0], [-1.0, 0.0], [1.0, 0.0], [2.0, 1.0]]
    assert finished_lines(lines, [suite([1, 2])]) == lines
    assert found.reward is not None
    assert (found.num_prompts, found.num_samples, found.reward.num_prompts) == (2, 8, 2)
    assert str(found.reward) == "0.000 ± 0.000", "seats of a zero-sum game are not independent"
    assert str(found.avg_at[2]) == "0.000 ± 0.000"
    assert (found.avg_at[2].num_prompts, found.pass_at[2].num_prompts) == (2, 2)


async def test_equal_seats_do_not_reduce_the_standard_error() -> None:
    alone = await play(suite([1, 2, 3]))
    twice = [{**line, "seat": seat} for line in alone for seat in ("first", "second")]
    for k in (1, 2):
        assert str(result(twice).pass_at[k]) == str(result(alone).pass_at[k])
    assert str(result(twice).avg_at[2]) == str(result(alone).avg_at[2])
