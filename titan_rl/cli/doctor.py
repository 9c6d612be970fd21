"""`titan-rl doctor [--model FOLDER] [--json]`: check what this machine lacks for a run, or whether a model can be
trained and sampled here."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from msgspec import json

from titan_rl.cli import EXIT_FAILED
from titan_rl.cli.options import Parser
from titan_rl.run.checks.machine_checks import Finding, check_up
from titan_rl.run.checks.model_check import CheckedModel, ModelOutcome, check_model, read_model
from titan_rl.run.terminal.standard_streams import print_next_command, print_result, print_stderr
from titan_rl.run.terminal.waiting import WAITING


def set_up(parser: Parser) -> None:
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        return _check(Path(arguments.model), as_json=arguments.json)
    missing = 0
    for finding in check_up():
        missing += finding.state == "missing"
        print_result(f"{json.encode(finding).decode()}\n" if arguments.json else _as_text(finding))
    print_stderr(
        f"titan-rl: {f'{missing} of these prevent a run from starting' if missing else 'a run can start here'}"
    )
    if not missing:
        print_next_command("init", "NAME")
    return EXIT_FAILED if missing else 0


def _check(folder: Path, *, as_json: bool) -> int:
    """Check a model folder, and report whether the model can be trained."""
    model = read_model(folder)
    if model.implementation is None:
        print_stderr(f"titan-rl: no, {model.reason}; docs/reference/models.md lists the families that can")
        return EXIT_FAILED
    wrong: list[ModelOutcome] = []
    with WAITING.shown(f"checking a tiny {model.model_type}"):
        for outcome in check_model(model):
            print_result(_outcome_as_json(outcome) if as_json else _outcome_as_text(outcome))
            if not outcome.is_right:
                wrong.append(outcome)
    return _verdict(model, wrong)


def _verdict(model: CheckedModel, wrong: list[ModelOutcome]) -> int:
    family = f"{model.model_type!r}, with the {model.implementation} implementation ({model.reason})"
    differing = {outcome.part: outcome.comparison.name for outcome in wrong if outcome.comparison is not None}
    if not wrong:
        print_stderr(f"titan-rl: yes, a run can train {family}")
        print_next_command("train", "CONFIG", "--model.path", str(model.folder))
    elif "trainer" in differing:
        print_stderr(f"titan-rl: no, a run cannot train {family}: {', '.join(differing.values())} wrong")
        print_next_command("doctor")  # reports packages whose versions are not the tested ones
    elif differing:
        print_stderr(
            f"titan-rl: no, a run cannot sample {family}: {', '.join(differing.values())} wrong; fine-tuning on "
            "demonstrations needs no engine"
        )
        print_next_command("sft", "CONFIG", "--model.path", str(model.folder))
    else:  # the check may need more than this machine has, so that it says nothing about the machines of a run
        part = wrong[0].part
        verb = "train" if part == "trainer" else "sample"
        print_stderr(
            f"titan-rl: not known whether a run can {verb} {family}: the {part} could not be checked here, as the line "
            "above says"
        )
        if part == "engine":
            print_next_command("train", "CONFIG", "--model.path", str(model.folder), "--dry-run")
    return EXIT_FAILED if wrong else 0


def _outcome_as_json(outcome: ModelOutcome) -> str:
    line = {"part": outcome.part, "is_right": outcome.is_right, "problem": outcome.problem}
    compared = {} if outcome.comparison is None else asdict(outcome.comparison)
    return f"{json.encode(line | compared).decode()}\n"


def _outcome_as_text(outcome: ModelOutcome) -> str:
    name = outcome.part if outcome.comparison is None else outcome.comparison.name
    found = outcome.problem if outcome.comparison is None else str(outcome.comparison)
    label = "ok" if outcome.is_right else "unknown" if outcome.comparison is None else "wrong"
    return f"{label:8} {name:18}{found}\n"


def _as_text(finding: Finding) -> str:
    fix = f"\n{'':27}-> {finding.fix}" if finding.fix else ""
    return f"{finding.state:8} {finding.subject:18}{finding.found}{fix}\n"
