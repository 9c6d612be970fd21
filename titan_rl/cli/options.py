"""Parser of the command line, and options that several commands share.

Nothing here imports the classes of settings, which takes longer than printing a command's help.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

from titan_rl.cli import EXIT_USAGE
from titan_rl.core.console import Verbosity
from titan_rl.run.terminal.standard_streams import print_result, print_stderr

if TYPE_CHECKING:
    from titan_rl.config.settings_reference import SettingEntry
    from titan_rl.core.settings import Section

_NEGATIVE = re.compile(r"-(\.?\d|inf$|nan$)")
_SETTING = re.compile(r"[+~]*([A-Za-z_]\w*(?:\.\w+)*=.*)", re.DOTALL)
_OPTION = re.compile(r"--[^=]+")


class Parser(argparse.ArgumentParser):
    """Parser that prints through `print_result` and `print_stderr`. The parsers of commands have the same class."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        self._settings: str | None = None

    def declare(self, command: Mapping[str, Any]) -> None:
        """Set the usage and the description of a command, and add its arguments.

        Args:
            command: Table of commands.toml.
        """
        self.usage, self.description, self.epilog = map(command.get, ("usage", "description", "epilog"))
        types = {"path": file_path, "int": int, "float": float}
        for name, argument in command.get("arguments", {}).items():
            options: dict[str, Any] = dict(argument)
            if "type" in options:
                options["type"] = types[options["type"]]
            self.add_argument(name, **options)

    def add_settings(self, root: str) -> None:
        """Accept every setting as an option, and set `overrides` to the given pairs (name, text) in their order.

        The options are not declared, because tasks have their own settings, and the check of the whole config gives the
        best error for a wrong option.

        Args:
            root: Class of the settings as "module:Class".
        """
        self._settings = root
        self.set_defaults(overrides=())
        self.epilog = (
            "Every setting is an option, too: --table.setting value. `titan-rl settings` explains all of them with "
            "their defaults, and `titan-rl settings training` those of one table."
        )

    def add_run_config(self, nargs: str = "+") -> None:
        """Accept the CONFIG.toml files of a run, and its settings as options; see `add_settings`."""
        self.add_argument("config", type=file_path, metavar="CONFIG.toml", nargs=nargs, help="the run's settings")
        self.add_settings("titan_rl.config.run:RunConfig")

    def add_verbosity(self) -> None:
        """Accept --quiet and --verbose, and set `verbosity` to a `Verbosity`."""
        self.set_defaults(verbosity=Verbosity.NORMAL)
        either = self.add_mutually_exclusive_group()
        for short, name, level, shown in (
            ("-q", "--quiet", Verbosity.QUIET, "show warnings and the result only"),
            ("-v", "--verbose", Verbosity.VERBOSE, "also show what is written to the log"),
        ):
            either.add_argument(short, name, action="store_const", dest="verbosity", const=level, help=shown)

    def declare_settings(self) -> None:
        """Declare the options of `add_settings`, for completion and other listings."""
        from titan_rl.config.settings_reference import SettingEntry, tables_of

        if self._settings is None:
            return
        for table in tables_of(resolve_name(self._settings)):
            if table.title == "[[tasks]]":
                task = self.add_argument_group("[task]", "The task to learn. Its class has more settings.")
                task_type = SettingEntry("task.type", "name", "required", 'The class, "module:Class".')
                _add_option(task, task_type, _Override)
            group = self.add_argument_group(table.title or "settings", table.about if table.title else None)
            for setting in table.settings:
                _add_option(group, setting, _Override)

    def add_options(self, section: type[Section], leave_out: Sequence[str] = ()) -> None:
        """Accept the fields of `section` as options, such as `max_tokens` as --max-tokens, and set `options` to the
        given values by field name."""
        from titan_rl.config.settings_reference import field_docstrings, setting_entry

        self.set_defaults(options={})
        about = field_docstrings(section)
        group = self.add_argument_group("options of this command")
        for name, field in section.model_fields.items():
            if name in leave_out:
                continue
            _add_option(group, setting_entry(name.replace("_", "-"), field, about.get(name, "")), _Option)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  overloaded
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        if self._settings is not None and args is not None:
            args = _with_negative_values(args)
            names = {argument.partition("=")[0] for argument in args if argument.startswith("--")}
            for name in names - {"--"}:
                with contextlib.suppress(argparse.ArgumentError):  # already declared
                    self.add_argument(name, action=_Override, help=argparse.SUPPRESS)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # argparse would report it with the usage of titan-rl, instead of that of the command
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def print_help(self, file: object = None) -> None:
        print_result(self.format_help())

    def error(self, message: str) -> NoReturn:
        print_stderr(f"{self.format_usage()}{self.prog}: error: {message}")
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
        argparse.ArgumentTypeError: No file can have that name, or it is a setting without dashes: `training.lr=1e-5`.
    """
    from titan_rl.core.settings import path_problem

    if (setting := _SETTING.fullmatch(text)) and not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text} is not a file; write a setting with two dashes: --{setting[1]}")
    problem = None if "://" in text else path_problem(text)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{text if len(text) <= 60 else f'{text[:60]}...'} {problem}")
    return text


def _with_negative_values(args: Sequence[str]) -> list[str]:
    """Join an option with a negative number: `["--training.lr", "-1e-3"]` becomes `["--training.lr=-1e-3"]`, because
    argparse takes such numbers for options."""
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
        from importlib.metadata import version

        print_result(f"titan-rl {version('titan-rl')}\n")
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
        from titan_rl.config.unchecked_tables import parse_value

        namespace.options = {**namespace.options, self.dest: parse_value(str(values))}
