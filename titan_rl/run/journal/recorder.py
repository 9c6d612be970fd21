"""Recording of completions, so that an unfinished rollout is restored by running it again with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager

from titan_rl.core.errors import RequestError
from titan_rl.generation.request import Partial
from titan_rl.generation.resume import Attempt
from titan_rl.rollout.copies import completion_of
from titan_rl.run.journal.records import CompletionRecord, digest
from titan_rl.types import Completion, SamplingParams

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

    @contextmanager
    def step(self, attempt: Attempt, index: int, known: Known) -> Generator[None]:
        """Answer a request that is known, and record any other.

        A fresh environment that is given the recorded answers arrives where its predecessor was, so environments need
        not be saved. One that asks with another prompt or sampling than before gets new answers from there on. A part
        that was interrupted comes back as aborted, and `Resume` asks for the rest.

        The answer is checked here, before anything reads it: see `completion_of`.

        Args:
            index: position in the data of the group that the request belongs to.

        Raises:
            RequestError: a request of the same ID is in flight: completions are recorded by their request's ID, so
                that two requests of one ID would get one answer.
        """
        request = attempt.request
        request_id, sampling, prompt_digest = request.request_id, request.sampling, digest(request.prompt_token_ids)
        if request_id in self._asked:
            raise RequestError(f"request id {request_id!r} is in flight already; request ids must be unique")
        attempt.answer = known(request_id, prompt_digest, sampling)
        if attempt.answer is not None:
            yield
            return
        self._asked[request_id] = (index, prompt_digest, sampling)
        heard = Partial(request, attempt.on_chunk)
        try:
            with heard.attempt() as keep:
                if attempt.on_chunk is not None:  # else the engines stream nothing
                    attempt.on_chunk = keep
                yield
        except asyncio.CancelledError:  # who listens may have heard enough
            if (so_far := heard.so_far).token_ids:
                self._on_completion(CompletionRecord(index, prompt_digest, sampling, so_far))
            raise
        finally:
            del self._asked[request_id]
        attempt.answer = completion_of(attempt.answer, sampling.max_tokens)
        if attempt.answer.token_ids:
            self._on_completion(CompletionRecord(index, prompt_digest, sampling, attempt.answer))

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
