"""Misbehaving connections: none occupies a slot or the server for longer than the limits allow."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from background import HANG_S
from served import Served, served, until

from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import HeadWithBody, serve

PATH = "/inference/v1/generate"
SHORT = ServerLimits(head_s=0.05, body_s=0.05, body_bytes=10_000, read_s=0.05, request_s=30.0)


def request(max_tokens: int = 8, **more: Any) -> bytes:
    asked = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": max_tokens}, **more}
    return with_head(json.dumps(asked).encode())


def with_head(body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
    return f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + body


@asynccontextmanager
async def connected(limits: ServerLimits = SHORT, **engine: Any) -> AsyncIterator[tuple[Served, Connection]]:
    async with (
        served(engine=engine, count=1, limits=limits) as stage,
        serve(stage.app) as url,
        asyncio.timeout(HANG_S),
    ):
        connection = Connection(int(url.rpartition(":")[2]))
        try:
            yield stage, connection
        finally:
            connection.socket.close()


class Connection:
    """Raw client connection, whose bytes the test chooses."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def rest(self) -> bytes:
        """Receive until the server closes the connection."""
        said = b""
        with suppress(ConnectionResetError):  # it was still sending
            while data := await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16):
                said += data
        return said


@pytest.mark.parametrize("sent", [b"", b"POST ", request()[:60]])
async def test_closes_the_connection_when_the_request_head_times_out(sent: bytes) -> None:
    async with connected() as (_, connection):
        await connection.send(sent)
        assert await connection.rest() == b""


async def test_head_timeout_applies_to_a_second_request() -> None:
    patient = ServerLimits(head_s=1.0, request_s=30.0)  # enough time to answer the first request
    async with connected(patient) as (_, connection):
        await connection.send(request() + b"POST ")
        assert (await connection.rest()).startswith(b"HTTP/1.1 200 ")


async def test_closes_the_connection_of_an_endless_request_head() -> None:
    async with connected(ServerLimits(request_s=30.0)) as (_, connection):
        await connection.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        with pytest.raises(ConnectionError):  # noqa: PT012 the connection closes during a send
            for _ in range(1000):
                await connection.send(b"x" * 10_000)
                await asyncio.sleep(0)


LONG = b"a" * 5000
CHUNKED = with_head(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + LONG + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + LONG + b": x\r\n\r\n",
        b"GET /health?" + LONG + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        CHUNKED + b"0\r\nx: " + LONG + b"\r\n\r\n",
    ],
    ids=["value", "many", "name", "path", "trailer"],
)
async def test_rejects_an_oversized_head_sent_at_once(sent: bytes) -> None:
    async with connected(ServerLimits(head_bytes=4096, request_s=30.0)) as (_, connection):
        await connection.send(sent)
        assert await connection.rest() == b""


async def test_accepts_pipelined_heads_within_the_limit() -> None:
    async with connected(ServerLimits(head_bytes=4096, request_s=30.0)) as (_, connection):
        head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + LONG[:3000] + b"\r\n"
        await connection.send((head + b"\r\n") * 3 + head + b"connection: close\r\n\r\n")
        assert (await connection.rest()).count(b"HTTP/1.1 200 ") == 4


async def test_closes_the_connection_after_rejecting_a_body() -> None:
    """The rest of the body is not read indefinitely."""
    async with connected() as (_, connection):
        await connection.send(with_head(b"", length=10**9))
        answering = asyncio.create_task(connection.rest())
        with pytest.raises(ConnectionError):  # noqa: PT012
            while True:
                await connection.send(b" " * 10_000)
                await asyncio.sleep(0.005)
        answering.cancel()


async def test_slowly_sent_body_times_out() -> None:
    async with connected() as (_, connection):
        await connection.send(with_head(b"", length=1000))
        answering = asyncio.create_task(connection.rest())
        while not answering.done():
            try:
                await connection.send(b" ")
            except ConnectionError:
                break
            await asyncio.wait([answering], timeout=0.01)
        assert (await answering).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("stream", [False, True])
async def test_half_closed_connection_counts_as_disconnected(stream: bool) -> None:
    async with connected(block_at_step=2) as (stage, connection):
        await connection.send(request(400, stream=stream))
        await until(lambda: stage.app.exchanges.num_completions_running == 1)
        connection.socket.shutdown(socket.SHUT_WR)
        await until(lambda: stage.app.exchanges.num_completions_running == 0)
        stage.engines.engines[0].release.set()
        await until(lambda: not any(replica.num_requests for replica in stage.router.replicas))
        assert stage.engines.engines[0].num_steps < 400


async def test_client_that_never_reads_counts_as_disconnected() -> None:
    """Its slot is freed, and its connection is closed although the client reads no more."""
    async with connected() as (stage, connection):
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asked = json.dumps(
            {
                "token_ids": [1],
                "sampling_params": {"max_tokens": 200, "logprobs": 0, "n": 64},
                "stream": True,
            }
        ).encode()
        await connection.send(with_head(asked))
        await until(lambda: stage.app.exchanges.num_completions_running > 0)
        await until(lambda: stage.app.exchanges.num_completions_running == 0)


class Written:
    """Transport that records each write."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.sent.append(b"closed")


async def test_response_head_is_merged_with_its_body_within_one_iteration() -> None:
    written = Written()
    transport: Any = HeadWithBody(written, asyncio.get_running_loop())  # pyright: ignore[reportArgumentType]
    transport.begin_response()
    transport.write(b"head ")
    assert written.sent == []
    transport.write(b"body")
    transport.write(b"more")
    assert written.sent == [b"head body", b"more"]
    transport.begin_response()
    transport.write(b"head alone")
    await asyncio.sleep(0)
    assert written.sent[2:] == [b"head alone"]
    transport.begin_response()
    transport.write(b"head at the end")
    transport.close()
    await asyncio.sleep(0)
    assert written.sent[3:] == [b"head at the end", b"closed"]
