"""Simulated disk that loses data that was not flushed."""

from __future__ import annotations

import os
from pathlib import Path


class Disk:
    """Files below a folder as a power loss leaves them: each with its content at the last fsync, and only if its folder
    was fsynced after the file was created."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self._root = root
        self._flushed: dict[Path, bytes] = {}
        self._entries: set[Path] = set()
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)

    def _note(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self._entries.update(path.iterdir())
        else:
            self._flushed[path] = path.read_bytes()

    def left_in(self, folder: Path) -> Path:
        """Write the surviving files to a new folder and return it."""
        folder.mkdir()
        for path, content in self._flushed.items():
            if path in self._entries and path.is_relative_to(self._root):
                (folder / path.relative_to(self._root)).write_bytes(content)
        return folder
