"""Server of a run's policy that loads newer versions as they appear."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from titan_rl.config.model_files import check_weights
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import reason
from titan_rl.core.console import Console
from titan_rl.core.errors import TitanRLError
from titan_rl.evaluation.policies.policy_export import export_weights
from titan_rl.evaluation.policies.policy_source import PolicySource, newest_checkpoint
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.training.choices import DType
from titan_rl.training.settings import ModelConfig
from titan_rl.weights.types import Manifest, PublishedWeights, StateDictTransport

logger = logging.getLogger(__name__)

MAX_WAIT_S = 3600.0
"""Longest wait before a checkpoint that could not be served is tried again, in seconds."""


class Publisher(Protocol):
    """Publisher of checkpoints for generators."""

    async def publish(self, source: PolicySource) -> None:
        """Make a checkpoint available to generators.

        Raises:
            TitanRLError: The checkpoint cannot be read, or there is no room for it. No part of it is available then.
        """
        ...

    def keep_only(self, version: int) -> None:
        """Release the memory of other versions, which no generator will pull any more."""
        ...


@dataclass(slots=True)
class CheckpointPublisher:
    """Publisher that publishes checkpoints as the trainer publishes its versions, with checksums, so that generators
    can verify what they have loaded.

    Args:
        model: Settings of the run's model.
        transport: Transport to the generators. The caller closes it.
        published: Manifests of published versions, in which the generators find them.
        log: File for the output of the process that reads a checkpoint.
    """

    model: ModelConfig
    transport: StateDictTransport
    published: PublishedWeights
    log: Path
    _available: tuple[int, ...] = ()

    async def publish(self, source: PolicySource) -> None:
        """Read a checkpoint in a separate process, which verifies every byte, and publish its weights."""
        assert source.checkpoint is not None
        folder = Path(tempfile.mkdtemp(prefix="policy-"))
        try:
            model = await export_weights(self.model, source.checkpoint, folder / "policy", self.log)
            self.transport.release(source.version)  # left by an attempt that failed after publishing
            manifest = await in_thread(publish_folder, self.transport, Path(model.path), model.dtype, source.version)
        finally:
            await in_thread(shutil.rmtree, folder, ignore_errors=True)
        self._available = (*self._available, source.version)
        self.published.announce(manifest)

    def keep_only(self, version: int) -> None:
        """Release other versions; see `Publisher`."""
        for older in self._available:
            if older != version:
                self.transport.release(older)
        self._available = tuple(each for each in self._available if each == version)


def publish_folder(transport: StateDictTransport, folder: Path, dtype: DType, version: int) -> Manifest:
    """Publish the weights of a Hugging Face folder, with their checksums, as the trainer publishes its versions.

    Raises:
        StateDictError: There is no room for the weights.
        ModelError: A file is missing or damaged.
    """
    import torch
    from safetensors import safe_open

    from titan_rl.weights.verification import with_checksums

    check_weights(folder)
    named: list[tuple[str, torch.Tensor]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # the file is not a mapping
            named += [(name, file.get_tensor(name).to(getattr(torch, dtype))) for name in names]
    return with_checksums(transport.publish(version, named), named)


@dataclass(eq=False, slots=True)
class RunFollower:
    """Follower of a run that loads newer checkpoints into the generators of a server while requests continue.

    If several checkpoints appear while one is being loaded, only the newest of them is loaded next. A checkpoint that
    the run has deleted is skipped. If a checkpoint cannot be served, this is reported, and the previous one is served
    further. It is tried again after `every_s`, then after twice that time, and so on; a newer checkpoint is tried at
    once.

    Args:
        run: Folder of the run, which may or may not be training.
        name: Name of the run in messages.
        version: Current version of the generators.
        every_s: Seconds between checks of the folder.
        console: Console for messages about checkpoints that are served or cannot be served.
    """

    run: Path
    name: str
    publisher: Publisher
    router: GeneratorRouter
    version: int
    every_s: float
    console: Console
    _published: int = field(init=False)
    _failed: int = field(init=False)  # version of the newest checkpoint that could not be served
    _wait_s: float = 0.0  # seconds until that checkpoint is tried again
    _again_at: float = 0.0

    def __post_init__(self) -> None:
        self._published = self._failed = self.version

    async def follow(self) -> None:
        """Look for newer checkpoints until this is cancelled."""
        while True:
            await asyncio.sleep(self.every_s)
            await self.look()

    async def look(self) -> None:
        """Serve the newest checkpoint, if it is newer than the served one."""
        clock = asyncio.get_running_loop().time
        try:
            source = await in_thread(newest_checkpoint, self.run)
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.run, error)
            return
        if source is None or source.version <= self.version:
            return
        if source.version == self._failed and clock() < self._again_at:
            return
        source = replace(source, name=f"step {source.version} of {self.name}")
        try:
            await self._serve(source)
        except Exception as error:
            assert source.checkpoint is not None
            if not await in_thread(source.checkpoint.exists):
                logger.info("%s was deleted while it was read; there is a newer one", source.name)
                return
            if not isinstance(error, TitanRLError):
                logger.exception("%s cannot be served", source.name)
            self._wait_s = min(self._wait_s * 2, MAX_WAIT_S) if source.version == self._failed else self.every_s
            self._failed, self._again_at = source.version, clock() + self._wait_s
            instead = self.router.trouble() or f"version {self.version} is still served"
            self.console.warning(
                f"{source.name} cannot be served: {reason(error)}; {instead}; retrying in {self._wait_s:g} s"
            )

    async def _serve(self, source: PolicySource) -> None:
        if self._published < source.version:
            await self.publisher.publish(source)
            self._published = source.version
        report = await self.router.pull_state_dict(source.version)
        self.version = source.version
        self.publisher.keep_only(source.version)
        late = f", but by {', '.join(sorted(report.failed))}, which try again" if report.failed else ""
        self.console.message(f"{source.name} is served{late}")
