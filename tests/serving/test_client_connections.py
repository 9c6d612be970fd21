"""HTTP connections of a client: reused, limited in number, and released however a request ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from background import HANG_S

from titan_rl.serving.connections import Connections


class Server:
    """Server that answers once `may_answer` is set, and counts connections."""

    def __init__(self) -> None:
        self.opened = 0
        self.open = 0
        self.waiting = 0
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.closes_after_answer = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.waiting += 1
                self.arrived.set()
                await self.may_answer.wait()
                self.waiting -= 1
                body = head.split()[1]
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                await writer.drain()
                if self.closes_after_answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()
            self.left.set()

    async def until_waiting(self, count: int) -> None:
        while self.waiting < count:
            self.arrived.clear()
            await self.arrived.wait()


@asynccontextmanager
async def connected(most: int) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server()
    async with asyncio.timeout(HANG_S), await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(transport=Connections(most), base_url=f"http://127.0.0.1:{port}") as client:
            yield server, client


async def ask(client: httpx.AsyncClient, number: int) -> str:
    return (await client.get(f"/{number}", timeout=None)).text


async def test_concurrent_requests_share_at_most_the_allowed_connections() -> None:
    async with connected(most=3) as (server, client):
        asked = [asyncio.ensure_future(ask(client, number)) for number in range(20)]
        await server.until_waiting(3)
        server.may_answer.set()
        assert await asyncio.gather(*asked) == [f"/{number}" for number in range(20)]
        assert server.opened == 3


async def test_sequential_requests_reuse_a_connection() -> None:
    async with connected(most=64) as (server, client):
        server.may_answer.set()
        assert [await ask(client, number) for number in range(5)] == [f"/{number}" for number in range(5)]
        assert server.opened == 1


async def test_cancelled_request_frees_its_connection_slot() -> None:
    async with connected(most=1) as (server, client):
        first, second = (asyncio.ensure_future(ask(client, number)) for number in (1, 2))
        await server.until_waiting(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        server.may_answer.set()
        assert await second == "/2"


async def test_reconnects_after_the_server_closes_a_connection() -> None:
    async with connected(most=1) as (server, client):
        server.may_answer.set()
        server.closes_after_answer = True
        assert [await ask(client, number) for number in range(3)] == ["/0", "/1", "/2"]
        assert server.opened == 3


async def test_closing_the_client_fails_requests_in_flight() -> None:
    async with connected(most=2) as (server, client):
        asked = [asyncio.ensure_future(ask(client, number)) for number in range(3)]
        await server.until_waiting(2)
        await client.aclose()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(each, httpx.TransportError) for each in found), found


async def test_failed_connect_frees_its_slot_and_close_closes_all_connections() -> None:
    async with connected(most=1) as (server, client):
        for _ in range(3):
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:9/", timeout=None)
        server.may_answer.set()
        assert await ask(client, 1) == "/1"
    while server.open:
        server.left.clear()
        await asyncio.wait_for(server.left.wait(), HANG_S)
