"""Contract of a replica with the router, and the router's bounded calls to it."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, runtime_checkable

from titan_rl.core.calls.bounded import bounded
from titan_rl.core.errors import GenerationError, StateDictError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.types import GaugeSummary, PauseMode
from titan_rl.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds.

    Raises:
        ValueError: names the field that is not positive.
    """

    no_replica_s: float = 300.0  # a request waits for enough replicas in service, or a pull for one
    paused_s: float = 3600.0  # a request waits for `resume`
    pull_s: float = 120.0  # one replica loads one version
    drain_s: float = 300.0  # a replica's requests finish before a pull; what is left is aborted
    finish_s: float = 300.0  # pause("wait"): requests finish; what is left is aborted
    abort_s: float = 30.0  # aborted requests return; what is left is cancelled
    reabort_interval_s: float = 2.0  # an abort is repeated for requests that reached their engine after it
    cancel_s: float = 5.0  # cancelled calls and tasks end; what is left is logged and let go
    call_s: float = 10.0  # one pause, resume, abort or close call to a replica
    blame_s: float = 2.0  # replicas that failed a request go on to serve others, if it is the request's fault
    quarantine_s: float = 1.0  # before a failed replica is tried again; doubles with each failure in a row
    max_quarantine_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"Limits.{field.name} is {getattr(self, field.name)!r}; it must be above 0")


@runtime_checkable
class Replica(Protocol):
    """A handle of one generator: an actor, an HTTP client, an engine loop in this process.

    The router does not know how weights travel: `pull` takes a version, and the handle finds its manifest.
    A `RequestError` is the fault of the request; any other exception, a cancellation that nobody asked for, and any
    call past its time limit, is the fault of the replica, which is then out of service until it has pulled the current
    version again. What several replicas fail a request with that go on to serve others is its own fault after all.

    A replica is heard of by its answers, and by what it streams if it does. One that has requests and is not heard of
    for the router's `stall_timeout_s` has failed, so a replica that does not stream has to answer one in that time.

    Every call but `generate` is idempotent, because the router repeats one whose answer was lost.
    A cancelled `generate` may go on inside the generator; the router follows it with `abort`.
    """

    @property
    def name(self) -> str:
        """Unique among the replicas of a router."""
        ...

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        """Continue the prompt. An aborted request returns what it has, with `FinishReason.ABORT`.

        Raises:
            RequestError: this request can never succeed.
            GenerationError: the generator failed; another may succeed.
        """
        ...

    async def pull(self, version: int) -> int | None:
        """Load the weights of `version`, with requests running or not. Loaded weights never go back: a replica that has
        newer ones, because a pull that was given up on came through, keeps them.

        Returns:
            The version that it has then. None says that it is the one asked for.

        Raises:
            UnavailableWeightsError: they cannot be had. Those that were loaded are as before, and go on serving.
            StateDictError: they are not right. Nobody knows which are loaded, and requests fail until a pull succeeds.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. For "abort" and "wait" the router calls this once nothing of its own is running."""
        ...

    async def resume(self) -> None:
        """Go on generating, frozen requests included."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with the tokens they have. Unknown and finished ids are ignored."""
        ...

    async def close(self) -> None:
        """Give everything back; running requests fail."""
        ...


@runtime_checkable
class StreamingReplica(Replica, Protocol):
    """A replica that streams tokens ahead of the completion. Should it die, the router goes on from those.

    While requests wait and no token comes of any, as in prefills of long prompts, it sends a chunk without tokens now
    and then, if and only if its engine steps: that is how the router knows a busy engine from one that hangs.
    """

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        """Continue the prompt like `generate`, which the router then does not call. The completion holds all tokens,
        streamed or not."""
        ...


@runtime_checkable
class GaugedReplica(Replica, Protocol):
    """A replica that knows what its engine says of itself."""

    @property
    def gauges(self) -> GaugeSummary | None:
        """Gauges of the engine's steps between its last two pulls, or up to the first. None before that."""
        ...


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
