"""How much an agent may take up."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """
    Args:
        time_s: until an episode ends by itself.
        turns: of one episode; asking for another ends it.
        requests: of one episode, in flight at once; one more is a `BusyError`.
        memory_bytes: about what the conversations of one episode may keep; asking for more ends it.
        episodes: open at once; one more is a `BusyError`.
        keep_s: how long the key of an ended episode is still known, so that late requests are told how it ended.

    Raises:
        ValueError: names the limit that is not positive.
    """

    time_s: float = 3600.0
    turns: int = 1000
    requests: int = 64
    memory_bytes: int = 256 << 20
    episodes: int = 4096
    keep_s: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                value = getattr(self, each.name)
                raise ValueError(f"EpisodeLimits.{each.name} is {value!r}; it must be greater than 0")
