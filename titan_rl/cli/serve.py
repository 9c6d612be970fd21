"""`titan-rl serve RUN_OR_MODEL [--follow] [--table.setting value ...] [--dry-run]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from titan_rl.cli.main import signals_end_imports
from titan_rl.cli.options import Parser
from titan_rl.cli.runs import print_imports
from titan_rl.config.serve import dump_serve_config, load_serve_config
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import with_value
from titan_rl.evaluation.policies.policy_source import find_policy
from titan_rl.evaluation.policies.served_adapters import find_adapters, source_of_adapters
from titan_rl.run.directory import adapters_of_run
from titan_rl.run.terminal.standard_streams import print_next_command, print_result, print_stderr

FOLLOW_S = 5.0
"""Interval between checks for a newer checkpoint with `--follow`, in seconds."""


def set_up(parser: Parser) -> None:
    parser.add_argument(
        "--follow",
        action="store_true",
        help=f"load newer checkpoints of the run as they appear: --server.follow_s {FOLLOW_S:g}, unless that is set",
    )
    parser.add_verbosity()
    parser.add_settings("titan_rl.config.serve:ServeConfig")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    several: dict[str, str] = {}
    if adapters_of_run(Path(arguments.policy)):
        source, several = source_of_adapters(Path(arguments.policy))
    else:
        source = find_policy(arguments.policy)
    if source.toml is not None and source.toml != Path(arguments.policy):
        print_imports(source.toml)  # the settings in a run's folder
    config = load_serve_config(source.toml, arguments.overrides, policy=source.folder)
    if several and not config.server.adapters:
        config = with_value(config, "server.adapters", several)
    if arguments.follow and config.server.follow_s is None:
        config = with_value(config, "server.follow_s", FOLLOW_S)
    if config.server.follow_s is not None and source.run is None:
        option = "--follow" if arguments.follow else f"server.follow_s = {config.server.follow_s:g}"
        if several:
            folders = ", ".join(str(folder) for folder in adapters_of_run(Path(arguments.policy)).values())
            raise ConfigError(
                f"{option}: {arguments.policy} is a run with [[adapters]], which are served together as they are; name "
                f"one of them ({folders}), or leave the option out"
            )
        raise ConfigError(
            f"{option}: {arguments.policy} is not a run's folder, and so gets no newer versions; name a run's folder, "
            "such as runs/latest, or leave the option out"
        )
    if (versions := config.server.versions) is not None:
        if config.server.follow_s is not None:
            raise ConfigError("server.versions and server.follow_s (--follow) exclude each other; leave one out")
        if not Path(versions).is_dir():
            raise ConfigError(
                f"server.versions = {versions!r}: there is no such folder; name a folder of model folders"
            )
    adapters = find_adapters(config, source)
    if arguments.dry_run:
        from titan_rl.evaluation.serve import take_keys

        take_keys(config.server)
        print_result(f"# {source.name}\n\n{dump_serve_config(config)}")
        print_stderr("titan-rl: ready: the policy can be served")
        follow = ["--follow"] if arguments.follow else []
        print_next_command(
            "serve", arguments.policy, *follow, *(f"--{name}={value}" for name, value in arguments.overrides)
        )
        return 0
    with signals_end_imports():
        # Imported after the settings have been checked, because this imports everything that the processes need.
        from titan_rl.evaluation.serve import run_server

    return run_server(config, source, arguments.verbosity, adapters)
