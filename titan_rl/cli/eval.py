"""`titan-rl eval [CONFIG.toml ...] POLICY [POLICY ...]`, and `titan-rl eval --compare FOLDER [FOLDER ...]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.cli.main import signals_end_imports
from titan_rl.cli.options import Parser
from titan_rl.cli.runs import CONFIG, print_imports
from titan_rl.config.evaluation import EvalConfig, make_eval_config
from titan_rl.config.load import load_config
from titan_rl.core.errors import ConfigError
from titan_rl.evaluation.policies.policy_source import single_policy
from titan_rl.evaluation.results import Evaluation, evaluation_folders, read_evaluation
from titan_rl.evaluation.table import as_json, table
from titan_rl.run.directory import run_name
from titan_rl.run.observability.progress import Progress
from titan_rl.run.terminal.standard_streams import print_next_command, print_result, print_stderr

if TYPE_CHECKING:  # slow to import
    from titan_rl.evaluation.elo import Ratings


def set_up(parser: Parser) -> None:
    parser.add_verbosity()
    parser.add_options(EvalConfig)
    parser.add_settings("titan_rl.config.run:RunConfig")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        if missing := [folder for folder in arguments.given if not Path(folder).exists()]:
            raise ConfigError(f"--compare {missing[0]}: there is no such folder; name the folder of an evaluation")
        folders = [folder for given in arguments.given for folder in evaluation_folders(given)]
        _show([read_evaluation(folder) for folder in folders], arguments)
        return 0
    configs, policies = split(arguments.given)
    settings = make_eval_config(arguments.options)
    if configs and configs[0] not in arguments.given:
        print_imports(Path(configs[0]))  # the settings in a run's folder
    config = load_config(configs, arguments.overrides, check_files=False)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    out = Path(arguments.out or Path(config.run_dir) / "evaluations" / f"{stamp}-{run_name(config)}")
    with signals_end_imports():
        # Imported after the settings have been checked, because this imports everything that the processes need.
        from titan_rl.evaluation.evaluate import PolicyEvaluations

    evaluations: list[Evaluation] = []
    ratings: list[Ratings] = []
    try:
        with Progress(0, sys.stderr, unit="sample", verbosity=arguments.verbosity, vanish=True) as progress:
            code = PolicyEvaluations(config, settings, policies, out, evaluations, ratings, progress).run()
    finally:
        if evaluations:
            _show(evaluations, arguments, ratings)
    done = "results and transcripts are in" if code == 0 else "stopped; the same command continues with --out"
    if code == 0:
        print_next_command("view", str(out))
    print_stderr(f"titan-rl: {done} {out}")
    return code


def split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into CONFIG.toml files and policies.

    Raises:
        ConfigError: There is no policy, or no config.
    """
    num_configs = next((index for index, name in enumerate(given) if not name.endswith(".toml")), len(given))
    configs, policies = list(given[:num_configs]), list(given[num_configs:])
    if not policies:
        raise ConfigError("name a policy after CONFIG.toml: a run's folder, a model's, or the URL of an endpoint")
    if not configs and (Path(policies[0]) / CONFIG).is_file():
        configs = [str(single_policy(Path(policies[0])) / CONFIG)]
    if not configs:
        raise ConfigError(
            f"name the CONFIG.toml whose tasks are played before {policies[0]}, which is not a run's folder"
        )
    return configs, policies


def _show(evaluations: Sequence[Evaluation], arguments: argparse.Namespace, ratings: Sequence[Ratings] = ()) -> None:
    if arguments.json:
        print_result(f"{as_json(evaluations, ratings)}\n")
    else:
        print_result("\n\n".join([table(evaluations), *map(str, ratings)]) + "\n")
