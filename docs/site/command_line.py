"""Reference of the command line in Markdown: the output of `titan-rl COMMAND --help` without the settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from titan_rl.cli.main import command_line


def markdown() -> str:
    return "\n".join(line for name, parser, about in commands() for line in _command(name, parser, about))


def commands() -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Each command with its parser and its one-line description."""
    (group,) = [action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)]
    about = {action.dest: action.help or "" for action in group._choices_actions}
    for name, parser in group.choices.items():
        yield name, parser, about[name]


def _command(name: str, parser: argparse.ArgumentParser, about: str) -> Iterator[str]:
    yield f"\n## titan-rl {name}\n\n{(parser.description or about) % {'prog': parser.prog}}\n"
    yield f"```text\n{parser.format_usage().removeprefix('usage: ').strip()}\n```\n"
    actions = [action for action in parser._actions if action.dest not in ("help", "overrides")]
    if actions:
        yield "| argument | |\n|---|---|"
    for action in actions:
        value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
        shown = ", ".join(action.option_strings) or str(value)
        takes = f" {value}" if action.option_strings and action.nargs != 0 and value else ""
        yield f"| `{_cell(shown + takes)}` | {_cell((action.help or '') % vars(action))} |"
    if any(action.dest == "overrides" for action in parser._actions):
        yield "\nEvery [setting](settings.md) is an option, too: `--table.setting value`."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
