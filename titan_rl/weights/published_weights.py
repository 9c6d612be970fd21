"""Where the controller notes what was published, and readers what they pulled. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from titan_rl.core.errors import StateDictError, UnavailableWeightsError
from titan_rl.weights.types import Manifest


class PublishedWeights:
    """The newest manifest, and what each reader measured when it last pulled.

    Example:

        published.announce(manifest)                      # version 7
        published.manifest_of(7)                          # found by the replica that is told to pull version 7
        published.note_pull("generator-0", {"stall_s": 0.02, "probe_diff": 3e-7})
        published.worst()                                 # {"stall_s": 0.02, "probe_diff": 3e-7}
    """

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._figures: dict[str, Mapping[str, float]] = {}

    def announce(self, manifest: Manifest) -> None:
        """A version is published, and the one before is not to be pulled any more.

        Raises:
            StateDictError: it is older than one that was announced. Versions never go back.
        """
        if self._manifest is not None and manifest.version < self._manifest.version:
            raise StateDictError(
                f"version {manifest.version} is published after version {self._manifest.version}; they never go back"
            )
        self._manifest = manifest

    def manifest_of(self, version: int) -> Manifest:
        """The manifest of a version that is still to be had.

        Raises:
            UnavailableWeightsError: the version is not the newest.
        """
        if self._manifest is None or self._manifest.version != version:
            newest = "none" if self._manifest is None else self._manifest.version
            raise UnavailableWeightsError(f"version {version} is not published; the newest is {newest}")
        return self._manifest

    def note_pull(self, reader: str, figures: Mapping[str, float]) -> None:
        self._figures[reader] = figures

    def worst(self) -> dict[str, float]:
        """The largest value of each figure over the readers."""
        names = {name for figures in self._figures.values() for name in figures}
        return {name: max(f[name] for f in self._figures.values() if name in f) for name in sorted(names)}
