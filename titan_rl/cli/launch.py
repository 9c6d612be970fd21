"""`titan-rl launch CONFIG.toml ... [--table.setting value ...] [--dry-run]`."""

from __future__ import annotations

import argparse
from pathlib import Path, PurePath

from titan_rl.cli.options import Parser
from titan_rl.cluster.providers.registry import find_provider
from titan_rl.cluster.providers.spec import Submission
from titan_rl.config.experimental import experimental_warning
from titan_rl.config.load import dump_config, load_config
from titan_rl.core.errors import ConfigError
from titan_rl.run.directory import run_name
from titan_rl.run.terminal.standard_streams import print_result, print_stderr


def set_up(parser: Parser) -> None:
    parser.add_run_config()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    paths = [Path(toml) for toml in arguments.config]
    config = load_config(paths, arguments.overrides, check_files=False)
    hosts = config.hosts
    if hosts.provider is None:
        raise ConfigError(
            "hosts.provider is not set; set it to slurm or kubernetes, or start the run here with titan-rl train"
        )
    for problem in hosts.too_few(launched=True):
        raise ConfigError(problem)
    provider = find_provider(hosts.provider)
    if provider.remote_folder is None:
        config = load_config(paths, arguments.overrides)
    elif not PurePath(config.model.path).is_absolute():
        remote_path = PurePath(provider.remote_folder(hosts), config.model.path)
        print_stderr(
            f"titan-rl: model.path = {config.model.path!r} is {remote_path} on the machines of the run; make sure that "
            "it exists"
        )
    if warning := experimental_warning(config, config.statedict.transport.replace("auto", "tcp")):
        print_stderr(f"titan-rl: warning: {warning}")
    submission = Submission(
        settings=hosts,
        name=run_name(config, paths, arguments.overrides),
        config=dump_config(config),
        tomls={str(path): path.read_text(encoding="utf-8") for path in paths},
        overrides=arguments.overrides,
        run_dir=config.run_dir,
    )
    if provider.render is None:
        raise _takes_no_jobs(hosts.provider)
    text = provider.render(submission)
    if arguments.dry_run:
        print_result(text)
        return 0
    if provider.submit is None:
        raise _takes_no_jobs(hosts.provider)
    print_stderr(f"titan-rl: {provider.submit(submission, text)}")
    return 0


def _takes_no_jobs(provider: str) -> ConfigError:
    return ConfigError(
        f'hosts.provider = "{provider}" accepts no jobs; titan-rl train starts the run here, and the provider starts '
        "its workers"
    )
