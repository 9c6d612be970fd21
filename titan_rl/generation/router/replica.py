"""What the router knows of one generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.types import GaugeSummary, PauseMode
from titan_rl.types import Completion, SamplingParams


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
        """As `generate`, which the router then does not call. The completion holds all tokens, streamed or not."""
        ...


@runtime_checkable
class GaugedReplica(Replica, Protocol):
    """A replica that knows what its engine says of itself."""

    @property
    def gauges(self) -> GaugeSummary | None:
        """Of the engine's steps between its last two pulls, or up to the first. None before that."""
        ...
