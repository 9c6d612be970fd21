"""What a request has got so far, over all the replicas that worked on it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from titan_rl.generation.continuation import ending, merge_completions, remaining_sampling
from titan_rl.generation.router.member import Member
from titan_rl.types import Completion, FinishReason, SamplingParams


class Job:
    """A request and the tokens that lost replicas streamed of it. Another replica goes on behind those.

    Example: 40 of 64 tokens were streamed when the replica died. The next is asked for 24, behind prompt and the 40.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: Sequence[int], session_id: str | None, sampling: SamplingParams
    ) -> None:
        self.cost = len(prompt_token_ids) + sampling.max_tokens
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._session_id = session_id
        self._sampling = sampling
        self._kept: Completion | None = None  # of earlier attempts
        self._streamed: list[Completion] = []  # of the present one

    def ask(self, member: Member, engine_id: str, on_sign: Callable[[bool], None]) -> Coroutine[Any, Any, Completion]:
        """Have a replica generate what is missing, under an id of this attempt alone.

        Args:
            on_sign: called with each sign of this request; whether it brought tokens.
        """
        kept = self._kept
        prompt = [*self._prompt_token_ids, *(() if kept is None else kept.token_ids)]  # the replica's own
        sampling = self._sampling if kept is None else remaining_sampling(self._sampling, len(kept.token_ids))
        streamed: list[Completion] = []  # what comes late of an attempt that is over lands in a list nobody reads
        self._streamed = streamed

        def on_tokens(part: Completion) -> None:
            member.hear(served=bool(part.token_ids))
            on_sign(bool(part.token_ids))
            if part.token_ids:
                streamed.append(part)

        return member.calls.generate(
            prompt, request_id=engine_id, session_id=self._session_id, sampling=sampling, on_tokens=on_tokens
        )

    def keep_what_was_streamed(self) -> None:
        """The present attempt is over without an answer."""
        parts, self._streamed = self._streamed, []
        if parts:
            self._kept = self.completed_by(replace(reduce(merge_completions, parts), metrics={}))

    def completed_by(self, completion: Completion) -> Completion:
        """The answer of the present attempt behind what earlier ones left."""
        whole = completion if self._kept is None else merge_completions(self._kept, completion)
        return whole if whole.request_id == self._request_id else replace(whole, request_id=self._request_id)

    @property
    def whole(self) -> Completion | None:
        """What is kept, if nothing is missing of it but its ending."""
        if self._kept is None:
            return None
        reason = ending(self._kept, self._sampling, len(self._prompt_token_ids), None)
        return None if reason is None else replace(self._kept, finish_reason=reason)

    @property
    def so_far(self) -> Completion:
        """Every token known, that of the present attempt as far as it is streamed."""
        parts = [*self._streamed] if self._kept is None else [self._kept, *self._streamed]
        if not parts:
            return self.aborted
        return replace(reduce(merge_completions, parts), request_id=self._request_id, metrics={})

    @property
    def aborted(self) -> Completion:
        """What there is when the request is aborted."""
        return self._kept or Completion(self._request_id, (), (), FinishReason.ABORT, ())
