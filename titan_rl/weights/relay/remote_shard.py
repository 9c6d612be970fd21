"""How other hosts find what a rank of the trainer has published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """Where other hosts read one shard. It stands in the manifest."""

    address: str  # "10.0.0.1:4711"
    key: str  # of all shards of that rank, on whatever host they are
    version: int
    token: str  # who has it may read
