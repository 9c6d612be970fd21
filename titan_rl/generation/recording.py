"""Record of a group's answers, from which they are repeated if the group runs again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from titan_rl.core.arrays import token_array
from titan_rl.core.errors import RequestError
from titan_rl.core.pickling import quick_pickle
from titan_rl.generation.continuation import Attempt
from titan_rl.generation.request import Partial
from titan_rl.types import Completion, SamplingParams


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """16 bytes that two prompts share only if they are equal."""
    return hashlib.blake2b(token_array(token_ids).tobytes(), digest_size=16).digest()


@quick_pickle
@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Answer to one attempt at a request: a whole completion, or the part before an interruption.

    Attributes:
        index: Position of the group in the data.
    """

    index: int
    prompt_digest: bytes
    sampling: SamplingParams
    completion: Completion


class KnownAnswer(Protocol):
    """A recorded answer that is repeated to a group."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def completion(self) -> Completion: ...


KnownAnswers = Mapping[tuple[str, bytes], KnownAnswer]
"""Recorded answers of a group by request id and digest of the prompt."""

PendingRequests = dict[str, tuple[int, bytes, SamplingParams]]
"""Requests in flight by id: index of the group, digest of the prompt, and sampling."""


@dataclass(eq=False)
class Recorder:
    """Recorder of one group's answers. Its method `step` is a step of `Generation`.

    A new environment that receives the recorded answers reaches the state of its predecessor, so environments need not
    be saved. An environment that sends another prompt or sampling than before gets new answers from then on. An
    interrupted part is returned as aborted, and `Resume` asks for the rest.

    Args:
        index: Position of the group in the data.
        known: Returns the answers that are known at present.
        record: Receives each answer that has tokens.
        check: Returns a checked copy of an answer, before anything reads it; see `completion_of` in
            `rollout.checked_copies`.
        pending: Requests in flight, if several groups share them.
    """

    index: int
    known: Callable[[], KnownAnswers]
    record: Callable[[RecordedAnswer], object]
    check: Callable[[Any, int], Completion]
    pending: PendingRequests = field(default_factory=PendingRequests)

    @contextmanager
    def step(self, attempt: Attempt) -> Generator[None]:
        """Context of an attempt. Repeats the answer if it is known, and records it otherwise.

        Raises:
            RequestError: a request of the same ID is in flight. Answers are recorded by ID, so both would get the same.
        """
        request = attempt.request
        request_id, sampling, digest = request.request_id, request.sampling, prompt_digest(request.prompt_token_ids)
        if request_id in self.pending:
            raise RequestError(f"request id {request_id!r} is in flight already; request ids must be unique")
        known = self.known().get((request_id, digest))
        if known is not None and known.sampling == sampling:
            attempt.answer = known.completion
            yield
            return
        self.pending[request_id] = (self.index, digest, sampling)
        partial = Partial(request, attempt.on_chunk)
        try:
            with partial.attempt() as keep:
                if attempt.on_chunk is not None:  # without a receiver the engines stream nothing
                    attempt.on_chunk = keep
                yield
        except asyncio.CancelledError:  # for example a listener that has received enough tokens
            self._keep(digest, sampling, partial.so_far)
            raise
        finally:
            del self.pending[request_id]
        attempt.answer = self.check(attempt.answer, sampling.max_tokens)
        self._keep(digest, sampling, attempt.answer)

    def record_partial(self, tokens: Mapping[str, Completion]) -> None:
        """Record the tokens so far of the requests in flight.

        Args:
            tokens: Tokens so far of all requests, by id; see `GeneratorRouter.tokens_so_far`.
        """
        for request_id, (_, digest, sampling) in self.pending.items():
            if (so_far := tokens.get(request_id)) is not None:
                self._keep(digest, sampling, so_far)

    def _keep(self, digest: bytes, sampling: SamplingParams, answer: Completion) -> None:
        if answer.token_ids:
            self.record(RecordedAnswer(self.index, digest, sampling, answer))
