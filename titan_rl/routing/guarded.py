"""Every call that the router makes to a replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from titan_rl.cancellation import stray_cancellation_fails
from titan_rl.errors import StateDictError
from titan_rl.generation.types import OnTokens, PauseMode
from titan_rl.routing.replica import Replica, StreamingReplica
from titan_rl.types import Completion, SamplingParams


class GuardedReplica:
    """A replica whose calls fail by an `Exception` if they fail: a cancellation that nobody asked for is one.

    Raises:
        StrayCancellationError: by any call, for such a cancellation.
        Exception: whatever the replica fails with.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._streaming = replica if isinstance(replica, StreamingReplica) else None

    @property
    def streams(self) -> bool:
        """`generate` calls its `on_tokens`."""
        return self._streaming is not None

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None,
        sampling: SamplingParams,
        on_tokens: OnTokens,
    ) -> Completion:
        """By `stream` where the replica has it; else `on_tokens` is never called."""
        with self._guard(f"request {request_id!r}"):
            if self._streaming is None:
                return await self._replica.generate(
                    prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
                )
            return await self._streaming.stream(
                prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling, on_tokens=on_tokens
            )

    async def pull(self, version: int) -> int:
        """The version that the replica has then: this or a newer one.

        Raises:
            StateDictError: it has an older one.
        """
        with self._guard(f"the pull of version {version}"):
            loaded = await self._replica.pull(version)
        if loaded is None:
            return version
        if loaded < version:
            raise StateDictError(f"replica {self._replica.name} was to pull version {version} and has version {loaded}")
        return loaded

    async def pause(self, mode: PauseMode) -> None:
        with self._guard("a pause"):
            await self._replica.pause(mode)

    async def resume(self) -> None:
        with self._guard("a resume"):
            await self._replica.resume()

    async def abort(self, request_ids: Sequence[str]) -> None:
        with self._guard("an abort"):
            await self._replica.abort(request_ids)

    async def close(self) -> None:
        with self._guard("a close"):
            await self._replica.close()

    def _guard(self, what: str) -> AbstractContextManager[None]:
        return stray_cancellation_fails(f"{what} on replica {self._replica.name}")
