"""One policy evaluated, from its prompts to its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.run import RunConfig
from titan_rl.evaluation.evaluation import Evaluation
from titan_rl.evaluation.playing import Suite, play_suites
from titan_rl.evaluation.results import task_result
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.evaluating.folder import EvaluationFolder
from titan_rl.run.evaluating.suites import open_suites
from titan_rl.run.policies.opened import OpenedPolicy
from titan_rl.run.stopping import first_cause

TELL_EVERY_S = 10.0


class EvaluationRun:
    """One policy on the tasks of a config. What is done is there whenever it is asked for, also after a stop.

    Args:
        folder: that keeps it; prompts that are finished there are not played again. None keeps nothing.
        tell: shows a person how far it is.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: EvalConfig,
        policy: OpenedPolicy,
        folder: Path | None,
        tell: Callable[[str], object],
    ) -> None:
        self._config = config
        self._settings = settings
        self._policy = policy
        self._folder = None if folder is None else EvaluationFolder(folder)
        self._tell = tell
        self._lines: list[Mapping[str, Any]] = []
        self._groups: dict[str, list[RolloutGroup]] = {}  # of tasks that measure them, by how their ids begin
        self._suites: list[Suite] = []
        self._is_complete = False
        self._began = time.monotonic()
        self._told = self._began
        self._seconds = 0.0
        self._measures: dict[str, dict[str, float]] = {}

    async def run(self) -> Evaluation:
        """Play what is not done yet.

        Raises:
            ConfigError: the folder has an evaluation with other settings.
            TitanRLError: what ended it.
        """
        opening = open_suites(self._config, self._settings, self._policy, self._place, self._tell)
        async with opening as self._suites:
            if self._folder is not None:
                self._lines = self._folder.begin(self._made_with(), self._suites)
            if self._lines:
                self._tell(f"{self._policy.name}: {len(self._lines)} samples are there already, in {self._place}")
            try:
                await play_suites(
                    self._suites,
                    self._policy.generate,
                    version=self._policy.version,
                    in_flight=self._settings.in_flight,
                    max_lost=self._config.scheduling.max_failed_groups,
                    done=tuple(self._lines),
                    on_prompt=self._note,
                )
                self._measure()
                self._is_complete = True
            except BaseExceptionGroup as group:
                error = first_cause(group)
                raise error from error.__cause__
            finally:
                self._seconds = round(time.monotonic() - self._began, 3)
                self.evaluation().write()
                if self._folder is not None:
                    self._folder.close()
        return self.evaluation()

    def evaluation(self) -> Evaluation:
        """What is known so far."""
        results = {
            suite.name: task_result(
                [line for line in self._lines if line["task"] == suite.name],
                samples_per_prompt=suite.samples_per_prompt,
                success=self._settings.success,
                measures=self._measures.get(suite.name),
            )
            for suite in self._suites
        }
        policy, folder = self._policy, None if self._folder is None else self._folder.path
        return Evaluation(policy.name, policy.version, results, self._seconds, self._is_complete, folder)

    @property
    def _place(self) -> Path:
        return Path() if self._folder is None else self._folder.path

    def _measure(self) -> None:
        """Nothing, where some of the groups were played by an evaluation that was stopped."""
        for suite in self._suites:
            groups = self._groups.get(suite.group_ids, [])
            if suite.measure is not None and len(groups) == len(suite.prompts):
                self._measures[suite.name] = suite.measure([group for group in groups if group.failure is None])

    def _note(self, group: RolloutGroup, lines: Sequence[dict[str, Any]]) -> None:
        ids = group.group_id.rpartition("-")[0]
        if any(suite.group_ids == ids and suite.measure is not None for suite in self._suites):
            self._groups.setdefault(ids, []).append(group)
        if self._folder is not None:
            self._folder.append(lines)
        self._lines += ({name: value for name, value in line.items() if name != "messages"} for line in lines)
        now = time.monotonic()
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            total = sum(len(suite.prompts) * suite.samples_per_prompt for suite in self._suites)
            self._tell(f"{self._policy.name}: {len(self._lines)} of {total} samples after {now - self._began:.0f} s")

    def _made_with(self) -> dict[str, Any]:
        """Number and places of the prompts may differ from one half of an evaluation to the other."""
        played = [
            {
                "task": suite.name,
                "samples": suite.samples_per_prompt,
                "max_tokens": suite.sampling.max_tokens,
                "temperature": suite.sampling.temperature,
                "top_p": suite.sampling.top_p,
            }
            for suite in self._suites
        ]
        settings = self._config.model_dump(mode="json", include={"seed", "tasks", "rollout"})
        return {"policy": self._policy.name, "played": played, "settings": settings}
