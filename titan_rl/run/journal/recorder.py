"""Answers that were given before are given again: how an unfinished rollout is restored by running it once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from titan_rl.run.journal.records import CompletionRecord, digest
from titan_rl.types import Completion, GenerateFn, SamplingParams

Known = Callable[[str, bytes, SamplingParams], Completion | None]
"""What a request came back with, by its id, the digest of its prompt, and how it was to be sampled."""


class Recorder:
    """Notes what requests come back with, and knows which are out.

    Args:
        on_completion: told of each completion with a token, whole or interrupted.
    """

    def __init__(self, on_completion: Callable[[CompletionRecord], None]) -> None:
        self._on_completion = on_completion
        self._asked: dict[str, tuple[int, bytes, SamplingParams]] = {}  # by request id, what is in flight

    def record(self, generate: GenerateFn, index: int, known: Known) -> GenerateFn:
        """A `GenerateFn` that answers what is known, and notes everything else.

        A fresh environment that is given the recorded answers arrives where its predecessor was, so environments need
        not be saved. One that asks with another prompt or sampling than before gets new answers from there on. A part
        that was interrupted comes back as aborted, and `resume_on_abort` around this asks for the rest.

        Args:
            index: position in the data of the group whose requests these are.
        """

        async def recorded(
            prompt_token_ids: Sequence[int],
            *,
            request_id: str,
            session_id: str | None = None,
            sampling: SamplingParams,
        ) -> Completion:
            prompt_digest = digest(prompt_token_ids)
            if (answer := known(request_id, prompt_digest, sampling)) is not None:
                return answer
            self._asked[request_id] = (index, prompt_digest, sampling)
            try:
                answer = await generate(
                    prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
                )
            finally:
                del self._asked[request_id]
            if answer.token_ids:
                self._on_completion(CompletionRecord(index, prompt_digest, sampling, answer))
            return answer

        return recorded

    def in_flight(self, tokens: Mapping[str, Completion]) -> list[CompletionRecord]:
        """What is known of the requests that are out.

        Args:
            tokens: request id -> the tokens so far, as an aborted completion.
        """
        return [
            CompletionRecord(index, prompt_digest, sampling, tokens[request_id])
            for request_id, (index, prompt_digest, sampling) in self._asked.items()
            if request_id in tokens and tokens[request_id].token_ids
        ]
