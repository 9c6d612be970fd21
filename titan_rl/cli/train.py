"""`titan-rl train (CONFIG.toml ... | --resume RUN | --from RUN) [--table.setting value ...] [--dry-run]`."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.cli.main import signals_end_imports
from titan_rl.cli.options import Parser
from titan_rl.core.console import Verbosity
from titan_rl.core.errors import GenerationError, MissingExtraError
from titan_rl.run.terminal.standard_streams import StderrConsole, print_next_command, print_result, print_stderr
from titan_rl.run.terminal.waiting import WAITING

if TYPE_CHECKING:
    from titan_rl.config.run import RunConfig


def set_up(parser: Parser) -> None:
    parser.add_run_config(nargs="*")
    parser.add_verbosity()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    verbosity: Verbosity = arguments.verbosity
    with WAITING.shown("checking the settings") if verbosity is not Verbosity.QUIET else nullcontext():
        with signals_end_imports():
            config, resume = _checked(arguments)
        if arguments.dry_run:
            return _dry_run(config, resume, arguments)
        with signals_end_imports():
            # Imported after the settings have been checked, because this imports everything that the processes need.
            from titan_rl.run.train import run_training
    from titan_rl.run.directory import run_name
    from titan_rl.run.observability.summary import show_summary

    name = run_name(config, [Path(toml) for toml in arguments.config], arguments.overrides)
    started_by = shlex.join(["titan-rl", *sys.argv[1:]])
    end = run_training(config, resume, name=name, started_by=started_by, verbosity=verbosity)
    if end.summary is not None:
        show_summary(end.summary)
        if verbosity is not Verbosity.QUIET:
            policies = [str(each.run_dir) for each in end.summary.adapters.values()]
            print_next_command("eval", *(policies[:1] or [str(end.summary.run_dir)]))
    return end.code


def _checked(arguments: argparse.Namespace) -> tuple[RunConfig, Path | None]:
    """Load the settings and check them against this machine.

    Returns:
        Config, and the folder of the run that is resumed, or None.

    Raises:
        ConfigError: A setting is wrong, or does not suit the machine.
    """
    from titan_rl.cli.runs import load_run
    from titan_rl.config.concurrency import throttles
    from titan_rl.config.hosts import check_own_machine
    from titan_rl.config.model_folder import tiny_model_note
    from titan_rl.run.checks.requirements import check_needs, warn_of_experimental

    config, resume = load_run(arguments)
    old_base = None if resume is not None else tiny_model_note(config)
    for warning in (*throttles(config), *filter(None, [old_base])):
        print_stderr(f"titan-rl: warning: {warning}")
    check_own_machine(config.hosts)
    check_needs(config)
    if experimental := warn_of_experimental(config):
        print_stderr(f"titan-rl: warning: {experimental}")
    return config, resume


def _dry_run(config: RunConfig, resume: Path | None, arguments: argparse.Namespace) -> int:
    from titan_rl.config.load import dump_config
    from titan_rl.config.model_folder import adapter_base_note, adapters_of
    from titan_rl.run.checks.own_processes import Machine, describe_processes, memory_problem, overloads
    from titan_rl.run.checks.requirements import (
        check_finite,
        check_policy,
        describe_chat,
        describe_implementation,
        describe_transport,
    )
    from titan_rl.run.directory import check_run_dir

    if resume is None:
        check_run_dir(config)
    else:
        from titan_rl.run.resumption import check_resumption

        for loss in check_resumption(config, resume):
            print_stderr(f"titan-rl: {loss}")
    print_result(dump_config(config, with_defaults=arguments.verbosity is Verbosity.VERBOSE))
    print_stderr(f"titan-rl: {describe_transport(config)}")
    print_stderr(f"titan-rl: {describe_implementation(config)}")
    machine = Machine.here()
    for line in describe_processes(config, machine):
        print_stderr(f"titan-rl: {line}")
    bases = (adapter_base_note(config.model, adapter) for adapter in adapters_of(config).values())
    warnings = [*overloads(config, machine), *filter(None, bases)]
    for warning in warnings:
        print_stderr(f"titan-rl: warning: {warning}")
    problem = memory_problem(config, machine)
    if problem is not None:
        print_stderr(f"error: {problem}")
    for line in describe_chat(config):
        print_stderr(f"titan-rl: {line}")
    _check_teachers(config)
    code = _play_dry_run(config)
    if code or problem is not None:
        print_stderr("titan-rl: not ready: a run would fail; see the errors above")
        return 1
    with WAITING.shown("building the policy without memory"):
        untrained = check_policy(config)
    if untrained is not None:
        print_stderr(f"titan-rl: warning: {untrained}")
    check_finite(_folders_read(config))
    print_stderr(
        "titan-rl: the settings are valid, but the run may not start: see the warnings above"
        if warnings
        else "titan-rl: ready: the settings are valid, and the run can start"
    )
    begins = arguments.config if resume is None else ["--resume", str(resume)]
    if arguments.start_from is not None:
        begins = ["--from", arguments.start_from]
    print_next_command("train", *begins, *(f"--{name}={value}" for name, value in arguments.overrides))
    return code


def _folders_read(config: RunConfig) -> list[Path]:
    """Folders of the models whose weights a run reads."""
    from titan_rl.config.model_folder import adapters_of
    from titan_rl.config.serve import load_serve_config
    from titan_rl.evaluation.policies.policy_source import find_policy

    folders = [config.model.path, config.generation.speculative.model]
    folders += [adapter.start for adapter in adapters_of(config).values()]
    for name in _teachers(config):
        if Path(name).is_dir():
            source = find_policy(name)
            folders.append(load_serve_config(source.toml, (), policy=source.folder).model.path)
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def _teachers(config: RunConfig) -> list[str]:
    return sorted({config.teacher_of(source) for source in config.tasks} - {"", "self"})


DRY_ASK_S = 5.0
"""Longest wait for the answer of a teacher's server in a dry run, in seconds."""


def _check_teachers(config: RunConfig) -> None:
    """Check that the tokenizers of teachers equal the policy's. A server that cannot be reached is only reported,
    because it may be started later.

    Raises:
        ConfigError: A tokenizer makes other tokens than the policy's or cannot be loaded, a folder has no model, or a
            server cannot tokenize.
    """
    names = _teachers(config)
    if not names:
        return
    import asyncio

    from titan_rl.config.serve import load_serve_config
    from titan_rl.evaluation.policies.policy_source import find_policy
    from titan_rl.run.open_teachers import TokenCheck, check_tokens, server_of

    try:
        check = TokenCheck.of_policy(config.model.path)
    except MissingExtraError as error:
        print_stderr(f"titan-rl: the teacher's tokenizer was not checked: {error}")
        return
    for name in names:
        if Path(name).is_dir():
            source = find_policy(name)
            model = load_serve_config(source.toml, (), policy=source.folder).model
            check.compare_folder(name, model.path)
            continue
        served, model_name = server_of(name)
        try:
            asyncio.run(check_tokens(name, served, model_name, check, limit_s=DRY_ASK_S))
        except GenerationError as error:
            print_stderr(f"titan-rl: not checked, and a run would not start: {error}")


def _play_dry_run(config: RunConfig) -> int:
    """Play a group of each task without engines, if the package that reads the model's tokenizer is installed, and call
    each loss of the user's once.

    Returns:
        Exit code: 1 if a problem was found that would fail a run, otherwise 0.
    """
    from titan_rl.run.dry_run import describe, play_dry_run, problems_of_losses

    try:
        results = play_dry_run(config, StderrConsole())
    except MissingExtraError as error:
        print_stderr(f"titan-rl: no group was played: {error}")
        return 0
    for result in results:
        for line in describe(result, config.model.max_context):
            print_stderr(line)
    losses = problems_of_losses(config)
    for problem in losses:
        print_stderr(f"error: {problem}")
    for name in {source.name for source in config.tasks} - {result.task for result in results}:
        print_stderr(f"{name}: not played: the programs of agents are not started in a dry run")
    return 1 if losses or any(result.problems for result in results) else 0
