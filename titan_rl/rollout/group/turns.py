"""Turns of a rollout: request IDs, seeds, and generation within the time that the rollout has left."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from titan_rl.core.arrays import token_array
from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.bounded import BoundedCall
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.pickling import replace_unchecked
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.checked_copies import completion_of
from titan_rl.rollout.group.user_code_boundary import RolloutEnded, TimeBudget, UserCodeBoundary
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.shared_tokens import TokenStorage
from titan_rl.rollout.types import Rollout, RolloutStatus, Turn
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams


def turn_seed(base: int, rollout_id: str, turn: int) -> int:
    """63-bit seed of one turn, the same in every process.

    >>> turn_seed(0, "g0/0", 0) == turn_seed(0, "g0/0", 0) != turn_seed(0, "g0/0", 1)
    True
    """
    digest = hashlib.blake2b(repr((base, rollout_id, turn)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RequestIds:
    """Request IDs of a rollout whose environment sends requests in any order, several at once.

    An ID consists of the rollout's ID, a digest of prompt and sampling, and the number of earlier requests with that
    digest, so it is unique in the rollout. A rollout that is run again gives its requests the same IDs, even in another
    order, so that their recorded answers are found. Identical requests may swap IDs.

    Example: `RequestIds("train-17/3").next(prompt, sampling)` is "train-17/3/5f0c41a2b9d63e87/0", and then ".../1".
    """

    def __init__(self, rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._num_requests: Counter[str] = Counter()  # number of requests by digest

    def next(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> str:
        try:
            prompt = token_array(prompt_token_ids).tobytes()
        except (TypeError, ValueError, OverflowError):  # not tokens; `generate` will refuse them
            prompt = repr(prompt_token_ids).encode(errors="backslashreplace")
        digest = hashlib.blake2b(prompt, digest_size=8)
        digest.update(repr(sampling).encode())
        name = digest.hexdigest()
        self._num_requests[name] += 1
        return f"{self._rollout_id}/{name}/{self._num_requests[name] - 1}"


LAST_CALL_S = 1.0
"""Minimum time for an environment to process an answer that was finished in time."""

RETURN_S = 60.0
"""Time for a request to return its tokens after the time limit, before it is cancelled. A router with default
limits needs less, even if an engine does not answer."""


_LOOK_S = 0.05  # shortest interval between two checks of a paused stopwatch


async def used_up(watch: Stopwatch) -> None:
    """Wait until the time of a stopwatch is used up."""
    while not watch.is_over:  # noqa: ASYNC110  the stopwatch pauses while requests wait
        await asyncio.sleep(max(watch.left_s, _LOOK_S))


async def generate_within(
    watch: Stopwatch,
    generate: GenerateFn,
    prompt_token_ids: Sequence[int],
    *,
    request_id: str,
    session_id: str | None = None,
    sampling: SamplingParams,
) -> Completion:
    """Call `generate`. When the stopwatch's time is used up, return the tokens so far as an aborted completion.

    The stopwatch runs during the call, except for its pauses. The metrics of a complete answer then correct it:
    `queue_s` and `interrupted_s` (or the known waiting time, if that is longer) are not the rollout's own time, whereas
    all other time is.

    Raises:
        TypeError, ValueError: the answer is invalid; see `completion_of`.
        Exception: raised by `generate`.
    """
    loop = asyncio.get_running_loop()
    began, used_s, waited_s = loop.time(), watch.used_s, watch.waited_s

    def end() -> None:
        call.reschedule(loop.time() + (RETURN_S if watch.end_requests() else 0.0))

    with stopwatch.working_for(watch):
        pending = generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)
        call = BoundedCall(pending, f"generate for request {request_id!r}")
    try:
        with watch.running(at_limit=end), span("request", "request", fine=True, request=request_id) as took:
            answer = await call.result()
    except TimeoutError:
        if not call.expired():
            raise
        return Completion(request_id, [], [], FinishReason.ABORT, ())
    finally:
        watch.request_s += loop.time() - began
    completion = completion_of(answer, sampling.max_tokens)
    took.args["tokens"] = len(completion.token_ids)
    if completion.finish_reason is not FinishReason.ABORT:
        counted_s = watch.used_s - used_s
        waited_s = max(completion.metrics.get("interrupted_s", 0.0), watch.waited_s - waited_s)
        own_s = max(0.0, loop.time() - began - waited_s - completion.metrics.get("queue_s", 0.0))
        watch.correct((own_s if "queue_s" in completion.metrics else min(own_s, counted_s)) - counted_s)
    return completion


@dataclass(frozen=True, slots=True)
class TurnTaker:
    """Takes the turns of one rollout, within its limits.

    Args:
        rollout: The rollout.
        generate: Sends a request.
        sampling: Sampling parameters. Their seed is the base of the turns' seeds; None sets no seeds.
        time_budget: Time that the rollout may use itself.
        limits: Limits of the rollout.
        max_context: Largest number of tokens of prompt and completion together.
    """

    rollout: Rollout
    generate: GenerateFn
    sampling: SamplingParams
    time_budget: TimeBudget
    limits: RolloutConfig
    max_context: int
    _storage: TokenStorage = field(default_factory=TokenStorage, init=False)

    async def take(self, prompt: list[int]) -> bool:
        """Request the next completion and append it to the rollout's turns.

        Args:
            prompt: Prompt, which belongs to the rollout from then on.  # [num_prompt_tokens]

        Returns:
            Whether the completion was cut off because the rollout's time was used up.

        Raises:
            RolloutEnded: there is no time or no room for a token, the completion was aborted, or generation failed.
        """
        watch = self.time_budget.watch
        if watch.is_over:
            raise self.time_budget.error()
        rollout, turn = self.rollout, len(self.rollout.turns)
        sampling = self._sampling(turn, prompt)
        deadline = asyncio.get_running_loop().time() + self.limits.generate_timeout_s
        async with UserCodeBoundary(RolloutStatus.ERROR_GENERATE, deadline):
            completion = await generate_within(
                watch,
                self.generate,
                list(prompt),
                request_id=f"{rollout.rollout_id}/{turn}",
                session_id=rollout.rollout_id,
                sampling=sampling,
            )
        is_cut = completion.finish_reason is FinishReason.ABORT and watch.is_over
        if is_cut and not completion.token_ids:
            raise self.time_budget.error()
        if is_cut:
            completion = replace(completion, finish_reason=completion.ended or FinishReason.LENGTH, ended=None)
        rollout.turns.append(self._storage.add(Turn(prompt, completion, sampling=sampling)))
        if completion.finish_reason is FinishReason.ABORT:
            raise RolloutEnded(RolloutStatus.ABORTED)
        return is_cut

    def _sampling(self, turn: int, prompt: list[int]) -> SamplingParams:
        room = self.max_context - len(prompt)
        if room < 1:
            raise RolloutEnded(
                RolloutStatus.TRUNCATED_PROMPT,
                f"the prompt of turn {turn} has {len(prompt)} tokens, max_context is {self.max_context}",
            )
        base = self.sampling.seed
        seed = None if base is None else turn_seed(base, self.rollout.rollout_id, turn)
        sampling = self.sampling.within(room)
        return sampling if sampling.seed == seed else replace_unchecked(sampling, seed=seed)
