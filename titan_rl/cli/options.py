"""Options of commands: settings with the classes that check them, verbosity, and folders of earlier runs."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from titan_rl.cli import EXIT_USAGE
from titan_rl.config.changes import check_options, is_resumable
from titan_rl.config.functions import function_name, recorded_modules
from titan_rl.config.load import load_config, load_sft_config
from titan_rl.config.run import RunConfig
from titan_rl.config.tables import parse_value
from titan_rl.config.tasks import TaskSource, ValidationSuite
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FunctionName, Section, path_problem
from titan_rl.run.directory import check_files
from titan_rl.run.observability.progress import Verbosity
from titan_rl.run.terminal.standard_streams import say, tell

_NEGATIVE = re.compile(r"-(\.?\d|inf$|nan$)")
_OPTION = re.compile(r"--[^=]+")


class Parser(argparse.ArgumentParser):
    """Prints as the rest of the command does. The parsers of its commands are such, too."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        self._takes_settings = False

    def add_settings(self, root: type[Section]) -> None:
        """Take every setting of `root`, in a group for each table, and give `overrides`: (name, text) in their order.

        An option that is not known is a setting, too: a task has settings of its own, and what checks all of them says
        best what is wrong with one.
        """
        self._takes_settings = True
        self.set_defaults(overrides=())
        self._add_table(root, "settings", "")

    def add_options(self, section: type[Section], leave_out: Sequence[str] = ()) -> None:
        """Take the fields of `section` as options of their own, `max_tokens` as --max-tokens, and give `options`: what
        the command line says of them, by their names."""
        self.set_defaults(options={})
        group = self.add_argument_group("options of this command")
        for name, field in section.model_fields.items():
            if name in leave_out:
                continue
            kind = cast(object, field.annotation)
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            group.add_argument(
                f"--{name.replace('_', '-')}",
                action=_Option,
                choices=_Offered(choices) if choices else None,
                metavar=None if choices else "VALUE",
                help=_help(field, None),
            )

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
        if unknown:  # else it would be said with the usage of titan-rl, and not with that of the command
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def print_help(self, file: object = None) -> None:
        say(self.format_help())

    def error(self, message: str) -> NoReturn:
        tell(f"{self.format_usage()}{self.prog}: error: {message}")
        self.exit(EXIT_USAGE)

    def _add_table(self, section: type[Section], title: str, prefix: str) -> None:
        group = self.add_argument_group(title, inspect.getdoc(section) if prefix else None)
        for name, field in section.model_fields.items():
            key, kind = f"{prefix}{name}", cast(object, field.annotation)
            if isinstance(kind, type) and issubclass(kind, Section):
                self._add_table(kind, f"[{key}]", f"{key}.")
            elif name == "tasks":
                task = self.add_argument_group("[task]", "The task to learn. Its class has more settings.")
                task.add_argument(
                    "--task.type", action=_Override, metavar="VALUE", help='The class, "module:Class". (required)'
                )
                task.add_argument(
                    "--tasks.NAME.type",
                    action=_Override,
                    metavar="VALUE",
                    help="The class of one of [[tasks]].",
                )
                self._add_table(TaskSource, "[[tasks]]", "tasks.NAME.")
            elif name == "suites":
                self._add_table(ValidationSuite, "[[validation.suites]]", "validation.suites.NAME.")
            elif name == "task":
                continue
            elif name == "curriculum":
                group.add_argument(
                    f"--{key}.type",
                    action=_Override,
                    metavar="VALUE",
                    help=f"{field.description} It has more settings.",
                )
            else:
                function = function_name(section, name)
                choices = get_args(kind) if get_origin(kind) is Literal else function.names if function else ()
                group.add_argument(
                    f"--{key}",
                    action=_Override,
                    choices=_Offered(choices) if choices else None,
                    metavar=None if choices and not function else "VALUE",
                    help=_help(field, function),
                )


def file_path(text: str) -> str:
    """The type of an argument that names a file or folder, or a URL.

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
    """Asks for the version when that is wanted: only then need titan-rl be installed."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        say(f"titan-rl {version('titan-rl')}\n")
        parser.exit()


class _Offered(tuple[str, ...]):
    """Completes and is shown. What is right is checked with the other settings."""

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


def _help(field: FieldInfo, function: FunctionName | None) -> str:
    value: Any = None if field.default_factory else field.default
    note = " (required)" if field.is_required() else "" if value is None else f" (default: {_toml(value)})"
    if function is not None:
        note = f' One of {", ".join(function.names)}, or your own as "module:function".{note}'
    return f"{field.description}{note}".replace("%", "%%")


def _toml(value: str | bool | float | Iterable[Any]) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {_toml(each)}' for name, each in cast(Mapping[str, Any], value).items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, Iterable) else str(value)


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
    """The absolute folder of the run that an option names.

    Raises:
        ConfigError: no run is there. It says what is, and where a run is as far as that is to be seen.
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
    """Settings with which a run is resumed.

    Args:
        run: the folder that `find_run` returned.

    Raises:
        ConfigError: a setting is wrong, an option changes one that has to stay, or the folder holds links.
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
    """Say which code the settings of a run have imported, and from which of the folders that they name, before it is.

    Args:
        config: a run's `config.toml`. Whoever wrote it decides what is imported.
    """
    found = recorded_modules(config)
    if found:
        what = ", ".join(f"{name} from {folder}" for name, folder in found.items())
        tell(f"titan-rl: {config} imports {what}")


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG)


def _newest_in(folder: Path) -> Path | None:
    """Runs are named by their times, and the newest is linked to."""
    if _is_run(folder / "latest"):
        return folder / "latest"
    return max((config.parent for config in folder.glob(f"*/{CONFIG}")), default=None)
