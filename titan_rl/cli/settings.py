"""`titan-rl settings [TABLE]`: a reference of all settings in the terminal."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator

from titan_rl.cli.options import Parser
from titan_rl.config.settings_reference import RUN, SettingEntry, TableEntry, tables
from titan_rl.run.terminal.standard_streams import print_result

WIDEST = 100  # columns


def set_up(parser: Parser) -> None:
    parser.add_argument(
        "table",
        metavar="TABLE",
        nargs="?",
        type=lambda text: text.strip("[]"),
        choices=[table.name for table in tables()],
        help=f"a table, shown with its subtables, such as scheduling; {RUN} for the settings that are in no table "
        "(default: all tables)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen: str | None = arguments.table
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    shown = [table for table in tables() if chosen is None or f"{table.name}.".startswith(f"{chosen}.")]
    print_result("\n".join(line for table in shown for line in _lines(table, width)))
    return 0


def _lines(table: TableEntry, width: int) -> Iterator[str]:
    yield from textwrap.wrap(f"{table.title}: {table.about}" if table.title else table.about, width)
    for setting in table.settings:
        yield f"  {_signature(setting)}"
        yield from textwrap.wrap(setting.about, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    yield ""


def _signature(setting: SettingEntry) -> str:
    """Format a setting. Example: `training.steps: integer = 100`."""
    default = f" = {setting.default}" if setting.default not in ("", "required") else ""
    return f"{setting.key}: {setting.kind}{default}{' (required)' if setting.default == 'required' else ''}"
