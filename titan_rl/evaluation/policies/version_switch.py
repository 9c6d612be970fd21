"""One engine for many versions of a policy: requests for a version wait until its weights are loaded.

    FIFO by version: a request for the loaded version runs at once, unless another version waits. Once no request runs,
    the version that has waited longest is loaded, and all requests for it begin.

So no version starves, and a version is loaded once for all waiting requests. Whatever the number of versions, only the
memory of the engine is needed, and that of one more version while it is being loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from titan_rl.core.errors import GenerationError
from titan_rl.generation.continuation import RequestFn
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.training.settings import ModelConfig
from titan_rl.types import Completion


class Loader(Protocol):
    """Loader of weights into the generators."""

    async def load(self, model: ModelConfig) -> None:
        """Load the weights of a model's folder.

        Raises:
            StateDictError: The weights cannot be read or loaded. The generators may then have any weights.
        """
        ...


class VersionSwitch:
    """Switch that runs each request when the engine has the weights of its version; see the module's docstring.

    Args:
        stream: Streaming generation of the engine.
        base: Model with which the engine starts. Its version has no name.
        versions: Folder with a Hugging Face folder for each other version.
    """

    def __init__(self, stream: RequestFn, loader: Loader, base: ModelConfig, versions: Path) -> None:
        self._stream = stream
        self._loader = loader
        self._base = base
        self._versions = versions
        self._loaded: str | None = ""  # "" is the base; None after a failure
        self._running = 0
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # by version, the longest-waiting first
        self._loading: asyncio.Task[None] | None = None

    def names(self) -> Sequence[str]:
        """Names of the folders of all versions."""
        return sorted(path.parent.name for path in self._versions.glob("*/config.json"))

    def version_of(self, name: str) -> int | None:
        """Return None, because folders have no version numbers."""
        return None

    def stream_of(self, name: str | None) -> RequestFn | None:
        """Return the streaming generation of a version; None if there is no version of this name."""
        if name is None:
            return partial(self._generate, "")
        known = "/" not in name and name not in ("", ".", "..") and (self._versions / name / "config.json").is_file()
        return partial(self._generate, name) if known else None

    async def _generate(self, name: str, request: EngineRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Generate with the weights of a version.

        Raises:
            GenerationError: The weights cannot be loaded.
        """
        if self._loaded != name or self._waiting or self._loading is not None:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(name, []).append(turn)
            self._load_next()
            try:
                await turn  # counts as running from here on
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._ended()
                raise
        else:
            self._running += 1
        try:
            return await self._stream(request, on_chunk)
        finally:
            self._ended()

    def _ended(self) -> None:
        self._running -= 1
        self._load_next()

    def _load_next(self) -> None:
        """Load the version that has waited longest, if no request runs."""
        if self._running == 0 and self._waiting and self._loading is None:
            self._loading = asyncio.create_task(self._load(next(iter(self._waiting))), name="load a version")

    async def _load(self, name: str) -> None:
        error: Exception | None = None
        try:
            if self._loaded != name:
                self._loaded = None
                path = str(self._versions / name) if name else self._base.path
                await self._loader.load(self._base.model_copy(update={"path": path}))
                self._loaded = name
        except Exception as failed:
            error = failed
        finally:
            self._loading = None
        for turn in self._waiting.pop(name, ()):
            if turn.done():  # cancelled
                continue
            if error is None:
                self._running += 1
                turn.set_result(None)
            else:
                turn.set_exception(GenerationError(f"version {name or 'of the start'} cannot be loaded: {error}"))
        self._load_next()
