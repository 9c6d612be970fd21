"""Engine loop: one thread drives an engine; any number of asyncio callers share its batch.

Calls only enqueue and await a future. Between two engine steps the loop decides, in this order:

    CLOSE   resolve everything and end
    WAKE    allocate released memory again, before a pull or after a pause
    PULL    swap weights; running requests wait for it and continue with their KV cache
    ABORT   forget requests, whose callers get the tokens so far
    SLEEP   release memory, in a pause of mode "sleep"
    STEP    let waiting requests join, and advance the batch by a token

Therefore a pull or an abort waits for at most one engine step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from titan_rl.core.calls.threads import in_thread
from titan_rl.core.clock import CLOCK, Clock
from titan_rl.core.errors import RequestError
from titan_rl.core.tensor_checksum import TensorChecksum
from titan_rl.generation.engine import Engine
from titan_rl.generation.loop.calls import Items, PendingCall, PendingPull, Verify
from titan_rl.generation.loop.engine_thread import run_engine
from titan_rl.generation.loop.ranks import EngineRank, Ranks, Stepping
from titan_rl.generation.loop.state import LoopState
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.types import GaugeSummary, KVPolicy, PauseMode, PullResult
from titan_rl.types import Completion, SamplingParams

logger = logging.getLogger(__name__)


class EngineLoop:
    """Continuous batching over one engine, from any number of event loops.

    Example:

        loop = EngineLoop(ScriptedEngine)
        await loop.start()
        completion = await loop.generate([1, 2, 3], request_id="a", sampling=SamplingParams(max_tokens=8))
        await loop.close()

    Args:
        make_engine: Called in the loop's own thread, which alone uses the engine.
        version: Version of the weights that the engine starts with.
        kv_policy: Treatment of the KV cache at a pull.
        stream_interval: Engine steps between two chunks of a request; a step gives a request at most one token.
        routed_experts: Whether the engine returns the experts of each token. If not, requests for them are refused.
        ranks: Link to the other ranks of the replica, each of which runs `follow_leader`. By default there are none.
        stepping: Context manager around each engine step, entered in the loop's thread.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        version: int = 0,
        kv_policy: KVPolicy | None = None,
        stream_interval: int = 16,
        routed_experts: bool = False,
        ranks: Ranks | None = None,
        stepping: Stepping = nullcontext,
        clock: Clock = CLOCK,
    ) -> None:
        self._state = LoopState(version, clock)
        self._routed_experts = routed_experts
        self._thread = threading.Thread(
            target=run_engine,
            args=(EngineRank(make_engine, ranks, kv_policy, stepping), self._state, stream_interval),
            name="engine-loop",
            daemon=True,
        )

    @property
    def version(self) -> int:
        """Newest version that was loaded and verified. It never goes back."""
        return self._state.version_of("")

    def version_of(self, adapter: str) -> int:
        """Newest version of one of several adapters; see `version`."""
        return self._state.version_of(adapter)

    @property
    def num_in_flight(self) -> int:
        """Number of requests accepted and not yet resolved."""
        return self._state.num_in_flight

    @property
    def paused(self) -> PauseMode | None:
        return self._state.paused

    async def start(self) -> None:
        """Make the engine, and return when it serves requests. Awaited once.

        Raises:
            EngineDeadError: the engine could not be made; the error is the cause.
        """
        self._state.require_alive()
        self._thread.start()
        await self._barrier(())
        self._state.require_alive()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        """Continue a prompt, as a `GenerateFn`; see `stream`."""
        return await self.stream(EngineRequest(request_id, prompt_token_ids, sampling, session_id))

    async def stream(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Continue a prompt. Cancelling the caller frees the request.

        Args:
            on_chunk: Called on this event loop every `stream_interval` steps with the tokens since the last call. If
                that takes longer than a second, it is called after a step in between, perhaps without tokens.

        Returns:
            A completion with the metrics queue_s (until the engine first ran the request), time_to_first_token_s,
            inter_token_s (mean), requests_in_flight, and those of the engine, such as cached_prompt_tokens.

        Raises:
            RequestError: this request can never run.
            GenerationError: the loaded weights are unknown because a pull failed and no later one has succeeded yet; or
                the engine abandoned the request, or returned a token without its logprob or requested routed experts.
            EngineDeadError: the loop has ended, or ends before the completion.
        """
        self._require_started()
        if request.sampling.return_routed_experts and not self._routed_experts:
            raise RequestError(
                f"request {request.request_id!r} asks for routed experts, which this run does not return; set "
                "generation.return_routed_experts = true, or sampling.return_routed_experts = False"
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        call = PendingCall(request, future, on_chunk, self._state.clock)
        self._state.submit(call)
        try:
            return await future
        except asyncio.CancelledError:
            self._state.forget(call)
            raise

    async def abort(self, request_ids: Iterable[str] | None = None, *, timeout_s: float = 10.0) -> None:
        """End requests with the tokens they have; None ends all. Unknown and finished ids are ignored.

        Returns when the engine has forgotten them. Their callers get completions that say ABORT.

        Args:
            request_ids: Requests to end.
            timeout_s: Time limit of the engine's present step. After that, callers get their completions regardless.
        """
        self._require_started()
        try:
            async with asyncio.timeout(timeout_s):
                await self._barrier(None if request_ids is None else tuple(request_ids))
        except TimeoutError:
            left = self._state.abandon()
            logger.warning(
                "the engine did not return from its step within %g s; abandoned %d requests", timeout_s, left
            )

    async def pause(self, mode: PauseMode | str, *, timeout_s: float = 30.0) -> None:
        """Stop stepping until `resume`; pulls and aborts are still carried out. Returns when the pause holds, and in
        mode "sleep" when the engine has released its memory. It allocates the memory again at the next pull; resumed
        without one, it fails all requests, because its weights are gone.

        Args:
            timeout_s: Time for requests to finish in mode "wait"; the rest is aborted.

        Raises:
            RuntimeError: the loop is paused already.
            EngineDeadError: the loop has ended, or ends because its engine cannot sleep.
        """
        self._require_started()
        mode = PauseMode(mode)
        late: tuple[str, ...] = ()
        if mode is PauseMode.WAIT:
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._state.pause(mode, drained)
            try:
                async with asyncio.timeout(timeout_s):
                    await drained
            except TimeoutError:
                late = self._state.running_ids
                logger.warning("pause('wait') aborts %d requests after %g s", len(late), timeout_s)
        elif mode is PauseMode.SLEEP:
            asleep: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._state.pause(mode, asleep)
            await self.abort()
            await asleep
            return
        else:
            self._state.pause(mode)
        await self.abort(None if mode.ends_requests else late)

    async def resume(self) -> None:
        """End the pause.

        Raises:
            RuntimeError: the loop is not paused.
            EngineDeadError: the loop has ended.
        """
        self._state.resume()

    async def set_paused(self, mode: PauseMode | None) -> None:
        """Pause in this mode, or resume with None. Idempotent, because a router repeats calls whose answers were lost.

        Raises:
            EngineDeadError: the loop has ended.
        """
        if self.paused == mode:
            return
        if self.paused is not None:
            await self.resume()
        if mode is not None:
            await self.pause(mode)

    async def pull(
        self,
        version: int,
        make_items: Callable[[], Items],
        verify: Verify | None = None,
        *,
        manifest: Any = None,
        published: Mapping[str, TensorChecksum] | None = None,
        adapter: str = "",
        pinned: int | None = None,
    ) -> PullResult:
        """Load weights between two engine steps, also while paused. If several pulls wait, only the newest version is
        loaded. A pull of a version older than the loaded one returns the loaded one.

        The work before the first pair, such as a checksum, is done outside the engine's thread.

        Args:
            make_items: Opens the version: (Hugging Face parameter name, tensor) pairs.
            verify: Checks the loaded engine in its thread, and raises if the weights are wrong.
            manifest: Used by the other ranks to open the version; it can be pickled.
            published: Checksums by Hugging Face name. The weights that a `ReadableEngine` holds are compared with them
                before `verify` is called.
            adapter: Name of one of several adapters. Only its requests get the new weights, or fail.
            pinned: Older version that a `PinningEngine` keeps for requests that name it.

        Raises:
            UnavailableWeightsError: `make_items` failed before its first pair; the old weights are still served.
            StateDictError: loading or verifying (VerificationError) failed. All requests in flight and later ones fail
                with GenerationError until a pull of the version served before, or of a newer one, succeeds.
            EngineDeadError: the loop has ended.
        """
        self._require_started()
        if (answer := self._state.outdated(version, adapter)) is not None:
            return answer
        pull = PendingPull(version, manifest, adapter)
        await in_thread(pull.open, make_items, verify, published, pinned)
        if (answer := self._state.add_pull(pull)) is not None:
            pull.close()
            return answer
        return await pull.future

    async def close(self, *, timeout_s: float = 30.0) -> None:
        """End the loop. Everything outstanding fails with EngineDeadError. Closing again does nothing."""
        self._state.close()
        if self._thread.ident is not None:
            await in_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            logger.warning("the engine did not return from its step within %g s of close()", timeout_s)
        self._state.end("the engine loop is closed", None)

    def _require_started(self) -> None:
        if self._thread.ident is None:
            self._state.require_alive()
            raise RuntimeError("the engine loop has not been started; await start() first")

    async def _barrier(self, abort_ids: Iterable[str] | None) -> None:
        barrier: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state.abort(abort_ids, barrier)
        await barrier


class LocalReplica:
    """The `StreamingReplica` of an engine loop in this process, for tests, simulations and single-process programs.

    Example:

        replica = LocalReplica("engine-0", EngineLoop(ScriptedEngine), lambda version: [])
        await replica.loop.start()
        router = GeneratorRouter([replica])

    Args:
        name: Name of the replica.
        loop: Engine loop, which the caller starts.
        items_of: Returns the (name, tensor) pairs of a published version.
    """

    def __init__(self, name: str, loop: EngineLoop, items_of: Callable[[int], Iterable[tuple[str, Any]]]) -> None:
        self.name = name
        self.loop = loop
        self._items_of = items_of
        self.gauges: GaugeSummary | None = None

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        return await self.loop.stream(request, on_chunk)

    async def pull(self, version: int) -> int:
        result = await self.loop.pull(version, lambda: self._items_of(version))
        self.gauges = result.gauges or self.gauges
        return result.version

    async def pause(self, mode: PauseMode) -> None:
        await self.loop.set_paused(mode)

    async def resume(self) -> None:
        await self.loop.set_paused(None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.loop.abort(request_ids)

    async def close(self) -> None:
        await self.loop.close()
