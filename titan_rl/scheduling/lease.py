"""Lifecycle of a group: its states, the lease that moves through them, its suspension, and the ledger of time spent in
each state.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Protocol

from titan_rl.core.clock import Clock
from titan_rl.core.tracing.spans import Track
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.scheduling.limits import RolloutCapacity, RolloutPermits, SlotPool
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams

Abort = Callable[[Collection[str]], Awaitable[object]]
"""Function that aborts requests by id, which then return with the tokens they have, such as `GeneratorRouter.abort`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call in flight. Calls with the same request id are kept apart."""

    request_id: str
    abort: Abort


class Suspension:
    """Suspension of one group's generation: its requests end, and its rollouts later continue from their tokens.

    Example:

        suspension = Suspension()
        generate = resume_on_abort(suspension.guard(router.generate, router.abort),
                                   wait_until_resumed=suspension.wait_resumed)
        suspension.suspend()
        await suspension.abort_in_flight()   # the engines are free; `generate` has not returned
        suspension.resume()                  # `generate` continues, perhaps with newer weights
    """

    def __init__(self) -> None:
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._in_flight: set[_Call] = set()

    @property
    def is_suspended(self) -> bool:
        return not self._resumed.is_set()

    async def wait_resumed(self) -> None:
        await self._resumed.wait()

    def resume(self) -> None:
        self._resumed.set()

    def suspend(self) -> None:
        """Hold back new requests. `abort_in_flight` ends those in flight."""
        self._resumed.clear()

    async def abort_in_flight(self) -> None:
        """Abort the requests in flight. Returns once the aborts have reached their generators."""
        by_router: dict[Abort, list[str]] = {}
        for call in self._in_flight:
            by_router.setdefault(call.abort, []).append(call.request_id)
        for abort, request_ids in by_router.items():
            await abort(request_ids)

    @contextmanager
    def request(self, request_id: str, abort: Abort) -> Generator[bool]:
        """Register a request for the length of the block, so that `abort_in_flight` ends it.

        Yields:
            Whether the request may be sent. While the group is suspended it may not, and counts as aborted.
        """
        if self.is_suspended:
            yield False
            return
        call = _Call(request_id, abort)
        self._in_flight.add(call)
        try:
            yield True
        finally:
            self._in_flight.discard(call)

    def guard(self, generate: GenerateFn, abort: Abort) -> GenerateFn:
        """Wrap `generate` so that `abort_in_flight` ends its requests. While the group is suspended, a request returns
        aborted at once.

        With `resume_on_abort` around it, waiting for `wait_resumed`, the caller does not notice the interruption.
        """

        async def guarded(
            prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None = None, sampling: SamplingParams
        ) -> Completion:
            with self.request(request_id, abort) as may_be_sent:
                if not may_be_sent:
                    return Completion(request_id, [], [], FinishReason.ABORT, ())
                return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)

        return guarded


class GroupState(StrEnum):
    """State of a group that holds a slot."""

    PENDING = "pending"  # waits until its rollouts fit into the limit of rollouts in flight
    RUNNING = "running"
    SUSPENDED = "suspended"  # keeps its tokens and waits for the tail batch
    DONE = "done"  # waits for its batch
    TRAINING = "training"  # in a batch, until the version trained on it is pulled


TRANSITIONS: dict[GroupState, tuple[GroupState | None, ...]] = {
    GroupState.PENDING: (GroupState.RUNNING, GroupState.DONE, None),  # done at once if an earlier run finished it
    GroupState.RUNNING: (GroupState.SUSPENDED, GroupState.DONE, None),
    GroupState.SUSPENDED: (GroupState.RUNNING, GroupState.DONE, None),
    GroupState.DONE: (GroupState.TRAINING, GroupState.PENDING, None),  # pending if it is generated again
    GroupState.TRAINING: (None,),
}
"""Allowed transitions. None stands for a group that has given its slot back; no state follows."""


class Ledger:
    """Scheduler metrics: the time of the slots in each state and the dropped groups since the last batch, and the
    accepted lengths over the run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: Counter[GroupState] = Counter()
        self._seconds: defaultdict[GroupState, float] = defaultdict(float)
        self._since = clock.now()
        self._dropped: Counter[str] = Counter()
        self._wasted_tokens = 0
        self._generated = _Mean()
        self._accepted = _Mean()

    def move(self, before: GroupState | None, after: GroupState | None) -> None:
        """Count a state change. None stands for the time before admission and after the slot was given back."""
        self._advance()
        if before is not None:
            self._states[before] -= 1
        if after is not None:
            self._states[after] += 1

    @property
    def states(self) -> Counter[GroupState]:
        """Current number of groups in each state."""
        return +self._states

    def finished(self, group: RolloutGroup) -> None:
        self._generated.add(lengths(group))

    def dropped(self, reason: str, group: RolloutGroup | None) -> None:
        """Count a dropped group; `group` is None if it never finished, so that its tokens are not known."""
        self._dropped[reason] += 1
        if group is not None:
            self.wasted(group)

    def wasted(self, group: RolloutGroup) -> None:
        """Count the tokens of a group that has finished but is not trained on."""
        self._wasted_tokens += sum(rollout.num_completion_tokens for rollout in group.rollouts)

    def close_batch(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """Metrics since the last batch, whose counts start again from zero.

        Returns:
            slot_s/<state>: Seconds that slots spent in a state, added up over the slots.
            age/<n>: Number of groups whose oldest token is n versions old. age_mean: Mean of these ages.
            dropped/<reason>: Number of dropped groups. wasted_tokens: Completion tokens of groups not trained on.
            accepted_tokens_mean, generated_tokens_mean: Mean numbers of completion tokens per rollout over the run, of
            the rollouts trained on and of all finished rollouts, without faults. If the first is less, the schedule
            prefers short answers.
        """
        self._advance()
        for group in groups:
            self._accepted.add(lengths(group))
        ages = [version - min(group.versions, default=version) for group in groups]
        metrics = {f"slot_s/{state}": self._seconds[state] for state in GroupState}
        metrics |= {f"age/{age}": float(count) for age, count in sorted(Counter(ages).items())}
        metrics |= {f"dropped/{reason}": float(count) for reason, count in self._dropped.items()}
        metrics |= {
            "age_mean": fmean(ages),
            "wasted_tokens": float(self._wasted_tokens),
            "accepted_tokens_mean": self._accepted.value,
            "generated_tokens_mean": self._generated.value,
        }
        self._seconds.clear()
        self._dropped.clear()
        self._wasted_tokens = 0
        return metrics

    def _advance(self) -> None:
        now = self._clock.now()
        elapsed, self._since = now - self._since, now
        for state, count in self._states.items():
            self._seconds[state] += elapsed * count


def lengths(group: RolloutGroup) -> list[int]:
    """Number of completion tokens of each rollout that means include."""
    return [rollout.num_completion_tokens for rollout in group.counted]


class _Mean:
    def __init__(self) -> None:
        self._sum = self._count = 0

    def add(self, values: Sequence[int]) -> None:
        self._sum += sum(values)
        self._count += len(values)

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 0.0


class Lease:
    """Resources held by one group: a slot of the scheduler, and a permit for each sibling.

    `RunGroup` receives it, generates through `suspension`, and reports when a sibling is done.

    Slot and permits are given back separately. The slot is released when the group is settled: when its step has been
    pulled, or when it is dropped. The permits are released as the rollouts end, also those of a dropped group that
    takes a while to end.

    Example:

        async def run_group(lease: Lease) -> RolloutGroup:
            generate = resume_on_abort(lease.suspension.guard(router.generate, router.abort),
                                       wait_until_resumed=lease.suspension.wait_resumed)
            return await rollouter.run_group(generate, sample_of(lease.index), on_finished=lease.rollout_finished, ...)
    """

    def __init__(self, index: int, slots: SlotPool, ledger: Ledger) -> None:
        self.index = index  # position in the data
        self.suspension = Suspension()
        self.version = -1  # newest version pulled when the group started
        self.group: RolloutGroup | None = None  # set when the group has finished
        self._slots = slots
        self._ledger = ledger
        self._permits = RolloutPermits()
        self._unfinished = 0  # number of unfinished siblings
        self._finished: set[int] = set()  # finished siblings
        self._due = asyncio.Event()  # set when a suspended group may continue
        self._track = Track("slot", "scheduler")
        self._state: GroupState | None = GroupState.PENDING
        self._note_move(None)

    @property
    def state(self) -> GroupState | None:
        """State of the group; None once it is settled."""
        return self._state

    def rollout_finished(self, rollout: Rollout) -> None:
        """Release the permit of one sibling that is done with all its seats."""
        if rollout.sibling not in self._finished:
            self._finished.add(rollout.sibling)
            self._unfinished = max(0, self._unfinished - 1)
            self._permits.keep(self._unfinished)

    def mark_running(self, permits: RolloutPermits, version: int) -> None:
        self._permits, self._unfinished, self.version = permits, permits.count, version
        self._move(GroupState.RUNNING)

    def suspend(self) -> None:
        """Hold back new requests of the group. The caller must then run `wait_suspended`."""
        self.suspension.suspend()
        self._due.clear()
        self._move(GroupState.SUSPENDED)

    async def wait_suspended(self, capacity: RolloutCapacity) -> None:
        """Abort the requests in flight, wait for `let_resume`, take permits again, and continue.

        In the meantime the group may end, and may even be generated again with a new suspension and new permits.
        """
        suspension = self.suspension
        permits = self._permits
        await suspension.abort_in_flight()
        permits.keep(0)
        await self._due.wait()
        if self._unfinished and self.suspension is suspension:
            permits = await capacity.take(self._unfinished)
            if self.suspension is not suspension:
                permits.keep(0)
                return
            permits.keep(self._unfinished)  # siblings may have ended during the wait
            self._permits = permits
        if self._state is GroupState.SUSPENDED and self.suspension is suspension:
            self._move(GroupState.RUNNING)
            suspension.resume()

    def let_resume(self) -> None:
        """Let a suspended group continue as soon as there are permits."""
        self._due.set()

    def has_ended(self) -> None:
        """Release all permits: `RunGroup` has returned or failed, so no rollout of the group is in flight."""
        self._unfinished = 0
        self._permits.keep(0)
        self._due.set()

    def mark_done(self, group: RolloutGroup) -> None:
        self.group = group
        self._move(GroupState.DONE)

    def begin_again(self) -> None:
        """Discard the finished group before it is generated again in the same slot."""
        self.group = None
        self.suspension = Suspension()  # the group may have ended while it was suspended
        self._finished.clear()
        self._move(GroupState.PENDING)

    def mark_training(self) -> RolloutGroup:
        assert self.group is not None, "only a finished group is trained on"
        self._move(GroupState.TRAINING)
        return self.group

    def settle(self) -> None:
        """Give the slot back. Called exactly once."""
        assert self._state is not None, f"group {self.index} is settled already; a slot is given back exactly once"
        self._move(None)
        self._slots.release()

    def _move(self, state: GroupState | None) -> None:
        before = self._state
        assert before is not None, f"group {self.index} is settled and cannot be {state}"
        assert state in TRANSITIONS[before], f"group {self.index} cannot go from {before} to {state}"
        self._state = state
        self._note_move(before)

    def _note_move(self, before: GroupState | None) -> None:
        self._ledger.move(before, self._state)
        if self._state is None:
            self._track.close()
        else:
            self._track.enter(self._state, group=self.index)


class RunGroup(Protocol):
    """Function that runs one group; the scheduler calls it for each group that it starts."""

    async def __call__(self, lease: Lease) -> RolloutGroup:
        """Run the group at index `lease.index` of the data to its end."""
        ...
