"""Folders of earlier runs that commands name, and the settings of resumed runs."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from titan_rl.config.function_names import recorded_modules
from titan_rl.config.load import load_config, load_sft_config
from titan_rl.config.resume_changes import check_options, check_presets, may_be_given, settings_of_new_run
from titan_rl.config.run import RunConfig
from titan_rl.config.run_inputs import settings_of_inputs
from titan_rl.core.errors import ConfigError
from titan_rl.core.run_files import ADAPTERS
from titan_rl.run.directory import RunDirectory, adapters_of_run, check_files
from titan_rl.run.observability.progress import status
from titan_rl.run.resumption import new_run_command
from titan_rl.run.terminal.standard_streams import StderrConsole, print_stderr

CONFIG = "config.toml"
USUAL = Path("runs/latest")


def find_run(name: str, option: str = "--resume") -> Path:
    """Return the folder of the run that an option names, as an absolute path.

    Raises:
        ConfigError: The folder is not that of a run, or it is that of one adapter of a run. The message names a run
            nearby, if there is one.
    """
    path = Path(name)
    if _is_run(path):
        run = path.resolve()
        if option == "--resume" and run.parent.name == ADAPTERS and run.name in adapters_of_run(run.parents[1]):
            raise ConfigError(
                f"{option} {name}: this is one adapter of a run of several, which continue together: titan-rl train "
                f"--resume {run.parents[1]}; for more steps of this one add --adapters.{run.name}.training.steps N"
            )
        return run
    if os.path.isdir(path):
        problem, near = f"the folder has no {CONFIG}", _newest_in(path)
    elif os.path.exists(path):
        problem, near = "it is a file", path.parent
    else:
        problem, near = "there is no such folder", USUAL
    hint = f", as {near}" if near is not None and _is_run(near) else ""
    raise ConfigError(f"{option} {name}: there is no run: {problem}; name the folder of a run{hint}")


def load_run(arguments: argparse.Namespace, *, is_sft: bool = False) -> tuple[RunConfig, Path | None]:
    """Load the settings of the run that `titan-rl train` or `titan-rl sft` starts, or resumes with `--resume`.

    Returns:
        Config, and the folder of the run that is resumed, or None.

    Raises:
        ConfigError: A setting is wrong, there is no such run, an option changes a setting that must not change, or the
            folder of the run contains links.
    """
    command = "sft" if is_sft else "train"
    start = None if is_sft else arguments.start_from
    if [bool(arguments.config), arguments.resume is not None, start is not None].count(True) != 1:
        from_run = "" if is_sft else ", or --from RUN to begin a new run from its weights"
        raise ConfigError(
            f"{command} needs either CONFIG.toml, or --resume RUN with the folder of an earlier run{from_run}"
        )
    load = load_sft_config if is_sft else load_config
    overrides: Sequence[tuple[str, str]] = arguments.overrides
    if start is not None:
        return _load_from(find_run(start, "--from"), overrides), None
    if arguments.resume is None:
        return load(arguments.config, overrides), None
    run = find_run(arguments.resume)
    check_files(run)
    print_imports(run / CONFIG)
    inputs = settings_of_inputs(RunDirectory(run).inputs)
    allowed, others = list[tuple[str, str]](), list[tuple[str, str]]()
    for key, value in overrides:
        (allowed if may_be_given(key, inputs) else others).append((key, value))
    fix = "begin a new run" if is_sft else f"begin a new run from its weights: {new_run_command(run, others)}"
    check_presets(run / CONFIG, others, fix)
    config = load(run / CONFIG, overrides)
    if others:
        check_options(config, load(run / CONFIG, allowed), fix)
    return config, run


def _load_from(run: Path, overrides: Sequence[tuple[str, str]]) -> RunConfig:
    """Load the settings of a new run that begins from the weights of another one, which are exported if they have not
    been."""
    from titan_rl.evaluation.policies.policy_export import export_policy
    from titan_rl.evaluation.policies.policy_source import find_policy, single_policy

    run = single_policy(run)
    print_imports(run / CONFIG)
    if any(key == "model.path" for key, _ in overrides):
        raise ConfigError(f"--from {run} determines the initial model; leave --model.path out")
    policy = find_policy(str(run))
    if policy.folder is None and policy.checkpoint is None:
        raise ConfigError(f"--from {run}: that run has no saved step yet; begin with its settings: {run / CONFIG}")
    folder = policy.folder or run / f"policy-{policy.version:06d}"
    if not folder.is_dir():
        with status(f"exporting {policy.name}"):
            asyncio.run(export_policy(str(policy.checkpoint), folder, None, StderrConsole()))
    return load_config(run / CONFIG, overrides, given=settings_of_new_run(run / CONFIG, folder, dict(overrides)))


def print_imports(config: Path) -> None:
    """Print the modules that the settings of a run import, and their folders, before they are imported.

    Args:
        config: The run's `config.toml`, whose author decides which code is imported.
    """
    found = recorded_modules(config)
    if found:
        what = ", ".join(f"{name} from {folder}" for name, folder in found.items())
        print_stderr(f"titan-rl: {config} imports {what}")


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG)


def _newest_in(folder: Path) -> Path | None:
    """Return the newest run in a folder, by the link `latest` or by the names, which begin with the time."""
    if _is_run(folder / "latest"):
        return folder / "latest"
    return max((config.parent for config in folder.glob(f"*/{CONFIG}")), default=None)
