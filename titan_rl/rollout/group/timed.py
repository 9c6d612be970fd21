"""Generation within the time that a rollout has left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.bounded import BoundedCall
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.copies import completion_of
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams

RETURN_S = 60.0
"""What a request may take to return with its tokens when it is told to end, before it is cancelled. A router needs less
with its default limits, also of an engine that does not answer."""


async def generate_within(
    watch: Stopwatch,
    generate: GenerateFn,
    prompt_token_ids: Sequence[int],
    *,
    request_id: str,
    session_id: str | None = None,
    sampling: SamplingParams,
) -> Completion:
    """The answer of `generate`, or what there is of it when the time is used up, as an aborted completion.

    The watch runs meanwhile, but for its pauses. A whole answer then tells better: of the call's time, `queue_s` and
    `interrupted_s` of its metrics, or what was known to be waiting if that is more than the latter, are not the
    rollout's own, and the rest is.

    Raises:
        TypeError, ValueError: the answer is no good; see `completion_of`.
        Exception: what `generate` raises.
    """
    loop = asyncio.get_running_loop()
    began, used_s = loop.time(), watch.used_s
    waited_s, charged_s = watch.waited_s, watch.charged_s

    def end() -> None:
        call.reschedule(loop.time() + (RETURN_S if watch.end_requests() else 0.0))

    with stopwatch.working_for(watch):
        asked = generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)
        call = BoundedCall(asked, f"generate for request {request_id!r}")
    try:
        with watch.running(at_limit=end), span("request", "request", fine=True, request=request_id) as took:
            answer = await call.result()
    except TimeoutError:
        if not call.expired():
            raise
        return Completion(request_id, [], [], FinishReason.ABORT, ())
    finally:
        watch.asked_s += loop.time() - began
    completion = completion_of(answer, sampling.max_tokens)
    took.args["tokens"] = len(completion.token_ids)
    if completion.finish_reason is not FinishReason.ABORT:
        counted_s = watch.used_s - used_s
        waited_s = max(completion.metrics.get("interrupted_s", 0.0), watch.waited_s - waited_s)
        known_s = loop.time() - began - waited_s - completion.metrics.get("queue_s", 0.0)
        own_s = max(0.0, known_s) + watch.charged_s - charged_s
        watch.correct((own_s if "queue_s" in completion.metrics else min(own_s, counted_s)) - counted_s)
    return completion
