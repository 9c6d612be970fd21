"""Evaluations side by side, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from string import ascii_uppercase
from typing import TYPE_CHECKING

from titan_rl.core.console import aligned
from titan_rl.evaluation.results import Evaluation, TaskResult
from titan_rl.evaluation.statistics import Difference, Estimate, difference

if TYPE_CHECKING:  # its import is slow
    from titan_rl.evaluation.elo import Ratings

NONE = "-"


def table(evaluations: Sequence[Evaluation]) -> str:
    """Format evaluations in columns, with a block for each task. Further columns show how the second and later
    evaluations differ from the first.

    Example:

        task sums: 64 prompts, 4 samples each, right from a reward of 1
        A: the model base
        B: step 80 of runs/latest

                     A              B              B - A
        reward       0.212 ± 0.031  0.847 ± 0.024  +0.635 ± 0.035 (64 same prompts)
        pass@1       ...
    """
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.tasks))
    return "\n\n".join(_block(name, evaluations) for name in names)


def as_json(evaluations: Sequence[Evaluation], ratings: Sequence[Ratings] = ()) -> str:
    """Format evaluations as JSON: {"evaluations": [...], "differences": [{"task": ..., "policy": ..., "from": ...,
    "mean": ...}, ...]}, and "elo": [...] if the policies have played each other."""
    first, *others = evaluations
    differences: list[dict[str, object]] = []
    for other in others:
        for name, result in first.tasks.items():
            found = name in other.tasks and _compared(result, other.tasks[name])
            if found:
                about = {"task": name, "policy": other.policy, "from": first.policy}
                differences.append({**about, **asdict(found)})
    results = [evaluation.to_json() for evaluation in evaluations]
    rated = {"elo": [each.to_json() for each in ratings]} if ratings else {}
    return json.dumps({"evaluations": results, "differences": differences, **rated})


def _block(name: str, evaluations: Sequence[Evaluation]) -> str:
    results = [evaluation.tasks.get(name) for evaluation in evaluations]
    rows = [_header(evaluations), *_rows(results)]
    return "\n".join([_title(name, results), *_legend(evaluations), "", *aligned(rows), *_notes(evaluations, results)])


def _compared(first: TaskResult, second: TaskResult) -> Difference | None:
    return difference(first.of_prompts, second.of_prompts, {**first.clusters, **second.clusters})


def _header(evaluations: Sequence[Evaluation]) -> list[str]:
    if len(evaluations) == 1:
        return ["", evaluations[0].policy]
    letters = ascii_uppercase[: len(evaluations)]
    return ["", *letters, *(f"{letter} - A" for letter in letters[1:])]


def _legend(evaluations: Sequence[Evaluation]) -> list[str]:
    if len(evaluations) == 1:
        return []
    return [f"{letter}: {one.policy}" for letter, one in zip(ascii_uppercase, evaluations, strict=False)]


def _title(name: str, results: Sequence[TaskResult | None]) -> str:
    sizes = {
        f"{_prompts(result)}, {result.samples_per_prompt} samples each, right from a reward of {result.success:g}"
        for result in results
        if result is not None
    }
    return f"task {name}: {' | '.join(sorted(sizes))}"


def _prompts(result: TaskResult) -> str:
    distinct = "" if result.num_distinct == result.num_prompts else f" ({result.num_distinct} distinct)"
    return f"{result.num_prompts} prompt{'' if result.num_prompts == 1 else 's'}{distinct}"


def _rows(results: Sequence[TaskResult | None]) -> Iterator[list[str]]:
    first, *others = results
    compared = [None if first is None or other is None else _compared(first, other) for other in others]
    yield ["reward", *(_estimate(result and result.reward) for result in results), *map(_difference, compared)]
    blank = [""] * len(others)
    given = [result for result in results if result is not None]
    for k in sorted({k for result in given for k in result.avg_at}):
        yield [f"avg@{k}", *(_estimate(result and result.avg_at.get(k)) for result in results), *blank]
    for k in sorted({k for result in given for k in result.pass_at}):
        yield [f"pass@{k}", *(_estimate(result and result.pass_at.get(k)) for result in results), *blank]
    for name in dict.fromkeys(name for result in given for name in result.breakdown):
        yield [f"reward {name}", *(_number(result and result.breakdown.get(name)) for result in results), *blank]
    for name in dict.fromkeys(name for result in given for name in result.measures):
        yield [name, *(_number(result and result.measures.get(name)) for result in results), *blank]
    yield ["turns", *(_number(result and result.turns, 2) for result in results), *blank]
    yield ["tokens", *(_number(result and result.completion_tokens, 1) for result in results), *blank]
    yield ["unscored", *(_count(result, result and result.num_unscored) for result in results), *blank]
    if any(result.num_faults for result in given):
        yield ["faults", *(_count(result, result and result.num_faults) for result in results), *blank]
    for status in dict.fromkeys(status for result in given for status in result.statuses):
        yield [status, *(_count(result, result and result.statuses.get(status, 0)) for result in results), *blank]


def _notes(evaluations: Sequence[Evaluation], results: Sequence[TaskResult | None]) -> Iterator[str]:
    for evaluation, result in zip(evaluations, results, strict=True):
        if result is None:
            continue
        if not evaluation.is_complete:
            yield f"{evaluation.policy}: stopped early; only the finished prompts are shown"
        if result.num_unparsed:
            yield (
                f"{evaluation.policy}: {result.num_unparsed} of {result.num_samples} answers could not be parsed, "
                "which is the policy's fault; they count in means and pass@k only if the rubric has an error_reward"
            )
        if result.repeated_prompts:
            yield f"{evaluation.policy}: {result.repeated_prompts}"
        if result.unreached_success:
            yield f"{evaluation.policy}: {result.unreached_success}"
        for text, count in result.errors[:3]:
            yield f"{evaluation.policy}: {count} samples were lost to {text}"


def _estimate(estimate: Estimate | None) -> str:
    return NONE if estimate is None else str(estimate)


def _difference(found: Difference | None) -> str:
    if found is None:
        return NONE
    distinct = "" if found.num_distinct == found.num_paired else f", {found.num_distinct} distinct"
    return f"{found} ({f'{found.num_paired} same prompts{distinct}' if found.num_paired else 'other prompts'})"


def _number(value: float | None, places: int = 3) -> str:
    return NONE if value is None else f"{value:.{places}f}"


def _count(result: TaskResult | None, count: int | None) -> str:
    if result is None or count is None:
        return NONE
    return f"{count} of {result.num_samples}"
