"""Fixture of two real generators behind a router, which tests pause, update and kill."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from titan_rl.cluster.run_processes import RunProcesses
from titan_rl.generation.router import GeneratorRouter
from titan_rl.run.directory import RunDirectory
from titan_rl.training.data.sample import TrainingSample
from titan_rl.types import Completion, GenerateFn, SamplingParams
from titan_rl.weights.types import PublishedWeights

LENGTH = 200
SAMPLING = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, temperature=1.0)
LIMIT_S = 480


class Stage:
    """Two real generators, with at most two running requests each, and the trainer whose weights they serve."""

    def __init__(
        self, processes: RunProcesses, published: PublishedWeights, router: GeneratorRouter, run_dir: RunDirectory
    ) -> None:
        self.processes, self.published, self.router, self.run_dir = processes, published, router, run_dir
        self.version = 0
        processes.router = router
        self.watch = asyncio.ensure_future(processes.watch())
        self._names = iter(range(10_000))

    def ask(self, count: int, generate: GenerateFn | None = None) -> list[asyncio.Future[Completion]]:
        generate = generate or self.router.generate
        return [
            asyncio.ensure_future(generate([5, 6, 7, n], request_id=f"r{next(self._names)}", sampling=SAMPLING))
            for n in range(count)
        ]

    async def running(self, requests: Sequence[asyncio.Future[Any]], tokens: int = 8) -> None:
        """Wait until one of the requests has streamed that many tokens."""
        async with asyncio.timeout(LIMIT_S):
            while max((len(c.token_ids) for c in self.router.tokens_so_far().values()), default=0) < tokens:
                await asyncio.wait(requests, timeout=0.001)

    async def all_running(self, requests: asyncio.Future[Any]) -> None:
        """Wait until each request in flight has streamed a token, so that every generator has some to lose."""
        async with asyncio.timeout(LIMIT_S):
            while not (so_far := self.router.tokens_so_far().values()) or not all(c.token_ids for c in so_far):
                await asyncio.wait([requests], timeout=0.001)

    async def step(self) -> None:
        tokens, mask = [5, 6, 7, 8, 9, 10], [False, False, True, True, True, True]
        values = [0.0, 0.0, -1.0, -1.0, -1.0, -1.0]
        versions = [-1, -1, 0, 0, 0, 0]
        sample = TrainingSample("g", "g/0", tokens, mask, values, values, versions, temperature=1.0)
        await self.processes.training.trainer.step([sample])

    async def publish(self, mode: str = "hot_swap", host: str | None = None) -> int:
        """Publish the trainer's weights, have all generators pull them, and return their version.

        Args:
            host: Host name to announce as the owner of the weights' memory.
        """
        await self.processes.training.trainer.begin_publish()
        manifest = await self.processes.training.trainer.finish_publish()
        if host is not None:
            manifest = replace(manifest, shards=tuple(replace(shard, host=host) for shard in manifest.shards))
        self.published.announce(manifest)
        await self.router.pull_state_dict(manifest.version, mode)  # pyright: ignore[reportArgumentType]
        self.version = manifest.version
        return manifest.version

    async def until_both_serve(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while [replica.serving for replica in self.router.replicas] != [True, True]:
                await asyncio.wait([self.watch], timeout=0.2)
                assert not self.watch.done()
        assert [replica.version for replica in self.router.replicas] == [self.version] * 2

    async def swap_the_same_until(self, done: asyncio.Future[Any]) -> None:
        """Announce and pull the same weights under increasing versions, ten times a second."""
        manifest = self.published.manifest_of(self.version)
        while not done.done():
            self.version += 1
            self.published.announce(replace(manifest, version=self.version))
            await self.router.pull_state_dict(self.version)
            await asyncio.wait([done], timeout=0.1)
