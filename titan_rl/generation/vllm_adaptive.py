"""vLLM's scheduler with as many requests as its KV cache is expected to hold. Importing it imports vLLM."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

from titan_rl.generation.lengths_seen import Growth
from titan_rl.generation.places import AdaptivePlaces
from titan_rl.generation.vllm_scheduler import ScoringScheduler


class AdaptiveScheduler(ScoringScheduler):
    """Advances `max_num_active_seqs` requests, or fewer where `AdaptivePlaces` says so. What it says is a function of
    the requests so far alone, so that the ranks of a replica agree.

    Raises:
        ValueError: `async_scheduling` is on, under which requests have tokens that nobody has counted yet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling:
            raise ValueError(
                "scheduler_cls = AdaptiveScheduler with async_scheduling = True, which gives requests tokens before "
                "they can be counted; set async_scheduling to False"
            )
        self._pool = self.kv_cache_manager.block_pool
        self._block_tokens = self.block_size / len(self.kv_cache_config.kv_cache_groups)  # each has blocks of its own
        self._num_blocks: int = self._pool.get_num_free_blocks()
        kv_tokens = int(self._num_blocks * self._block_tokens)
        self._adaptive = AdaptivePlaces(self.max_num_active_reqs, kv_tokens, self.block_size)
        self._left: list[tuple[Growth, bool]] = []  # since the last step, and whether they were aborted

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._still is None:
            for growth, was_aborted in sorted(self._left):  # ranks abort those of a step in orders of their own
                self._adaptive.ended(growth, was_aborted=was_aborted)
            self._left.clear()
            running = [_growth(request) for request in self.running]
            self._adaptive.num_joining(running, map(_growth, self.waiting), self._num_shared())
            self.max_num_active_reqs = self._adaptive.limit
        return super().schedule(*args, **kwargs)

    def _num_shared(self) -> int:
        """Tokens that running requests have in common, in blocks that each of them counts."""
        held = (self._num_blocks - self._pool.get_num_free_blocks()) * self._block_tokens
        return max(0, sum(request.num_computed_tokens for request in self.running) - int(held))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._still is None:
            self._left.append((_growth(request), request.status is RequestStatus.FINISHED_ABORTED))
        return super()._free_request(request, *args, **kwargs)


def _growth(request: Request) -> Growth:
    start = request.num_prompt_tokens
    return Growth(start, request.num_tokens, start + request.max_tokens)
