"""Recording of completions, so that an unfinished rollout is restored by running it again with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from titan_rl.core.errors import RequestError
from titan_rl.generation.request import EngineRequest, OnChunk, Partial
from titan_rl.generation.resume import listener, listening
from titan_rl.rollout.copies import completion_of
from titan_rl.run.journal.records import CompletionRecord, digest
from titan_rl.types import Completion, GenerateFn, SamplingParams, TokenChunk

Known = Callable[[str, bytes, SamplingParams], Completion | None]
"""Looks up a recorded answer by request id, digest of the prompt, and sampling parameters."""


class Recorder:
    """Records the completions of requests, and knows which requests are in flight.

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

        What `generate` gives is checked here, before anything reads it: see `completion_of`.

        Calls raise a `RequestError` while a request of the same ID is in flight: completions are recorded by their
        request's ID, so that two requests of one ID would get one answer.

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
            if request_id in self._asked:
                raise RequestError(f"request id {request_id!r} is in flight already; request ids must be unique")
            if (answer := known(request_id, prompt_digest, sampling)) is not None:
                return answer
            self._asked[request_id] = (index, prompt_digest, sampling)
            heard = Partial(EngineRequest(request_id, prompt_token_ids, sampling, session_id))
            try:
                with listening(_both(listener(), heard.begin())):
                    given = await generate(
                        prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
                    )
            except asyncio.CancelledError:  # who listens may have heard enough
                if (so_far := heard.so_far).token_ids:
                    self._on_completion(CompletionRecord(index, prompt_digest, sampling, so_far))
                raise
            finally:
                del self._asked[request_id]
            answer = completion_of(given, sampling.max_tokens)
            if answer.token_ids:
                self._on_completion(CompletionRecord(index, prompt_digest, sampling, answer))
            return answer

        return recorded

    def in_flight(self, tokens: Mapping[str, Completion]) -> Iterator[CompletionRecord]:
        """Iterate over the tokens so far of requests that are still in flight. Completions that arrive meanwhile go to
        `on_completion`.

        Args:
            tokens: request id -> the tokens so far, as an aborted completion.
        """
        for request_id, asked in list(self._asked.items()):
            so_far = tokens.get(request_id)
            if so_far is not None and so_far.token_ids and self._asked.get(request_id) is asked:
                yield CompletionRecord(*asked, so_far)


def _both(listener: OnChunk | None, keep: OnChunk) -> OnChunk | None:
    """Nothing is kept of what nobody listens to."""
    if listener is None:
        return None

    def tell(chunk: TokenChunk) -> None:
        keep(chunk)
        listener(chunk)

    return tell
