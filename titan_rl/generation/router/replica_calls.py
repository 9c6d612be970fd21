"""Every call that the router makes to a replica."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from titan_rl.core.calls.bounded import bounded
from titan_rl.core.errors import GenerationError, StateDictError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.replica import Replica, StreamingReplica
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion

T = TypeVar("T")


class ReplicaCalls:
    """A replica whose calls fail by an `Exception` if they fail, and end soon after they are cancelled.

    Each call but `generate` is a task of its own: one that is slow to end, once it is cancelled, is left behind.

    Args:
        cancel_s: a cancelled call has so long to end.

    Raises:
        StrayCancellationError: by any call that was cancelled, though nobody had asked for that.
        GenerationError: by any call, for what is no `Exception`, as a panic of native code.
        Exception: whatever the replica fails with.
    """

    def __init__(self, replica: Replica, cancel_s: float) -> None:
        self._replica = replica
        self._cancel_s = cancel_s
        self._streaming = replica if isinstance(replica, StreamingReplica) else None

    @property
    def streams(self) -> bool:
        """`generate` calls its `on_chunk`."""
        return self._streaming is not None

    async def generate(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        """By `stream` where the replica has it; else `on_chunk` is never called. In the caller's task, which sees to
        its end: see `Waiter.within`."""
        if self._streaming is None:
            return await request.sent_to(self._replica.generate)
        return await self._streaming.stream(request, on_chunk)

    async def pull(self, version: int) -> int:
        """The version that the replica has then: this or a newer one.

        Raises:
            StateDictError: it has an older one.
        """
        loaded = await self._call(self._replica.pull(version), f"the pull of version {version}")
        if loaded is None:
            return version
        if loaded < version:
            raise StateDictError(f"replica {self._replica.name} was to pull version {version} and has version {loaded}")
        return loaded

    async def pause(self, mode: PauseMode) -> None:
        await self._call(self._replica.pause(mode), "a pause")

    async def resume(self) -> None:
        await self._call(self._replica.resume(), "a resume")

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call(self._replica.abort(request_ids), "an abort")

    async def close(self) -> None:
        await self._call(self._replica.close(), "a close")

    async def _call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        what = f"{what} on replica {self._replica.name}"
        return await bounded(work, None, what, cleanup_s=self._cancel_s, error_type=GenerationError)
