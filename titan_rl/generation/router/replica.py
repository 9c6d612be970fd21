"""Interface of a replica, and wrappers of the router's calls to replicas, of its users' calls and background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, runtime_checkable

from titan_rl.core.calls.bounded import bounded
from titan_rl.core.calls.cancellation import cancel_requested
from titan_rl.core.errors import EngineDeadError, GenerationError, StateDictError, StrayCancellationError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.types import GaugeSummary, PauseMode
from titan_rl.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds.

    Raises:
        ValueError: names the field that is not positive.
    """

    no_replica_s: float = 300.0  # a request waits for enough replicas in service, or a pull for one replica
    paused_s: float = 3600.0  # a request waits for `resume`
    pull_s: float = 120.0  # one replica loads one version
    drain_s: float = 300.0  # a replica's requests finish before a pull; the rest is aborted
    finish_s: float = 300.0  # pause("wait"): requests finish; the rest is aborted
    abort_s: float = 30.0  # aborted requests return; the rest is cancelled
    reabort_interval_s: float = 2.0  # pause before an abort is repeated for requests that reached their engine after it
    cancel_s: float = 5.0  # cancelled calls and tasks end; the rest is logged and abandoned
    call_s: float = 10.0  # one pause, resume, abort or close call to a replica
    shard_s: float = 60.0  # a shard acknowledges a message, not counting the time for carrying it out
    share_s: float = 0.25  # interval between two exchanges of the load of shards
    blame_s: float = 2.0  # replicas that failed a request serve others in this time if the request is at fault
    quarantine_s: float = 1.0  # pause before a failed replica is tried again; doubles with each failure in a row
    max_quarantine_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"Limits.{field.name} is {getattr(self, field.name)!r}; it must be above 0")


@runtime_checkable
class Replica(Protocol):
    """Handle of one generator, such as an actor, an HTTP client, or an engine loop in this process. A replica also has
    `generate` (see `GeneratingReplica`) or `stream` (see `StreamingReplica`).

    The router does not know how weights travel: `pull` takes a version, and the handle finds its manifest.

    A `RequestError` is the request's fault. Any other exception, a cancellation that nobody requested, and any call
    past its time limit are the replica's fault: it is out of service until it has pulled the current version again. If
    several replicas fail a request in the same way and continue to serve others, the request is at fault after all.

    A replica's signs of life are its answers and its chunks. A replica that has requests but gives no sign of life for
    the router's `stall_timeout_s` has failed, so a replica that does not stream must answer a request in that time.

    Every call but `generate` and `stream` is idempotent, because the router repeats one whose answer was lost.
    A cancelled request may continue inside the generator; the router follows it with `abort`.
    """

    @property
    def name(self) -> str:
        """Name of the replica, unique in a router."""
        ...

    async def pull(self, version: int) -> int | None:
        """Load the weights of `version`, with requests running or not. Loaded weights never go back: a replica keeps
        newer weights, which it has if an earlier pull ended after the router had abandoned it.

        Returns:
            Version that is loaded afterwards. None stands for `version`.

        Raises:
            UnavailableWeightsError: the weights cannot be read. The loaded ones are untouched and stay in service.
            StateDictError: the weights are wrong. The loaded weights are unknown, and requests fail until a pull
                succeeds.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. For "abort" and "wait" the router calls this when none of its requests is running."""
        ...

    async def resume(self) -> None:
        """Continue to generate, frozen requests included."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with the tokens they have. Unknown and finished ids are ignored."""
        ...

    async def close(self) -> None:
        """Release everything; running requests fail."""
        ...


@runtime_checkable
class GeneratingReplica(Replica, Protocol):
    """A replica that returns each completion as a whole."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        """Continue the prompt. An aborted request returns the tokens it has, with `FinishReason.ABORT`.

        Raises:
            RequestError: this request can never succeed.
            GenerationError: the generator failed; another generator may succeed.
        """
        ...


@runtime_checkable
class StreamingReplica(Replica, Protocol):
    """A replica that streams tokens ahead of the completion. If it dies, the router continues from these tokens.

    While requests wait without tokens, as during prefills of long prompts, it sends an empty chunk now and then, but
    only if its engine steps. This distinguishes a busy engine from a hanging one.
    """

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        """Continue the prompt like `GeneratingReplica.generate`, which is then not called. The completion holds all
        tokens, streamed or not."""
        ...


@runtime_checkable
class GaugedReplica(Replica, Protocol):
    """A replica that knows the gauges of its engine."""

    @property
    def gauges(self) -> GaugeSummary | None:
        """Gauges of the engine's steps between its last two pulls, or before its first pull. None until then."""
        ...


T = TypeVar("T")


class ReplicaCalls:
    """Wrapper of a replica: calls fail only with an `Exception`, and end soon after they are cancelled. Each call
    except `generate` runs in its own task, which is abandoned if it does not end after its cancellation.

    Args:
        cancel_s: Time for a cancelled call to end.

    Raises:
        StrayCancellationError: a call was cancelled although nobody requested it.
        GenerationError: a call raised a `BaseException` that is not an `Exception`, such as a panic of native code.
        Exception: raised by the replica.
    """

    def __init__(self, replica: Replica, cancel_s: float) -> None:
        self._replica: Any = replica
        self._cancel_s = cancel_s
        self.streams = isinstance(replica, StreamingReplica)

    async def generate(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        """Answer a request, with `stream` if the replica has it; otherwise `on_chunk` is never called. Runs in the
        caller's task, which limits its time; see `Waiter.within`."""
        if self.streams:
            return await self._replica.stream(request, on_chunk)
        return await request.sent_to(self._replica.generate)

    async def pull(self, version: int) -> int:
        """Pull a version. Returns the version that the replica has afterwards: this one or a newer one.

        Raises:
            StateDictError: the replica has an older version afterwards.
        """
        loaded = await self._call(self._replica.pull(version), f"the pull of version {version}")
        if loaded is None:
            return version
        if loaded < version:
            raise StateDictError(
                f"replica {self._replica.name} was asked to pull version {version}, but has version {loaded}"
            )
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


logger = logging.getLogger(__name__)


class OpenCalls:
    """Calls of a router's users in progress, requests included. `end` fails them and all later ones.

    Attributes:
        ended: Argument of `end`; None while the router is open.
    """

    def __init__(self) -> None:
        self.ended: EngineDeadError | None = None
        self._scopes: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[None]:
        """Context of one call.

        Raises:
            EngineDeadError: `end` was called before the block or within it; this is its argument.
        """
        if self.ended is not None:
            raise self.ended
        async with asyncio.timeout(None) as scope:
            self._scopes.add(scope)
            try:
                yield
            except asyncio.CancelledError:
                if scope.expired() and self.ended is not None:
                    raise self.ended from None
                raise
            finally:
                self._scopes.discard(scope)

    def end(self, reason: EngineDeadError) -> None:
        """Fail all calls with `reason`. Further calls of `end` do nothing."""
        if self.ended is None:
            self.ended = reason
            for scope in self._scopes:
                scope.reschedule(asyncio.get_running_loop().time())


class BackgroundTasks:
    """Tasks that run until they are done or the set is closed. An exception in one fails all calls of the router."""

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `coroutine`. After `close` it is cancelled before it starts."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        if self._closed:
            task.cancel()
            return task
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, timeout_s: float) -> None:
        """Cancel all tasks and wait for at most `timeout_s` seconds until they have ended. Remaining ones are
        logged."""
        self._closed = True
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        _, left = await asyncio.wait(self._tasks, timeout=timeout_s)
        if left:
            names = [task.get_name() for task in left]
            logger.warning("abandoned %d tasks after %g s: %s", len(left), timeout_s, names)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
        elif not cancel_requested(task):
            error = StrayCancellationError(f"{task.get_name()!r} was cancelled, although nobody requested it")
        else:
            return
        if error is not None:
            logger.error("the router failed", exc_info=error)
            reason = EngineDeadError(f"the router failed: {error!r}")
            reason.__cause__ = error
            self._calls.end(reason)
