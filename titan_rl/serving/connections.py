"""HTTP connections of a client. The cost per request does not grow with their number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx


class Connections(httpx.AsyncBaseTransport):
    """HTTP transport to one server, with one connection per concurrent request.

    Each connection is a separate httpcore pool. For each request, a pool looks at all of its connections, and for each
    idle connection at all of them again. With 64 concurrent requests in one pool, this takes more than half of a
    client's CPU time.

    Args:
        most: Maximum number of connections. Further requests wait for one.
    """

    def __init__(self, most: int) -> None:
        self._slots = asyncio.Semaphore(most)
        self._ssl = httpx.create_ssl_context(trust_env=False)  # shared, because this takes milliseconds
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._busy: set[httpx.AsyncHTTPTransport] = set()
        self._is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._slots.acquire()
        connection = self._idle.pop() if self._idle else self._new()
        self._busy.add(connection)
        try:
            if self._is_closed:
                raise httpx.ConnectError("the client is closed", request=request)
            response = await connection.handle_async_request(request)
        except BaseException:
            self._busy.discard(connection)
            self._slots.release()
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Answer(response.stream, self, connection)
        return response

    def _new(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        return httpx.AsyncHTTPTransport(verify=self._ssl, trust_env=False, limits=limits)

    async def release(self, connection: httpx.AsyncHTTPTransport) -> None:
        """Keep a connection for the next request. httpcore closes it if its answer was not read to the end."""
        self._busy.discard(connection)
        self._slots.release()
        if self._is_closed:
            await connection.aclose()
        else:
            self._idle.append(connection)

    async def aclose(self) -> None:
        """Close all connections. Requests in flight, and those that wait for a connection, fail."""
        self._is_closed = True
        connections, self._idle = [*self._idle, *self._busy], []
        for connection in connections:
            await connection.aclose()


class _Answer(httpx.AsyncByteStream):
    """Body of a response. Closing it returns the connection."""

    def __init__(
        self, stream: httpx.AsyncByteStream, connections: Connections, connection: httpx.AsyncHTTPTransport
    ) -> None:
        self._stream = stream
        self._connections = connections
        self._connection: httpx.AsyncHTTPTransport | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            await self._stream.aclose()
        finally:
            await self._connections.release(connection)
