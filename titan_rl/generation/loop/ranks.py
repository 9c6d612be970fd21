"""Ranks of one replica: rank 0 decides, the others follow, and all agree on failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from titan_rl.core.calls.user_code import summary, with_cause
from titan_rl.core.errors import EngineDeadError, GenerationError, RequestError, StateDictError
from titan_rl.generation.engine import Engine, PinningEngine, SleepingEngine, TokenDelta, check_sampling, policy_of
from titan_rl.generation.loop.calls import Weights
from titan_rl.generation.loop.state import LoopAction, LoopDecision
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import KVPolicy, Readback, compare, read_back

IDLE_TIMEOUT = timedelta(days=365)  # a follower of an idle replica waits; if its leader dies, the connection closes


class Ranks:
    """One rank's end of the link between the ranks of a replica, used only by the engine's thread. This base class is
    the link of a single rank."""

    def open(self) -> None:
        """Connect to the other ranks. Called after the engine was made."""

    def broadcast(self, decision: LoopDecision) -> None:
        """Send a decision of rank 0 to the other ranks."""

    def receive(self) -> LoopDecision:
        """The next decision of rank 0.

        Raises:
            EngineDeadError: rank 0 is gone.
        """
        raise RuntimeError("a single rank has no leader to follow")

    def gather(self, value: Any) -> list[Any]:
        """Exchange a value that can be pickled. Returns the values of all ranks, rank 0 first."""
        return [value]

    def close(self) -> None:
        """Leave, so that the others do not wait for this rank."""


class GlooRanks(Ranks):
    """Ranks that are processes of one torch.distributed world, over gloo. All of them call `open` at the same time.

    Decisions have a separate process group, so that they neither wait for the engine's collectives nor exceed the time
    limit of those while the replica is idle. The group ends with the process, because destroying it would wait for
    ranks that may be gone.
    """

    def __init__(self) -> None:
        self._dist: Any = None
        self._group: Any = None

    def open(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    def broadcast(self, decision: LoopDecision) -> None:
        self._dist.broadcast_object_list([decision], src=0, group=self._group)

    def receive(self) -> LoopDecision:
        box: list[Any] = [None]
        try:
            self._dist.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as error:  # gloo: the connection is closed
            raise EngineDeadError(f"rank 0 has ended: {error}") from error
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._dist.get_world_size(self._group)
        self._dist.all_gather_object(values, value, group=self._group)
        return values


def agree(ranks: Ranks, problem: str | None) -> str | None:
    """Exchange the problems of all ranks. Returns the first one, or None."""
    problems = ranks.gather(problem)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None), None)


logger = logging.getLogger(__name__)

CANNOT_OPEN = "the version could not be opened"
Stepping = Callable[[], AbstractContextManager[object]]


class EngineRank:
    """One engine and its rank. If one rank fails, all ranks agree on the failure, so that their states stay equal.

    Args:
        make_engine: Makes the engine. Called by `start`.
        ranks: Link to the other ranks of the replica. By default there are none.
        kv_policy: Treatment of the KV cache at a pull.
        stepping: Context manager around each step.
    """

    engine: Engine

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        ranks: Ranks | None = None,
        kv_policy: KVPolicy | None = None,
        stepping: Stepping = nullcontext,
    ) -> None:
        self.ranks = ranks or Ranks()
        self._make_engine = make_engine
        self._kv_policy = kv_policy or KVPolicy()
        self._stepping = stepping
        self._distrusted: set[str] = set()  # adapters, or "", whose loaded weights are unknown

    def start(self) -> None:
        """Make the engine and connect to the other ranks. Called in the thread that drives the engine."""
        self.engine = self._make_engine()
        self.ranks.open()

    def close(self) -> None:
        """Leave the other ranks and close the engine, as far as they were made. Errors are logged."""
        for part in (self.ranks, getattr(self, "engine", None)):
            try:
                if part is not None:
                    part.close()
            except Exception:
                logger.exception("%r failed to close", part)

    @property
    def pins_versions(self) -> bool:
        """Whether the engine finishes each request on the version it started with."""
        return bool(getattr(self.engine, "pins_versions", False))

    def step(self, requests: Sequence[EngineRequest]) -> tuple[dict[str, Exception], list[TokenDelta]]:
        """Let requests join, and advance all running ones.

        Returns:
            Error of each request that could not join, by id, and the deltas of the step.
        """
        rejected: dict[str, Exception] = {}
        for request in requests:
            try:
                check_sampling(self.engine, request)
                if request.version is not None and not self.pins_versions:
                    raise GenerationError(f"request {request.request_id!r} names a version, but the engine pins none")
                self.engine.add(request)
            except BaseException as error:  # nothing is awaited here, so a CancelledError is the engine's own
                # An error that the engine did not foresee is caused by the request, and would happen on every replica.
                # Which versions are loaded differs between replicas.
                if not isinstance(error, RequestError if request.version is None else GenerationError):
                    problem = f"request {request.request_id!r} was not accepted: {summary(error)}"
                    error = with_cause(RequestError(problem), error)
                rejected[request.request_id] = error
        with self._stepping():
            return rejected, self.engine.step()

    def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self.engine.abort(request_ids)

    def sleep(self) -> None:
        """Release the engine's memory. No request may be running.

        Raises:
            EngineDeadError: the engine cannot sleep.
        """
        if not isinstance(self.engine, SleepingEngine):
            raise EngineDeadError(
                f"{type(self.engine).__name__} cannot sleep; set scheduling.on_batch_ready to a value other than "
                "'sleep'"
            )
        self._distrusted.add("")  # the weights are gone
        self.engine.sleep()

    def wake(self) -> None:
        assert isinstance(self.engine, SleepingEngine)
        self.engine.wake()

    @contextmanager
    def together(self, message: str) -> Generator[None]:
        """Run the block on every rank. If it fails on one, it fails on all.

        Args:
            message: Beginning of the message for errors that are not `StateDictError`s.

        Raises:
            StateDictError: the block failed on this rank or on another one.
        """
        own_error: StateDictError | None = None
        try:
            yield
        except StateDictError as error:
            own_error = error
        except BaseException as error:
            own_error = with_cause(StateDictError(f"{message}: {summary(error)}"), error)
        problem = agree(self.ranks, None if own_error is None else str(own_error))
        if own_error is not None:
            raise own_error
        if problem is not None:
            raise StateDictError(problem)

    def load(self, weights: Weights, version: int, adapter: str = "") -> None:
        """Swap weights, and treat the KV cache as the policy says.

        Raises:
            StateDictError: a rank could not load them. The loaded weights are unknown until a later load succeeds.
        """
        distrusted = adapter in self._distrusted
        self._distrusted.add(adapter)
        with self.together(f"version {version} could not be loaded"):
            policy = policy_of(self.engine, adapter)
            if isinstance(self.engine, PinningEngine):
                self.engine.pin(weights.pinned, adapter)
            policy.load_state_dict(weights.items, version)
        # KV computed with unknown weights is never reused, regardless of the policy.
        if self._kv_policy.reset_prefix_cache or distrusted:
            policy.reset_prefix_cache(recompute_running=self._kv_policy.running == "recompute")

    def read_back(self, weights: Weights, version: int, adapter: str = "") -> Readback | None:
        """Compare the weights that the engines of all ranks hold with the published checksums.

        Returns:
            None if there is nothing to compare with, or no engine can be read.

        Raises:
            VerificationError: the weights differ.
            StateDictError: reading an engine failed.
        """
        if not weights.published:
            return None
        with self.together("the loaded weights could not be read"):
            own = read_back(policy_of(self.engine, adapter), weights.published)
        held = self.ranks.gather(own)
        if not any(held):
            return None
        with self.together("the loaded weights differ"):
            return compare(weights.published, held, version)

    def verify(self, weights: Weights, adapter: str = "") -> None:
        """Run the check that came with the version. If it succeeds, the weights are trusted from then on.

        Raises:
            StateDictError: the check failed on a rank. The loaded weights stay unknown; see `load`.
        """
        if weights.verify is not None:
            with self.together("the loaded weights could not be verified"):
                weights.verify(policy_of(self.engine, adapter))
        self._distrusted.discard(adapter)


def follow_leader(rank: EngineRank, open_weights: Callable[[Any], Weights]) -> None:
    """Drive an engine that is not on rank 0, until rank 0 closes.

    Args:
        open_weights: Opens a version from the manifest in rank 0's decision.

    Raises:
        EngineDeadError: rank 0 is gone.
        Exception: the engine failed. The other ranks cannot continue without this one.
    """
    try:
        rank.start()
        while (decision := rank.ranks.receive()).action is not LoopAction.CLOSE:
            match decision.action:
                case LoopAction.ABORT:
                    rank.abort(decision.request_ids)
                case LoopAction.PULL:
                    assert decision.version is not None
                    try:
                        with rank.together(CANNOT_OPEN):
                            weights = open_weights(decision.manifest)
                        rank.load(weights, decision.version, decision.adapter)
                        rank.read_back(weights, decision.version, decision.adapter)
                        rank.verify(weights, decision.adapter)
                    except StateDictError:
                        logger.exception("version %s was not pulled", decision.version)
                case LoopAction.SLEEP:
                    rank.sleep()
                case LoopAction.WAKE:
                    rank.wake()
                case _:
                    rank.step(decision.requests)
    finally:
        rank.close()
