"""What a server takes on. Whatever goes beyond is answered at once, with the status that says so."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """
    Args:
        head_bytes: of a request, its path, headers and trailers; the connection of one with more is closed.
        head_s: until a request's headers have arrived; later the connection is closed.
        body_bytes: of a request; more is a 413.
        body_s: until a request's body has arrived; later is a 408.
        num_choices: completions of one request (its `n`, and its prompts); more is a 400.
        num_places: completions under way at once; a request that finds too few free is a 429 with `Retry-After`.
        request_s: until a request is answered in full, pauses included; later is a 504. A stream that has begun ends
            with the error as its last event.
        read_s: until a client goes on reading what is sent to it; later it counts as gone.
        keep_alive_s: between two signs of life of a stream that has nothing to tell.
        num_conversations: that are remembered, to keep their tokens when they come back as messages.
        conversation_turns: of each of them; one with more begins anew.
        conversation_bytes: about what all of them may keep in memory.
        response_bytes: of responses that are stored, with their conversations, to be gone on from or asked for again;
            and as much of the conversations of message threads.

    Raises:
        ValueError: names the limit that is not positive.
    """

    head_bytes: int = 64 << 10
    head_s: float = 60.0
    body_bytes: int = 8 << 20
    body_s: float = 60.0
    num_choices: int = 128
    num_places: int = 4096
    request_s: float = 3600.0
    read_s: float = 60.0
    keep_alive_s: float = 15.0
    num_conversations: int = 4096
    conversation_turns: int = 1024
    conversation_bytes: int = 1 << 30
    response_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                value = getattr(self, field.name)
                raise ValueError(f"ServerLimits.{field.name} is {value!r}; it must be greater than 0")
