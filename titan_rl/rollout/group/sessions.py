"""Which sessions a group has opened, so that each is finished once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from titan_rl.rollout.group.callbacks import Callbacks
from titan_rl.types import Completion, GenerateFn, SamplingParams


class Sessions:
    """Finishes those that are left when its block ends: of rollouts that were run again, were cancelled, or were
    lost with the process that ran them.

    Example:

        with Sessions(router.finish_session) as sessions:
            await rollouter.run_group(sessions.track(router.generate), sample, ...)
    """

    def __init__(self, finish_session: Callable[[str], object]) -> None:
        self._finish_session = finish_session
        self._open: set[str] = set()
        self._callbacks = Callbacks()

    def track(self, generate: GenerateFn) -> GenerateFn:
        """`generate`, whose calls open their session."""

        async def tracked(
            prompt_token_ids: Sequence[int],
            *,
            request_id: str,
            session_id: str | None = None,
            sampling: SamplingParams,
        ) -> Completion:
            if session_id is not None:
                self._open.add(session_id)
            return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)

        return tracked

    def finish(self, session_id: str) -> None:
        """No further request of this session comes. One that is not open is left alone."""
        if session_id in self._open:
            self._open.discard(session_id)
            self._callbacks.call("finish_session", self._finish_session, session_id)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for session_id in sorted(self._open):
            self.finish(session_id)
