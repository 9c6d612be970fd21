"""Who answers other hosts, and the processes of this one: a thread a connection, for those who have a key."""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay.messages import SILENCE_S, ConnectionLostError, Kind, receive, send, send_chunk
from titan_rl.weights.relay.shard_copy import ShardCopy

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Answer = Callable[[Message], Message]

BEAT_S = SILENCE_S / 6


class RelayServer:
    """Sends copies of shards, and answers what it is asked.

    Args:
        interface: the address at which others reach this process; it listens there alone.

    Raises:
        StateDictError: it cannot listen there.
    """

    def __init__(self, interface: str) -> None:
        try:
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            self._listening = socket.create_server((interface, 0), family=family, backlog=256)
        except OSError as error:
            raise StateDictError(
                f"{interface} cannot be listened on: {error}; is it an address of this host?"
            ) from error
        host, port, *_ = self._listening.getsockname()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.sent_bytes = 0
        self._answers: dict[str, Answer] = {}
        self._tokens: set[str] = set()
        self._copies: dict[tuple[str, int], ShardCopy] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def answer(self, name: str, answer: Answer) -> None:
        """Who asks for `name` is told what this returns. It runs in a thread of its own."""
        self._answers[name] = answer

    def admit(self, token: str) -> None:
        """Who says this may ask."""
        self._tokens.add(token)

    def offer(self, key: str, copy: ShardCopy) -> None:
        """From now on it can be read."""
        with self._lock:
            self._copies[key, copy.version] = copy

    def withdraw(self, key: str, version: int, problem: str = "the version was released") -> None:
        with self._lock:
            copy = self._copies.pop((key, version), None)
        if copy is not None:
            copy.withdraw(problem)

    def copies(self, key: str) -> dict[int, ShardCopy]:
        """By version."""
        with self._lock:
            return {version: copy for (of, version), copy in self._copies.items() if of == key}

    def close(self) -> None:
        """Nobody is answered any more. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_ones = [*self._connections, self._listening]
        for connection in open_ones:
            _end(connection)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                logger.exception("a reader of weights could not connect")
                time.sleep(BEAT_S)  # no descriptors, say
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
            logger.debug("a reader of weights went away: %s", error)
        except Exception:
            logger.exception("a reader of weights was not answered")
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _send_copy(self, connection: socket.socket, message: Message) -> None:
        """Send the chunks of a copy as they become ready, each as the deltas since the asker's version if known."""
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
                # A figure: one lost to another thread does not matter.
                self.sent_bytes += sum(len(each.encoded) for each in deltas) or len(copy.chunk(index))
        except StateDictError as error:
            send_chunk(connection, Kind.FAILED, data=str(error).encode())

    def _send_answer(self, connection: socket.socket, message: Message) -> None:
        found: list[Message] = []
        done = threading.Event()

        def work() -> None:
            try:
                found.append(self._answers[str(message["ask"])](message))
            except StateDictError as error:
                found.append({"error": str(error)})
            except Exception as error:
                logger.exception("a question about weights was not answered")
                found.append({"error": f"it was not answered: {error!r}"})
            finally:
                done.set()

        threading.Thread(target=work, name="relay answer", daemon=True).start()
        while not done.wait(BEAT_S):
            send(connection, {"wait": True})
        send(connection, found[0])


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)
