"""`titan-rl eval`, from checked settings to its results:

run_evaluations   checks the requirements of the policies, and sets up signals, guard and environment for engines
_evaluate_all     opens, evaluates and closes one policy after the other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.hosts import check_own_machine
from titan_rl.config.run import RunConfig
from titan_rl.evaluation.elo import Ratings
from titan_rl.evaluation.evaluate import EvaluationRun, folder_name
from titan_rl.evaluation.matches import play_matches, write_ratings
from titan_rl.evaluation.policies.opened import (
    OpenedPolicies,
    OpenedPolicy,
    is_url,
    needs_engine,
    require_engine,
)
from titan_rl.evaluation.policies.source import find_policy
from titan_rl.evaluation.results import Evaluation
from titan_rl.evaluation.suites import chosen_suites, open_suites
from titan_rl.run.machine.environment import file_modes, logging_to
from titan_rl.run.machine.signals import StopSignals, run_to_its_end
from titan_rl.run.observability.progress import Progress
from titan_rl.run.session import SessionFiles, process_session
from titan_rl.types import GenerateFn

STOPPING = "stopping: what is done so far is shown; once more ends it at once"


def run_evaluations(
    config: RunConfig,
    settings: EvalConfig,
    policies: Sequence[str],
    out: Path,
    evaluations: list[Evaluation],
    ratings: list[Ratings],
    progress: Progress,
) -> int:
    """Evaluate one policy after the other.

    Args:
        policies: Folders and URLs of the policies.
        out: Folder in which a folder for each policy is created.
        progress: Progress display.
        evaluations: List to which the results are appended, including those so far of a policy whose evaluation is
            stopped or fails.
        ratings: List to which Elo ratings are appended, for each task in whose games the policies have played each
            other.

    Returns:
        The exit code: 0, or 128 + the number of the signal that ended the command in order.

    Raises:
        TitanRLError: The error that ended the command, or kept it from starting.
    """
    chosen_suites(config, settings)
    if needs_engine(policies):
        require_engine(config)
        check_own_machine(config.hosts)
    for given in policies:
        if needs_engine([given]):
            find_policy(given)
    ended = f"ended at once; {out} has the results so far, and the same command with --out {out} continues"
    with file_modes(share=config.share_run_dir):
        files = SessionFiles(f"eval-{out.name}", out.absolute() / "logs")
        files.logs.mkdir(parents=True, exist_ok=True)
        with (
            logging_to(files.logs / "evaluation.log"),
            process_session(files.run_id, config.pythonpath, stopping=STOPPING, ended=ended) as signals,
        ):
            signals.console = progress
            program = _evaluate_all(config, settings, policies, out, evaluations, ratings, files, progress, signals)
            try:
                run_to_its_end(program)
            except Exception as error:
                error.add_note(f"logs and transcripts are in {out}")
                raise
            return signals.code


async def _evaluate_all(
    config: RunConfig,
    settings: EvalConfig,
    policies: Sequence[str],
    out: Path,
    evaluations: list[Evaluation],
    ratings: list[Ratings],
    files: SessionFiles,
    progress: Progress,
    signals: StopSignals,
) -> None:
    taken: set[str] = set()
    with signals.ending_in_order():
        async with OpenedPolicies(config, settings, files, progress) as opened:
            policy: OpenedPolicy | None = None
            for given in policies:
                with progress.working(f"loading {given}"):
                    policy = await opened.open(given)
                run = EvaluationRun(config, settings, policy, out / folder_name(policy.name, taken), progress)
                try:
                    with progress.working(f"playing {policy.name}", progress.counted):
                        await run.run()
                finally:
                    if (evaluation := run.evaluation()).tasks:  # otherwise no task could be opened
                        evaluations.append(evaluation)
            seats = {name: seats for name, result in evaluations[0].tasks.items() if len(seats := result.seats) > 1}
            if policy is not None and len(policies) > 1 and seats and not any(map(is_url, policies)):
                with progress.working("playing the policies against each other"):
                    ratings += await _matches(config, settings, policy, opened.together(), seats, out, progress)


async def _matches(
    config: RunConfig,
    settings: EvalConfig,
    policy: OpenedPolicy,
    policies: Mapping[str, GenerateFn],
    seats: Mapping[str, Sequence[str]],
    out: Path,
    progress: Progress,
) -> list[Ratings]:
    """Play the matches between policies at the tasks with several seats, and rate the policies.

    Args:
        policy: One of the policies, for its renderer.
        seats: Seats that a policy plays in the games of each task, by task.
    """
    async with open_suites(config, settings, policy, out, progress) as suites:
        ratings = [
            await play_matches(suite, seats[suite.name], policies, in_flight=settings.in_flight)
            for suite in suites
            if suite.name in seats
        ]
    write_ratings(out, ratings)
    return ratings
