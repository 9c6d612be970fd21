"""A generator actor as the router sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_rl.actors.peer import Peer
from titan_rl.actors.token_stream import TokenInlet
from titan_rl.errors import ActorDiedError, GenerationError
from titan_rl.routing.replica import OnTokens, PauseMode
from titan_rl.statedict.board import VersionBoard
from titan_rl.types import Completion, SamplingParams


class ActorReplica:
    """The `StreamingReplica` of one `GeneratorActor`.

    It finds manifests on the board, and posts there what a pull measured. Tokens arrive while `inlet.run` runs.
    """

    def __init__(self, peer: Peer, actor: Any, board: VersionBoard) -> None:
        self.name = peer.name
        self.peer = peer
        self.inlet = TokenInlet()
        self._actor = actor
        self._board = board

    async def open_stream(self) -> None:
        """Have the actor tell of tokens ahead of their completion."""
        await self._call(self._actor.stream_into, self.inlet.port)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        return await self._call(self._actor.generate, prompt_token_ids, request_id, session_id, sampling)

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
        on_tokens: OnTokens,
    ) -> Completion:
        self.inlet.listen(request_id, on_tokens)
        try:
            return await self.generate(
                prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
            )
        finally:
            self.inlet.forget(request_id)

    async def pull(self, version: int) -> None:
        figures = await self._call(self._actor.pull, self._board.manifest_of(version))
        self._board.note_pull(self.name, figures)

    async def pause(self, mode: PauseMode) -> None:
        await self._call(self._actor.pause, mode)

    async def resume(self) -> None:
        await self._call(self._actor.resume)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call(self._actor.abort, list(request_ids))

    async def close(self) -> None:
        await self._call(self._actor.close)

    async def _call(self, endpoint: Any, *args: Any) -> Any:
        try:
            return await self.peer.call(endpoint, *args)
        except ActorDiedError as error:
            raise GenerationError(str(error)) from error
