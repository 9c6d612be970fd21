"""Options of commands: settings with the classes that check them, verbosity, and folders of earlier runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from titan_rl.cli import EXIT_USAGE
from titan_rl.config.changes import check_options, is_resumable
from titan_rl.config.functions import recorded_modules
from titan_rl.config.load import load_config, load_sft_config
from titan_rl.config.reference import SettingEntry, setting_entry, tables_of
from titan_rl.config.run import RunConfig
from titan_rl.config.tables import parse_value
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section, path_problem
from titan_rl.run.directory import check_files
from titan_rl.run.observability.progress import Verbosity
from titan_rl.run.terminal.standard_streams import say, tell

_NEGATIVE = re.compile(r"-(\.?\d|inf$|nan$)")
_OPTION = re.compile(r"--[^=]+")


class Parser(argparse.ArgumentParser):
    """Parser that prints through `say` and `tell`, as do the parsers of its commands."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        self._takes_settings = False

    def add_settings(self, root: type[Section]) -> None:
        """Accept every setting of `root`, in a group for each table, and set `overrides`: (name, text) in their order.

        An unknown option is accepted as a setting, too: tasks have settings of their own, and the check of the whole
        config gives the best error for a wrong one.
        """
        self._takes_settings = True
        self.set_defaults(overrides=())
        for table in tables_of(root):
            if table.title == "[[tasks]]":
                task = self.add_argument_group("[task]", "The task to learn. Its class has more settings.")
                _add_option(
                    task, SettingEntry("task.type", "name", "required", 'The class, "module:Class".'), _Override
                )
            group = self.add_argument_group(table.title or "settings", table.about if table.title else None)
            for setting in table.settings:
                _add_option(group, setting, _Override)

    def add_options(self, section: type[Section], leave_out: Sequence[str] = ()) -> None:
        """Accept the fields of `section` as options, `max_tokens` as --max-tokens, and set `options`: the given values
        by field name."""
        self.set_defaults(options={})
        group = self.add_argument_group("options of this command")
        for name, field in section.model_fields.items():
            if name in leave_out:
                continue
            _add_option(group, setting_entry(name.replace("_", "-"), field), _Option)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  of several signatures
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        if self._takes_settings and args is not None:
            args = _with_negative_values(args)
            names = {argument.partition("=")[0] for argument in args if argument.startswith("--")}
            for name in names - {"--"}:
                with contextlib.suppress(argparse.ArgumentError):  # it is known
                    self.add_argument(name, action=_Override, help=argparse.SUPPRESS)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # argparse would report it with the usage of titan-rl, instead of that of the command
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def print_help(self, file: object = None) -> None:
        say(self.format_help())

    def error(self, message: str) -> NoReturn:
        tell(f"{self.format_usage()}{self.prog}: error: {message}")
        self.exit(EXIT_USAGE)


def _add_option(group: argparse._ArgumentGroup, setting: SettingEntry, action: type[argparse.Action]) -> None:  # pyright: ignore[reportPrivateUsage]
    default = setting.default
    note = "" if not default else " (required)" if default == "required" else f" (default: {default})"
    group.add_argument(
        f"--{setting.key}",
        action=action,
        choices=_Offered(setting.choices) if setting.choices else None,
        metavar=None if setting.choices and setting.kind != "name" else "VALUE",
        help=f"{setting.about}{note}".replace("%", "%%"),
    )


def file_path(text: str) -> str:
    """Argument type of a file, a folder or a URL.

    Raises:
        argparse.ArgumentTypeError: no file can have that name.
    """
    problem = None if "://" in text else path_problem(text)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{text if len(text) <= 60 else f'{text[:60]}...'} {problem}")
    return text


def _with_negative_values(args: Sequence[str]) -> list[str]:
    """`["--training.lr", "-1e-3"]` is `["--training.lr=-1e-3"]`: argparse takes such numbers for options."""
    joined: list[str] = []
    for argument in args:
        option = joined[-1] if joined else ""
        if _NEGATIVE.match(argument) and _OPTION.fullmatch(option) and "--" not in joined:
            joined[-1] = f"{option}={argument}"
        else:
            joined.append(argument)
    return joined


class Version(argparse.Action):
    """Prints the version, which requires that titan-rl is installed."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        say(f"titan-rl {version('titan-rl')}\n")
        parser.exit()


class _Offered(tuple[str, ...]):
    """Choices for completion and help. Values are checked together with the other settings."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return True


class _Override(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, "overrides", default=argparse.SUPPRESS, **kwargs)

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        namespace.overrides = (*namespace.overrides, (self.option_strings[0].removeprefix("--"), values))


class _Option(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **kwargs)

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        namespace.options = {**namespace.options, self.dest: parse_value(str(values))}


def add_verbosity(parser: Parser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument("-q", "--quiet", action="store_true", help="show warnings and the result only")
    either.add_argument("-v", "--verbose", action="store_true", help="also show what is written to the log")


def verbosity_of(arguments: argparse.Namespace) -> Verbosity:
    if arguments.quiet:
        return Verbosity.QUIET
    return Verbosity.VERBOSE if arguments.verbose else Verbosity.NORMAL


CONFIG = "config.toml"
USUAL = Path("runs/latest")


def find_run(name: str, option: str = "--resume") -> Path:
    """The folder of the run that an option names, as an absolute path.

    Raises:
        ConfigError: it is not the folder of a run. Names a run nearby, if there is one.
    """
    path = Path(name)
    if _is_run(path):
        return path.resolve()
    if os.path.isdir(path):
        problem, near = f"the folder has no {CONFIG}", _newest_in(path)
    elif os.path.exists(path):
        problem, near = "it is a file", path.parent
    else:
        problem, near = "there is no such folder", USUAL
    hint = f", as {near}" if near is not None and _is_run(near) else ""
    raise ConfigError(f"{option} {name}: no run is there: {problem}; name the folder of a run{hint}")


def load_resumed(run: Path, overrides: Sequence[tuple[str, str]], *, is_sft: bool = False) -> RunConfig:
    """Load the settings of a resumed run.

    Args:
        run: the folder that `find_run` returned.

    Raises:
        ConfigError: a setting is wrong, an option changes one that must not change, or the folder contains links.
    """
    load = load_sft_config if is_sft else load_config
    check_files(run)
    tell_imports(run / CONFIG)
    config = load(run / CONFIG, overrides)
    allowed = [(key, value) for key, value in overrides if is_resumable(key)]
    if len(allowed) < len(overrides):
        check_options(config, load(run / CONFIG, allowed))
    return config


def tell_imports(config: Path) -> None:
    """Print which modules the settings of a run import, and from which folders, before they are imported.

    Args:
        config: a run's `config.toml`, whose author decides which code is imported.
    """
    found = recorded_modules(config)
    if found:
        what = ", ".join(f"{name} from {folder}" for name, folder in found.items())
        tell(f"titan-rl: {config} imports {what}")


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG)


def _newest_in(folder: Path) -> Path | None:
    """The newest run in a folder, by the link `latest` or by the names, which begin with the time."""
    if _is_run(folder / "latest"):
        return folder / "latest"
    return max((config.parent for config in folder.glob(f"*/{CONFIG}")), default=None)
