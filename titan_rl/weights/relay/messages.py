"""What hosts say to each other: JSON with its length, and chunks with a head of their own. Nothing that is read is
executed."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_rl.core.errors import StateDictError

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BIIIq")  # kind, index, bytes, CRC, base
_MOST = 1 << 20  # bytes of a message
SILENCE_S = 3.0
"""Who says nothing for so long is gone. A sender that waits itself says so several times within it."""


class Kind(IntEnum):
    """What follows the head of a chunk."""

    RAW = 0
    DELTA = 1
    WAIT = 2  # nothing: the sender waits, too
    FAILED = 3  # what is wrong, as text
    STEP = 4  # a delta to a version between, which another delta of the same chunk follows


@dataclass(frozen=True, slots=True)
class Head:
    kind: Kind
    index: int  # of the chunk
    num_bytes: int
    crc: int  # of a delta
    base: int  # the version that a delta is applied to


class ConnectionLostError(Exception):
    """The other end is gone, silent, or does not talk like one."""


def connect(address: str) -> socket.socket:
    """
    Raises:
        ConnectionLostError: nobody answers there.
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
    """The next message.

    Raises:
        StateDictError: the other end says that it could not do what it was asked.
    """
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > _MOST:
        raise ConnectionLostError(f"a message of {length} bytes")
    try:
        message = json.loads(_receive(connection, length))
    except ValueError as error:
        raise ConnectionLostError(f"no message: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionLostError("a message that is no object")
    if "error" in message:
        raise StateDictError(str(message["error"]))
    return message


def ask(address: str, message: dict[str, Any]) -> dict[str, Any]:
    """One message there, and the answer. Ahead of it the other end may say that it works on it.

    Raises:
        ConnectionLostError: it did not answer.
        StateDictError: as of `receive`.
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
    """
    Raises:
        StateDictError: the other end says that it could not.
    """
    kind, index, num_bytes, crc, base = _HEAD.unpack(_receive(connection, _HEAD.size))
    if kind == Kind.FAILED:
        raise StateDictError(_receive(connection, min(num_bytes, _MOST)).decode(errors="replace"))
    try:
        return Head(Kind(kind), index, num_bytes, crc, base)
    except ValueError as error:
        raise ConnectionLostError(f"no chunk: {error}") from error


def receive_into(
    connection: socket.socket, memory: memoryview, came: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Fill the memory.

    Args:
        came: told of every piece how many bytes it has; what it raises ends this.
    """
    while len(memory):
        try:
            received = connection.recv_into(memory)
        except OSError as error:
            raise ConnectionLostError(f"nothing came for {SILENCE_S:g} s, or {error}") from error
        if not received:
            raise ConnectionLostError("the other end closed the connection")
        came(received)
        memory = memory[received:]


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    return bytes(data)


def _send_all(connection: socket.socket, data: bytes | memoryview) -> None:
    """In pieces: what counts as silence is a piece that does not go, not a whole chunk over a slow link."""
    view = memoryview(data)
    try:
        while len(view):
            view = view[connection.send(view) :]
    except OSError as error:
        raise ConnectionLostError(f"the other end takes nothing: {error}") from error
