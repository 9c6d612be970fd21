"""Plays the held-out prompts of tasks."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.core.calls.plain import json_line
from titan_rl.core.errors import GenerationError, RewardError
from titan_rl.evaluation.results import is_fault
from titan_rl.rollout.group.failures import ErrorCounts
from titan_rl.rollout.group.runner import GroupRunner
from titan_rl.rollout.group.transcript import transcript
from titan_rl.rollout.types import RolloutGroup
from titan_rl.types import GenerateFn, SamplingParams

Record = dict[str, Any]

PHASE = "evaluation"


@dataclass(frozen=True, slots=True)
class Suite:
    """Held-out prompts of one task, and how they are played.

    Args:
        name: of the task, or of what a run's validation calls it.
        prompts: samples of the task, in their order.
        runner: plays and scores a group of rollouts of one prompt.
        group_ids: how the ids of groups begin. A rollout is sampled by its id, so that the same ids give the same.
        measure: figures of all groups together, where the task has some.
    """

    name: str
    prompts: Sequence[Any]
    samples_per_prompt: int
    sampling: SamplingParams
    runner: GroupRunner
    group_ids: str = "validation"
    measure: Callable[[Sequence[RolloutGroup]], dict[str, float]] | None = None


async def play_suites(
    suites: Sequence[Suite],
    generate: GenerateFn,
    *,
    version: int,
    in_flight: int,
    max_lost: int,
    done: Iterable[Mapping[str, Any]],
    on_prompt: Callable[[RolloutGroup, Sequence[Record]], None],
) -> None:
    """Play every prompt that is not done yet.

    Args:
        version: of the policy, for the lines.
        in_flight: rollouts at once, but for one prompt at least.
        max_lost: prompts in a row, or all of them, of which no sample says anything of the policy.
        done: lines of prompts that an earlier evaluation has finished: `finished_lines`.
        on_prompt: called with the group and the lines of each prompt that is done.

    Raises:
        RewardError, GenerationError: so many prompts in a row were lost, to a reward or to faults of environment and
            generation.
    """
    are_done = {_prompt_of(line) for line in done}
    left = (
        (suite, place, prompt)
        for suite in suites
        for place, prompt in enumerate(suite.prompts)
        if (suite.name, place, digest(prompt)) not in are_done
    )
    lost = _LostInARow(min(max_lost, sum(len(suite.prompts) for suite in suites)))

    async def play_some() -> None:
        for suite, place, prompt in left:
            group = await suite.runner.run_group(
                generate,
                prompt,
                group_id=f"{suite.group_ids}-{place}",
                group_size=suite.samples_per_prompt,
                sampling=suite.sampling,
            )
            on_prompt(group, [*_lines(suite, place, group, version)])
            lost.count(group)

    largest = max((suite.samples_per_prompt for suite in suites), default=1)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(max(1, in_flight // largest)):
            tasks.create_task(play_some())


def digest(prompt: Any) -> str:
    """Equal for equal prompts, in whichever process; empty where a prompt's text does not say what it is."""
    text = json_line(prompt)
    return "" if _ADDRESS.search(text) else hashlib.sha256(text.encode()).hexdigest()[:16]


def finished_lines(lines: Iterable[Mapping[str, Any]], suites: Sequence[Suite]) -> list[Mapping[str, Any]]:
    """The lines of prompts that need not be played again: they are of these suites, and all their samples are there,
    none of which was lost to a fault."""
    siblings: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        siblings.setdefault(_prompt_of(line), []).append(line)
    finished: list[Mapping[str, Any]] = []
    for suite in suites:
        for place, prompt in enumerate(suite.prompts):
            of_it = siblings.get((suite.name, place, digest(prompt)), [])
            played = {line["sibling"] for line in of_it}  # a line for each seat, where a game has several
            if len(played) == suite.samples_per_prompt and not any(map(is_fault, of_it)):
                finished += of_it
    return finished


def _prompt_of(line: Mapping[str, Any]) -> tuple[str, int, str]:
    return line["task"], line["prompt"], line["prompt_digest"]


def _lines(suite: Suite, place: int, group: RolloutGroup, version: int) -> Iterator[Record]:
    about = {
        "step": version,
        "phase": PHASE,
        "task": suite.name,
        "prompt": place,
        "prompt_digest": digest(group.sample),
    }
    if group.failure is not None:
        about["reward_failed"] = str(group.failure)
    for rollout in group.rollouts:
        yield {**about, **transcript(rollout)}


class _LostInARow:
    """Counts prompts that say nothing of the policy, with none in between that does."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: list[RolloutGroup] = []

    def count(self, group: RolloutGroup) -> None:
        """
        Raises:
            RewardError, GenerationError: they are as many as may be.
        """
        if group.failure is None and not all(rollout.status.is_fault for rollout in group.rollouts):
            self._groups.clear()
            return
        self._groups.append(group)
        if len(self._groups) < self._most:
            return
        counts = ErrorCounts()
        for one in self._groups:
            counts.add_group(one)
        error = GenerationError if group.failure is None else RewardError
        raise error(f"{len(self._groups)} prompts in a row say nothing of the policy: {counts.describe()}")


_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
