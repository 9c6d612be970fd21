"""Settings that correspond to the names of settings in other libraries, read from peer_settings.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """Setting that has another name in other libraries.

    Args:
        setting: Setting of titan_rl; empty if there is none.
        note: How to convert the value, if it has another unit or form.
    """

    setting: str
    note: str

    @property
    def advice(self) -> str:
        """Advice for the end of an error message."""
        if not self.setting:
            return self.note
        return f"nearest: {self.setting}{f', {self.note}' if self.note else ''}"


@cache
def peer_settings() -> dict[str, PeerSetting]:
    """Return the settings by each of their names in other libraries."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["settings"]
    return {name: PeerSetting(row.get("setting", ""), row.get("note", "")) for row in rows for name in row["names"]}


def peer_setting(key: str, valid: list[str]) -> PeerSetting | None:
    """Find the setting that a dotted name in another library stands for, by the longest known last part of the name.

    Args:
        valid: Names of the settings that may be given. The last parts of one are enough: `adapters.a.training.lr`
            counts as `training.lr`.
    """
    parts = key.replace("-", "_").split(".")
    names = (".".join(parts[start:]) for start in range(len(parts)))
    found = next((peer_settings()[name] for name in names if name in peer_settings()), None)
    if found is None or not found.setting:
        return found
    named = next((name for name in valid if f".{name}".endswith(f".{found.setting}")), None)
    return PeerSetting(named, found.note) if named else None
