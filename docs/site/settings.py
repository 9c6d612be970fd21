"""Reference of every setting of a run in Markdown."""

from __future__ import annotations

import re

from titan_rl.config.settings_reference import SettingEntry, TableEntry, tables


def markdown() -> str:
    return "\n".join(map(_table, tables()))


def _table(table: TableEntry) -> str:
    title = f"`{table.title}`" if table.title else "Of the run"
    rows = "\n".join(map(_row, table.settings))
    return f"\n## {title}\n\n{table.about}\n\n| setting | type | default | |\n|---|---|---|---|\n{rows}"


def _row(setting: SettingEntry) -> str:
    default = f"`{setting.default}`" if setting.default not in ("", "required") else setting.default
    kind = re.sub(r'"\w+"', r"`\g<0>`", setting.kind)
    return f"| `{setting.key}` | {_cell(kind)} | {default} | {_cell(setting.about)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
