"""Messages and server of the relay: JSON with its length, and chunks with a header. Received data is never executed."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay.shard_copy import ShardCopy

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BIIIq")  # kind, index, bytes, CRC, base
_MOST = 1 << 20  # largest number of bytes of a message
SILENCE_S = 3.0
"""Seconds of silence after which the other end counts as dead. A sender that is itself waiting sends WAIT several times
in this time."""


class Kind(IntEnum):
    """Kind of data after the header of a chunk."""

    RAW = 0
    DELTA = 1
    WAIT = 2  # no data: the sender is waiting
    FAILED = 3  # the reason, as text
    STEP = 4  # a delta to an intermediate version; another delta of the same chunk follows


@dataclass(frozen=True, slots=True)
class Head:
    kind: Kind
    index: int  # index of the chunk
    num_bytes: int
    crc: int  # CRC-32 of a delta
    base: int  # version to which a delta is applied


class ConnectionLostError(Exception):
    """The other end is gone, is silent, or breaks the protocol."""


def connect(address: str) -> socket.socket:
    """Connect to a server.

    Raises:
        ConnectionLostError: Nobody answers at this address.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), SILENCE_S)
    except OSError as error:
        raise ConnectionLostError(f"{address} cannot be reached: {error}") from error
    connection.settimeout(SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    _send_all(connection, _LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive the next message.

    Raises:
        ConnectionLostError: The other end is gone, is silent, or breaks the protocol.
        StateDictError: The other end reports that the request failed.
    """
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > _MOST:
        raise ConnectionLostError(f"a message of {length} bytes")
    try:
        message = json.loads(_receive(connection, length))
    except ValueError as error:
        raise ConnectionLostError(f"not a message: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionLostError("a message that is not an object")
    if "error" in message:
        raise StateDictError(str(message["error"]))
    return message


def ask(address: str, message: dict[str, Any]) -> dict[str, Any]:
    """Send one message and return the answer. The other end may first report that it is still working on it.

    Raises:
        ConnectionLostError: The other end did not answer.
        StateDictError: See `receive`.
    """
    with connect(address) as connection:
        send(connection, message)
        while (answer := receive(connection)).get("wait"):
            pass
        return answer


def send_chunk(
    connection: socket.socket,
    kind: Kind,
    index: int = 0,
    data: NDArray[np.uint8] | bytes = b"",
    crc: int = 0,
    base: int = 0,
) -> None:
    _send_all(connection, _HEAD.pack(kind, index, len(data), crc, base))
    if len(data):
        _send_all(connection, data if isinstance(data, bytes) else data.data)


def receive_head(connection: socket.socket) -> Head:
    """Receive the header of the next chunk.

    Raises:
        ConnectionLostError: The other end is gone, is silent, or breaks the protocol.
        StateDictError: The other end reports a failure.
    """
    kind, index, num_bytes, crc, base = _HEAD.unpack(_receive(connection, _HEAD.size))
    if kind == Kind.FAILED:
        raise StateDictError(_receive(connection, min(num_bytes, _MOST)).decode(errors="replace"))
    try:
        return Head(Kind(kind), index, num_bytes, crc, base)
    except ValueError as error:
        raise ConnectionLostError(f"not a chunk: {error}") from error


def receive_into(connection: socket.socket, memory: memoryview) -> Iterator[int]:
    """Receive exactly enough bytes to fill the memory, and yield the size of each piece as it arrives.

    Raises:
        ConnectionLostError: The other end is gone or silent.
    """
    while len(memory):
        try:
            received = connection.recv_into(memory)
        except OSError as error:
            raise ConnectionLostError(f"no data for {SILENCE_S:g} s, or {error}") from error
        if not received:
            raise ConnectionLostError("the other end closed the connection")
        memory = memory[received:]
        yield received


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    deque(receive_into(connection, memoryview(data)), maxlen=0)
    return bytes(data)


def _send_all(connection: socket.socket, data: bytes | memoryview) -> None:
    """Send in pieces, so that the time limit applies to each piece and a whole chunk may take longer on a slow link."""
    view = memoryview(data)
    try:
        while len(view):
            view = view[connection.send(view) :]
    except OSError as error:
        raise ConnectionLostError(f"the other end accepts no data: {error}") from error


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """Address of one shard for other hosts. Part of the manifest."""

    address: str  # "10.0.0.1:4711"
    key: str  # identifies the shards of this rank, on any host
    version: int
    token: str  # authorizes reading


logger = logging.getLogger(__name__)

Message = dict[str, Any]
Answer = Callable[[Message], Message]

BEAT_S = SILENCE_S / 6


class RelayServer:
    """Server that sends copies of shards and answers requests.

    Args:
        interface: Address at which others reach this process, and the only one at which it listens.
        answers: Handlers of requests, by name. Each request is handled in a new thread.

    Raises:
        StateDictError: The server cannot listen at this address.
    """

    def __init__(self, interface: str, **answers: Answer) -> None:
        try:
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            self._listening = socket.create_server((interface, 0), family=family, backlog=256)
        except OSError as error:
            raise StateDictError(f"cannot listen on {interface}: {error}; is it an address of this host?") from error
        host, port, *_ = self._listening.getsockname()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.sent_bytes = 0
        self._answers = answers
        self._tokens: set[str] = set()
        self._copies: dict[tuple[str, int], ShardCopy] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def admit(self, token: str) -> None:
        """Accept requests with this token."""
        self._tokens.add(token)

    def offer(self, key: str, copy: ShardCopy) -> None:
        """Make a copy available to readers."""
        with self._lock:
            self._copies[key, copy.version] = copy

    def withdraw(self, key: str, version: int, problem: str = "the version was released") -> None:
        with self._lock:
            copy = self._copies.pop((key, version), None)
        if copy is not None:
            copy.withdraw(problem)

    def copies(self, key: str) -> dict[int, ShardCopy]:
        """Available copies of a key, by version."""
        with self._lock:
            return {version: copy for (of, version), copy in self._copies.items() if of == key}

    def close(self) -> None:
        """Close all connections. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_ones = [*self._connections, self._listening]
        for connection in open_ones:
            with suppress(OSError):  # the connection has ended already
                connection.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                logger.exception("a reader of weights could not connect")
                time.sleep(BEAT_S)  # out of file descriptors, for example
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="relay to a host", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(SILENCE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                message = receive(connection)
                given = str(message.get("token"))
                if not any(hmac.compare_digest(given.encode(), token.encode()) for token in list(self._tokens)):
                    send(connection, {"error": "the token is not one of this run"})
                elif message.get("ask") == "read":
                    self._send_copy(connection, message)
                else:
                    self._send_answer(connection, message)
        except (ConnectionLostError, StateDictError) as error:
            logger.debug("a reader of weights disconnected: %s", error)
        except Exception:
            logger.exception("a request of a reader of weights failed")
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _send_copy(self, connection: socket.socket, message: Message) -> None:
        """Send the chunks of a copy as they become ready, as the deltas since the reader's version if these are
        known."""
        key, version, base = str(message["key"]), int(message["version"]), message["base"]
        with self._lock:
            copy = self._copies.get((key, version))
        try:
            if copy is None:
                raise StateDictError(f"version {version} is not here")
            first, count = int(message["first"]), int(message["count"])
            for index in range(first, min(first + count, copy.num_chunks)):
                while not copy.wait_for(index, BEAT_S):
                    send_chunk(connection, Kind.WAIT)
                deltas = copy.deltas(index, base)
                for delta in deltas:
                    kind = Kind.DELTA if delta is deltas[-1] else Kind.STEP
                    send_chunk(connection, kind, index, delta.encoded, delta.crc, delta.base)
                if not deltas:
                    send_chunk(connection, Kind.RAW, index, copy.chunk(index))
                # Only a metric, so losing another thread's update does not matter.
                self.sent_bytes += sum(len(each.encoded) for each in deltas) or len(copy.chunk(index))
        except StateDictError as error:
            send_chunk(connection, Kind.FAILED, data=str(error).encode())

    def _send_answer(self, connection: socket.socket, message: Message) -> None:
        found: list[Message] = []
        done = threading.Event()

        def work() -> None:
            try:
                answer = self._answers.get(str(message["ask"]))
                if answer is None:  # a new process may listen at the port of a trainer that has ended
                    raise StateDictError("could not be read from the trainer: another process has its address")
                found.append(answer(message))
            except StateDictError as error:
                found.append({"error": str(error)})
            except Exception as error:
                logger.exception("a request about weights failed")
                found.append({"error": f"the request failed: {error!r}"})
            finally:
                done.set()

        threading.Thread(target=work, name="relay answer", daemon=True).start()
        while not done.wait(BEAT_S):
            send(connection, {"wait": True})
        send(connection, found[0])
