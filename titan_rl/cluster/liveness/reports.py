"""What the lookout of a host and the controller tell each other: lines of JSON."""

from __future__ import annotations

import json
from asyncio import StreamReader, StreamWriter
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_rl.cluster.liveness.vital_signs import Signs

LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """Of the processes of one host. It is sent several times a second, and so is the sign that the host is there.

    Args:
        number: counts up. The answer has it.
        ended: how processes ended, by pid, until the controller has said that it knows.
        signs: of those that give none, by pid.
        leaving: why the host is about to go, and is to be drained; empty while it stays.
    """

    number: int
    ended: dict[int, str] = field(default_factory=dict[int, str])
    signs: dict[int, Signs] = field(default_factory=dict[int, Signs])
    leaving: str = ""

    def message(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(message: dict[str, Any]) -> Report:
        """
        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        return Report(
            int(message["number"]),
            {int(pid): str(how) for pid, how in message["ended"].items()},
            {int(pid): Signs(**signs) for pid, signs in message["signs"].items()},
            str(message["leaving"]),
        )


def send(writer: StreamWriter, message: dict[str, Any]) -> None:
    """Hand a message on; a connection that is gone takes it, too."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: StreamReader) -> dict[str, Any]:
    """The next message.

    Raises:
        ConnectionError: the connection has ended, or what comes is no message.
    """
    try:
        line = await reader.readline()
        message = json.loads(line) if line else None
    except (ValueError, OSError) as error:
        raise ConnectionError(f"no message: {error!r}") from error
    if not isinstance(message, dict):
        raise ConnectionError("it has ended")
    return message
