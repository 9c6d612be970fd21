"""Requests of one group, and the steps around each request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Protocol

from titan_rl.generation.continuation import Attempt, Generation, Resume
from titan_rl.generation.recording import Recorder
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.types import Completion, FinishReason, SamplingParams

SUSPEND_TIMEOUT_S = 3600.0
"""Longest time that a rollout waits while its group or all generation is interrupted."""


class Playing(Protocol):
    """Counts of the requests of a running group; see `RunningGroup`."""

    def request(self, session_id: str | None) -> AbstractContextManager[object]:
        """Count a request for the length of the block."""
        ...


class Suspendable(Protocol):
    """Suspension of a group; see `Suspension`."""

    @property
    def is_suspended(self) -> bool: ...

    async def wait_resumed(self) -> None: ...

    def request(
        self, request_id: str, abort: Callable[[Collection[str]], Awaitable[object]]
    ) -> AbstractContextManager[bool]: ...


@dataclass(eq=False)
class GroupRequests:
    """The `GenerateFn` of one group. Pauses and suspensions only delay the requests of a training group.

    A rollout worker has one `GroupRequests` for each of its groups, made of the attributes of the controller's.

    Args:
        router: Router that answers the requests.
        playing: Counts the requests.
        recorder: Recorder of a training group; None for a validation group, which is neither suspended, recorded nor
            resumed.
        suspension: Suspension of a training group.
        room: Awaited before each attempt of a training group, so that the record keeps up.
        max_context: Largest number of tokens of prompt and completion together.
        version: Version that the requests name, because the generators pull later ones meanwhile. Only for validation
            groups.
    """

    router: GeneratorRouter
    playing: Playing
    _: KW_ONLY
    recorder: Recorder | None = None
    suspension: Suspendable | None = None
    room: Callable[[], Awaitable[object]] | None = None
    max_context: int | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if self.recorder is None:
            naming = [] if self.version is None else [partial(_named, self.version)]
            self._generation = Generation(self.router.stream, around_attempt=naming)
        else:
            self._generation = Generation(
                self.router.stream,
                resume=Resume(self._both_open, SUSPEND_TIMEOUT_S, max_context=self.max_context),
                ready=self.room,
                around_attempt=[self.recorder.step, self._suspendable],
            )

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        generate = self._generation
        with self.playing.request(session_id):
            return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)

    async def _both_open(self) -> None:
        assert self.suspension is not None
        await self.suspension.wait_resumed()
        await self.router.wait_resumed()

    @contextmanager
    def _suspendable(self, attempt: Attempt) -> Generator[None]:
        request_id = attempt.request.request_id
        assert self.suspension is not None
        with self.suspension.request(request_id, self.router.abort) as may_be_sent:
            if not may_be_sent:
                attempt.answer = Completion(request_id, [], [], FinishReason.ABORT, ())
            yield


@contextmanager
def _named(version: int, attempt: Attempt) -> Generator[None]:
    attempt.request = replace(attempt.request, version=version)
    yield
