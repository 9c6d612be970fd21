"""Replica in memory: generates one token every `step_s` seconds, can be stopped anywhere, and fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from titan_rl.core.errors import RequestError
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan


class FakeReplica:
    """Replica whose tokens are 0, 1, 2, ... up to `max_tokens`, each with the version that was loaded at the time."""

    def __init__(self, name: str, *, step_s: float = 1.0, version: int = 0) -> None:
        self.name = name
        self.step_s = step_s
        self.version = version
        self.served: list[str] = []  # request ids, in order of arrival
        self.calls: list[str] = []  # "pull 3", "pause keep", "resume", "abort", "close"
        self.aborts: list[list[str]] = []
        self.running: dict[str, asyncio.Event] = {}  # setting the event aborts the request
        self.generate_error: Exception | None = None
        self.pull_error: Exception | None = None
        self.pull_s = 0.0
        self.pause_hangs = False
        self.deaf_s = 0.0  # seconds after its arrival during which a request ignores aborts
        self.ignores_aborts = False
        self._going = asyncio.Event()
        self._going.set()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        if not prompt_token_ids:
            raise RequestError("empty prompt")
        assert request_id not in self.running, "duplicate id"
        self.served.append(request_id)
        if self.generate_error is not None:
            raise self.generate_error
        if self.deaf_s:
            await asyncio.sleep(self.deaf_s)
        aborted = self.running[request_id] = asyncio.Event()
        versions: list[int] = []
        try:
            while len(versions) < sampling.max_tokens and not aborted.is_set():
                stepped = asyncio.create_task(self._step())
                stopped = asyncio.create_task(aborted.wait())
                try:
                    await asyncio.wait([stepped, stopped], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    done = stepped.done()
                    stepped.cancel()
                    stopped.cancel()
                if self.generate_error is not None:
                    raise self.generate_error
                if done:
                    versions.append(self.version)
        finally:
            del self.running[request_id]
        spans = tuple(VersionSpan(version, versions.count(version)) for version in dict.fromkeys(versions))
        reason = FinishReason.LENGTH if len(versions) == sampling.max_tokens else FinishReason.ABORT
        return Completion(request_id, list(range(len(versions))), [0.0] * len(versions), reason, spans)

    async def pull(self, version: int) -> None:
        self.calls.append(f"pull {version}")
        await asyncio.sleep(self.pull_s)
        if self.pull_error is not None:
            raise self.pull_error
        self.version = version

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        if self.pause_hangs:
            await asyncio.Event().wait()
        self._going.clear()

    async def resume(self) -> None:
        self.calls.append("resume")
        self._going.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.calls.append("abort")
        self.aborts.append(list(request_ids))
        if not self.ignores_aborts:
            for request_id in request_ids:
                if request_id in self.running:
                    self.running[request_id].set()

    async def close(self) -> None:
        self.calls.append("close")

    async def _step(self) -> None:
        await asyncio.sleep(self.step_s)
        await self._going.wait()
