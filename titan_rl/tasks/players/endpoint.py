"""A model behind OpenAI's chat protocol, as a player."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import httpx

from titan_rl.core.calls.plain import plain_json
from titan_rl.core.errors import GenerationError
from titan_rl.rollout.types import Message
from titan_rl.tasks.players.settings import Endpoint

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


class EndpointPlayer:
    """Asks it. What may pass, as a full server or one that cannot be reached, is tried again until the time is up.

    Args:
        transport: of httpx, in the place of the network.
    """

    def __init__(self, settings: Endpoint, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._settings = settings
        key = os.environ.get(settings.api_key)
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=settings.timeout_s,
            transport=transport,
        )

    async def reply(self, messages: Sequence[Message]) -> Message:
        """
        Raises:
            GenerationError: it refuses the request, or answers with what is no message.
            TimeoutError: it has not answered in time.
        """
        asked = {"max_tokens": self._settings.max_tokens, "temperature": self._settings.temperature}
        body = {"model": self._settings.model, "messages": [plain_json(message) for message in messages]}
        body |= {name: value for name, value in asked.items() if value is not None}
        async with asyncio.timeout(self._settings.timeout_s):
            response = await self._post(body)
        try:
            said = response.json()["choices"][0]["message"]
            return {"role": "assistant", "content": str(said.get("content") or "")}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise GenerationError(f"{self._url} answered with what is no message: {error!r}") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                response = await self._client.post(self._url, json=body)
            except httpx.TransportError:
                response = None
            if response is not None and response.status_code == 200:
                return response
            if response is not None and response.status_code != 429 and response.status_code < 500:
                raise GenerationError(f"{self._url} answered {response.status_code}: {response.text[:200]}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
