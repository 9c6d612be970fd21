"""Subclasses of vLLM's scheduler and executor: scoring, adaptive batch size, ranks started from outside. Importing this
module imports vLLM."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.request import Request, RequestStatus

from titan_rl.generation.adaptive_batch import AdaptiveLimit, Growth
from titan_rl.generation.vllm_requests import ConstrainedIds

SCORE_SLOTS = 8  # sequences scored at a time, in addition to the slots of requests


class ScoringScheduler(Scheduler):
    """Scheduler that can suspend requests while others run `alone`. The latter need no slot of the suspended requests,
    and do not wait for one.

    The model runner keeps the state of a request that is not scheduled in a step, so a suspended request continues as
    if nothing had happened. `max_num_seqs` must exceed the largest number of requests that advance together,
    `max_num_active_seqs`, by `SCORE_SLOTS`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_preemptions = 0
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.allowed_logprobs: dict[str, float] = {}  # by constrained request of the last step; see `ConstrainedIds`
        self._newly_scheduled: list[str] = []
        self._suspended: tuple[list[Request], Any] | None = None  # suspended running and waiting requests in `alone`
        self._num_extra_slots = 0  # additional slots in `with_extra_slots`
        self._waiting_before: Any = None  # requests that waited when `with_extra_slots` began

    @contextmanager
    def alone(self) -> Generator[None]:
        """Context in which only requests added within the block are scheduled. Those that have not finished at its end
        are aborted."""
        assert self._suspended is None, "requests run alone already"
        num_slots = self.max_num_active_reqs
        self._suspended = self.running, self.waiting
        self.running, self.waiting = [], create_request_queue(self.policy)
        self.max_num_active_reqs = SCORE_SLOTS
        try:
            yield
        finally:
            left = [request.request_id for request in (*self.running, *self.waiting)]
            self.finish_requests(left, RequestStatus.FINISHED_ABORTED)
            self.running, self.waiting = self._suspended
            self.max_num_active_reqs = num_slots
            self._suspended = None

    @contextmanager
    def with_extra_slots(self) -> Generator[None]:
        """Context in which requests that are added before its first step get additional slots and do not wait, while
        all other requests continue. The added requests that have not finished at its end are aborted."""
        others, num_slots = {request.request_id for request in (*self.running, *self.waiting)}, self.max_num_active_reqs
        self._waiting_before, self.waiting = self.waiting, create_request_queue(self.policy)
        self._num_extra_slots = SCORE_SLOTS
        self.max_num_active_reqs = num_slots + SCORE_SLOTS
        try:
            yield
        finally:
            self._join_waiting()
            self._num_extra_slots = 0
            self.max_num_active_reqs = num_slots
            left = [request.request_id for request in (*self.running, *self.waiting)]
            self.finish_requests([each for each in left if each not in others], RequestStatus.FINISHED_ABORTED)

    def has_room_for(self, lengths: Iterable[int]) -> bool:
        """Whether sequences of these lengths fit the KV cache, with one more block for each running request."""
        blocks = sum(cdiv(length + 1, self.block_size) for length in lengths) + len(self.running)
        groups = len(self.kv_cache_config.kv_cache_groups)
        return blocks * groups <= self.kv_cache_manager.block_pool.get_num_free_blocks()

    def _join_waiting(self) -> None:
        if self._waiting_before is not None:
            behind, self._waiting_before = self._waiting_before, None
            for request in behind:
                self.waiting.add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._join_waiting()
        if self._suspended is not None:
            self._make_room(*self._suspended)
        output = super().schedule(*args, **kwargs)
        self._newly_scheduled += (request.req_id for request in output.scheduled_new_reqs)
        return output

    def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:
        output = super().get_grammar_bitmask(*args, **kwargs)
        self.allowed_logprobs = {}
        if output is not None:
            ids = output.structured_output_request_ids
            params = [self.requests[request_id].sampling_params for request_id in ids]
            temperatures = [0.0 if each is None else each.temperature for each in params]
            output.structured_output_request_ids = ids = ConstrainedIds(ids, dict(zip(ids, temperatures, strict=True)))
            self.allowed_logprobs = ids.allowed_logprobs
        return output

    def take_scheduled(self) -> list[str]:
        """Ids of the requests that got a slot since the last call."""
        scheduled, self._newly_scheduled = self._newly_scheduled, []
        return scheduled

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(*args, **kwargs)
        self.num_preemptions += 1

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Count drafts. vLLM calls this once for each request of a step that had draft tokens."""
        invalid = (kwargs["num_invalid_spec_tokens"] or {}).get(kwargs["request_id"], 0)
        self.num_drafts += 1
        self.num_draft_tokens += kwargs["num_draft_tokens"] - invalid
        self.num_accepted_tokens += kwargs["num_accepted_tokens"]
        return super().make_spec_decoding_stats(*args, **kwargs)

    def _make_room(self, running: list[Request], waiting: Any) -> None:
        """Preempt the requests that joined last if suspended requests fill the KV cache, as vLLM does when requests
        outgrow it. Preempted requests find most of their blocks again when they continue."""
        joining = (*self.running, *islice(self.waiting, SCORE_SLOTS - len(self.running)))
        blocks = sum(
            cdiv(request.num_tokens + 1, self.block_size) - cdiv(request.num_computed_tokens, self.block_size)
            for request in joining
        )
        needed = blocks * len(self.kv_cache_config.kv_cache_groups)
        own, self.waiting = self.waiting, waiting
        while running and self.kv_cache_manager.block_pool.get_num_free_blocks() < needed:
            self._preempt_request(running.pop(), time.monotonic())
        self.waiting = own


class AdaptiveScheduler(ScoringScheduler):
    """Scheduler that advances at most `max_num_active_seqs` requests, and fewer if `AdaptiveLimit` decides so. Its
    decisions depend only on the requests so far, so all ranks of a replica agree.

    Raises:
        ValueError: `async_scheduling` is on, with which requests have tokens that are not counted yet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling:
            raise ValueError(
                "scheduler_cls = AdaptiveScheduler with async_scheduling = True, which gives requests tokens before "
                "they can be counted; set async_scheduling to False"
            )
        self._pool = self.kv_cache_manager.block_pool
        self._block_tokens = self.block_size / len(self.kv_cache_config.kv_cache_groups)  # each group has own blocks
        self._num_blocks: int = self._pool.get_num_free_blocks()
        kv_tokens = int(self._num_blocks * self._block_tokens)
        self._adaptive = AdaptiveLimit(self.max_num_active_reqs, kv_tokens, self.block_size)
        self._left: list[tuple[Growth, bool]] = []  # requests that left since the last step, and whether by an abort

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._suspended is None:
            for growth, was_aborted in sorted(self._left):  # each rank aborts the requests of a step in another order
                self._adaptive.ended(growth, was_aborted=was_aborted)
            self._left.clear()
            running = [_growth(request) for request in self.running]
            self._adaptive.num_joining(running, map(_growth, self.waiting), self._num_shared())
            self.max_num_active_reqs = self._adaptive.limit + self._num_extra_slots
        return super().schedule(*args, **kwargs)

    def _num_shared(self) -> int:
        """Number of tokens that are counted more than once because running requests share their blocks."""
        held = (self._num_blocks - self._pool.get_num_free_blocks()) * self._block_tokens
        return max(0, sum(request.num_computed_tokens for request in self.running) - int(held))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._suspended is None:
            self._left.append((_growth(request), request.status is RequestStatus.FINISHED_ABORTED))
        return super()._free_request(request, *args, **kwargs)


def _growth(request: Request) -> Growth:
    start = request.num_prompt_tokens
    return Growth(start, request.num_tokens, start + request.max_tokens)


class RankExecutor(ExecutorWithExternalLauncher):
    """One rank of a replica. Ranks on a CPU share memory, which vLLM names after the part of their rendezvous address
    that follows the last colon. Here this is the port, which no other replica of the host uses."""

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", rank, local_rank

    def _init_executor(self) -> None:
        super()._init_executor()
        # All ranks have mapped the shared memory by now. Without a name it is freed when they end, however they end.
        for path in Path("/dev/shm").glob(f"{os.environ['MASTER_PORT']}-*-cpushm_*"):
            path.unlink(missing_ok=True)
