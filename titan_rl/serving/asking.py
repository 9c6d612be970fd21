"""Asking a server over HTTP: its connections, its time limits, and what its refusals mean."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from titan_rl.core.errors import GenerationError, RequestError

REFUSED = frozenset({400, 404, 413, 415, 422})
"""What the request itself is to blame for. A missing key, a full server and a failing one are not."""

NOT_UNDERSTOOD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading an answer of any form raises. JSON that nests too deeply is a `RecursionError`."""


class Asking:
    """The requests for one endpoint. Faults of the connection are tried again. A server that is full, and says with a
    429 when to come again, is waited for.

    Args:
        api_key: sent as a bearer token.
        timeout_s: of one answer, all retries and waits included.
        connection_attempts: how often a connection is tried, ever more slowly.
        busy: status codes after which the server is asked again, too, as often as a connection is tried. By default a
            server that fails is heard of at once.
        transport: of httpx, in the place of the network.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        api_key: str | None,
        timeout_s: float,
        connection_attempts: int,
        max_connections: int,
        busy: frozenset[int] = frozenset(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if connection_attempts < 1:
            raise ValueError(f"connection_attempts is {connection_attempts}; it must be at least 1")
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._attempts = connection_attempts
        self._busy = busy
        self._client = httpx.AsyncClient(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=None,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections. Calls under way fail."""
        await self._client.aclose()

    async def post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        """An answer with status 200.

        Raises:
            RequestError: the server refuses the request.
            GenerationError: the server cannot be reached, fails, or is full for too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as scope:
                response = await self._until_not_busy(body, headers)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise GenerationError(f"{self.endpoint} did not answer within {self._timeout_s:g} s") from error
        if response.status_code != 200:
            said = f"{self.endpoint} answered {response.status_code}: {_message(response)}"
            raise RequestError(said) if response.status_code in REFUSED else GenerationError(said)
        return response

    async def _until_not_busy(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        asked = 1
        response = await self._post(body, headers)
        while True:
            pause_s = _full_for(response)
            if pause_s is None:
                if response.status_code not in self._busy or asked == self._attempts:
                    return response
                pause_s = _growing_pause(asked)
                asked += 1
            await asyncio.sleep(pause_s)
            response = await self._post(body, headers)

    async def _post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._client.post(self.endpoint, json=body, headers=headers)
            except httpx.TransportError as error:
                if attempt == self._attempts:
                    raise GenerationError(f"{self.endpoint} cannot be reached: {error!r}") from error
            except httpx.HTTPError as error:
                raise GenerationError(f"{self.endpoint} cannot be asked: {error!r}") from error
            await asyncio.sleep(_growing_pause(attempt))
        raise AssertionError("the last attempt returns or raises")


def is_int(value: Any) -> bool:
    """JSON's true is an `int` of Python, too."""
    return isinstance(value, int) and not isinstance(value, bool)


def _growing_pause(attempt: int) -> float:
    return min(2.0, 0.05 * 2**attempt)


def _full_for(response: httpx.Response) -> float | None:
    """Seconds after which a full server wants to be asked again; None if this is its answer."""
    after = response.headers.get("retry-after", "")
    return max(0.01, float(after)) if response.status_code == 429 and after.isdecimal() else None


def _message(response: httpx.Response) -> str:
    """What the server says, with the code that it has for programs."""
    try:
        error = response.json()["error"]
        code = error.get("code")
        return f"{error['message']}{f' ({code})' if isinstance(code, str) else ''}"
    except NOT_UNDERSTOOD:
        return response.text[:200]
