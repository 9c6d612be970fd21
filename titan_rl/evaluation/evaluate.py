"""Evaluation of policies, as `titan-rl eval` does it:

EvaluationRun      evaluates one policy, from the prompts to the results, and keeps the evaluation in a folder
PolicyEvaluations  checks the requirements of the policies, sets up signals, guard and environment for engines, and
                   opens, evaluates and closes one policy after the other
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from titan_rl.cluster.processes.fork_server import forked_kinds
from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.hosts import check_own_machine
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.evaluation.elo import Ratings, play_matches
from titan_rl.evaluation.policies.inference import OpenedPolicies, OpenedPolicy, is_url, require_engine
from titan_rl.evaluation.policies.policy_source import find_policy
from titan_rl.evaluation.results import Evaluation, is_fault, task_result, write_json
from titan_rl.evaluation.suites import Suite, chosen_suites, finished_lines, open_suites, play_suites
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.directory import read_jsonl
from titan_rl.run.json_lines import JsonLines, cut_records
from titan_rl.run.observability.progress import Progress, ShownStep
from titan_rl.run.process.environment import file_modes, logging_to
from titan_rl.run.process.signals import StopSignals, first_cause, run_to_its_end
from titan_rl.run.session import SessionFiles, process_session


def folder_name(policy: str, taken: set[str]) -> str:
    """Choose a unique name for the folder of a policy's evaluation, and add it to `taken`.

    >>> folder_name("step 80 of runs/latest", {"base"})
    'step-80-of-runs-latest'
    """
    stem = re.sub(r"[^\w.]+", "-", policy).strip("-")[-100:] or "policy"
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    taken.add(name)
    return name


class _Rollout(msgspec.Struct, gc=False):
    rollout_id: str
    prompt_digest: str


class EvaluationFolder:
    """Folder of an evaluation. If an evaluation was stopped, it can be continued from the finished prompts in its
    folder.

    rollouts.jsonl   {"task": "sums", "prompt": 3, "phase": "evaluation", "messages": [...], "reward": 0.7, ...}
    results.json     figures, and the rewards of each prompt
    settings.json    policy and settings of the evaluation
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._rollouts = JsonLines(self.rollouts)

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    def begin(self, made_with: Mapping[str, Any], suites: Sequence[Suite]) -> list[Mapping[str, Any]]:
        """Begin or continue the evaluation in this folder.

        Args:
            made_with: Policy and settings, as plain data. They must be the same in both parts of a stopped evaluation.

        Returns:
            The lines of finished prompts. Other lines are removed from the file.

        Raises:
            ConfigError: The folder has an evaluation with another policy or other settings, or cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        settings = self.path / "settings.json"
        text = json.dumps(made_with, indent=2, default=str) + "\n"
        if settings.exists() and settings.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"--out: {self.path} has an evaluation with other settings, see {settings.name}; name another folder"
            )
        settings.write_text(text, encoding="utf-8")
        finished = finished_lines(read_jsonl(self.rollouts), suites)
        kept = {(line["rollout_id"], line["prompt_digest"]) for line in finished}
        cut_records(self.rollouts, _Rollout, lambda found: (found.rollout_id, found.prompt_digest) in kept)
        return finished

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to `rollouts.jsonl`.

        Raises:
            OSError: The disk is full.
        """
        for line in lines:
            self._rollouts.append(line)

    def close(self) -> None:
        self._rollouts.close()


class EvaluationRun:
    """Evaluation of one policy on the tasks of a config. The results so far are available at any time, including after
    a stop.

    Args:
        policy: Policy to evaluate.
        folder: Folder in which the evaluation is kept. Prompts that are already finished there are not played again.
            None keeps nothing.
        progress: Progress display.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: EvalConfig,
        policy: OpenedPolicy,
        folder: Path | None,
        progress: Progress,
    ) -> None:
        self._config = config
        self._settings = settings
        self.policy = policy
        self._folder = None if folder is None else EvaluationFolder(folder)
        self._progress = progress
        self._lines: list[Mapping[str, Any]] = []
        self._groups: dict[str, list[RolloutGroup]] = {}  # groups of tasks with measures, by id prefix
        self._suites: list[Suite] = []
        self._is_complete = False
        self._began = time.monotonic()
        self._reported_at = self._began
        self._seconds = 0.0
        self._measures: dict[str, dict[str, float]] = {}

    async def run(self) -> Evaluation:
        """Play the prompts that are not yet finished.

        Raises:
            ConfigError: The folder has an evaluation with other settings.
            TitanRLError: The error that ended the evaluation.
        """
        opening = open_suites(self._config, self._settings, self.policy, self._path, self._progress)
        async with opening as self._suites:
            if self._folder is not None:
                self._lines = self._folder.begin(self._made_with(), self._suites)
            if self._lines:
                self._progress.message(f"{self.policy.name}: {len(self._lines)} samples are already in {self._path}")
            self._progress.count(sum(len(suite.prompts) * suite.samples_per_prompt for suite in self._suites))
            try:
                with LoopWatchdog(self._progress):
                    await play_suites(
                        self._suites,
                        self.policy.generate,
                        version=self.policy.version,
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
        """Return the results so far."""
        results = {
            suite.name: task_result(
                [line for line in self._lines if line["task"] == suite.name],
                samples_per_prompt=suite.samples_per_prompt,
                success=self._settings.success,
                measures=self._measures.get(suite.name),
            )
            for suite in self._suites
        }
        policy, folder = self.policy, None if self._folder is None else self._folder.path
        return Evaluation(policy.name, policy.version, results, self._seconds, self._is_complete, folder)

    @property
    def tasks_with_shared_games(self) -> set[str]:
        """Names of the tasks in which the policy has played several seats of one game."""
        seats = Counter((line["task"], line["prompt"], line["sibling"]) for line in self._lines)
        return {task for (task, _, _), count in seats.items() if count > 1}

    @property
    def _path(self) -> Path:
        return Path() if self._folder is None else self._folder.path

    def _measure(self) -> None:
        """Compute the tasks' own measures, unless an earlier part of the evaluation has played some of the groups."""
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
        faults = sum(map(is_fault, self._lines))
        rewards = [line["reward"] for line in self._lines if line["reward"] is not None and not is_fault(line)]
        mean = fmean(rewards) if rewards else math.nan
        note = f" so far, without {faults} faults" if faults else " so far"
        seconds = (now - self._reported_at) / max(len(lines), 1)  # for each of the newest samples
        self._progress.reached(ShownStep(len(self._lines), seconds, ("reward", mean, note)))
        self._reported_at = now

    def _made_with(self) -> dict[str, Any]:
        """Policy and settings that both parts of a stopped evaluation must have in common. The number and places of
        prompts may differ."""
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
        return {"policy": self.policy.name, "played": played, "settings": settings}


STOPPING = "stopping: the results so far are shown; repeat the signal to end at once"


@dataclass(frozen=True, slots=True)
class PolicyEvaluations:
    """Evaluations of several policies, one after the other.

    Args:
        policies: Folders and URLs of the policies.
        out: Folder in which a folder for each policy is created.
        progress: Progress display.
        evaluations: List to which the results are appended, including those so far of a policy whose evaluation is
            stopped or fails.
        ratings: List to which Elo ratings are appended, for each task in whose games the policies have played each
            other.
    """

    config: RunConfig
    settings: EvalConfig
    policies: Sequence[str]
    out: Path
    evaluations: list[Evaluation]
    ratings: list[Ratings]
    progress: Progress

    def run(self) -> int:
        """Evaluate the policies.

        Returns:
            The exit code: 0, or 128 + the number of the signal that ended the command in order.

        Raises:
            ConfigError: `out` is the folder of a run, or cannot be written to.
            TitanRLError: The error that ended the command, or kept it from starting.
        """
        config, out = self.config, self.out
        chosen_suites(config, self.settings)
        if weights := [given for given in self.policies if not is_url(given)]:
            require_engine(config)
            check_own_machine(config.hosts)
        for given in weights:
            find_policy(given)
        ended = f"ended at once; {out} has the results so far, and the same command with --out {out} continues"
        with file_modes(share=config.share_run_dir):
            files = SessionFiles(f"eval-{out.name}", out.absolute() / "logs")
            log = files.logs / "evaluation.log"
            _prepare_folder(out, log)
            with (
                logging_to(log),
                process_session(
                    files.run_id,
                    config.pythonpath,
                    stopping=STOPPING,
                    ended=ended,
                    forks=forked_kinds(config, trains=False, generates=bool(weights)),
                ) as signals,
            ):
                signals.console = self.progress
                try:
                    run_to_its_end(self._evaluate_all(files, signals))
                except Exception as error:
                    error.add_note(f"logs and transcripts are in {out}")
                    raise
                return signals.code

    async def _evaluate_all(self, files: SessionFiles, signals: StopSignals) -> None:
        config, settings, progress = self.config, self.settings, self.progress
        taken: set[str] = set()
        with signals.ending_in_order():
            async with OpenedPolicies(config, settings, files, progress) as opened:
                run: EvaluationRun | None = None
                for given in self.policies:
                    with progress.working(f"loading {given}"):
                        policy = await opened.open(given)
                    run = EvaluationRun(config, settings, policy, self.out / folder_name(policy.name, taken), progress)
                    try:
                        with progress.working(f"playing {policy.name}", progress.counted):
                            await run.run()
                    finally:
                        if (evaluation := run.evaluation()).tasks:  # otherwise no task could be opened
                            self.evaluations.append(evaluation)
                if run is not None and len(self.policies) > 1 and not any(map(is_url, self.policies)):
                    self.ratings.extend(await rate_policies(config, settings, run, opened, self.out, progress))


def check_out_folder(out: Path) -> None:
    """Check that an evaluation may be written to a folder.

    Raises:
        ConfigError: The folder is that of a run.
    """
    if (out / "config.toml").is_file() and (out / "checkpoints").is_dir():
        raise ConfigError(f"--out {out}: this is the folder of a run; name another folder, such as {out}/evaluation")


def _prepare_folder(out: Path, log: Path) -> None:
    """Create the folder of an evaluation, and its log.

    Raises:
        ConfigError: The folder is that of a run, or cannot be written to.
    """
    check_out_folder(out)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.open("ab").close()
    except OSError as error:
        raise _unwritable(out, error) from None


def _unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--out {out}: the results cannot be written there: {error.strerror}; name a folder that you can write to"
    )


async def rate_policies(
    config: RunConfig, settings: EvalConfig, run: EvaluationRun, opened: OpenedPolicies, out: Path, progress: Progress
) -> list[Ratings]:
    """Have the opened policies play each other at the tasks with several seats, and rate them. If they cannot, show the
    reason: the evaluations are complete without ratings.

    Args:
        run: Evaluation of the policy that was opened last.
    """
    ratings: list[Ratings] = []
    seats = {name: result.seats for name, result in run.evaluation().tasks.items() if len(result.seats) > 1}
    for name in seats.keys() - run.tasks_with_shared_games:
        del seats[name]
        progress.message(f"{name}: no Elo ratings, because the policy has one seat in each game: two never meet")
    if not seats:
        return ratings
    try:
        policies = opened.together()
        with progress.working("playing the policies against each other"):
            async with open_suites(config, settings, run.policy, out, progress) as suites:
                for suite in suites:
                    if suite.name in seats:
                        rated = await play_matches(suite, seats[suite.name], policies, in_flight=settings.in_flight)
                        ratings.append(rated)
    except (ConfigError, DataError) as error:
        progress.warning(f"no Elo ratings: {error}")
    write_json(out / "elo.json", [each.to_json() for each in ratings])
    return ratings
