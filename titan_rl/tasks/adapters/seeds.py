"""Seeds of episodes: those of training are even, those of validation odd."""

from __future__ import annotations

import hashlib


def train_seed(seed: int, index: int) -> int:
    """Seed of training sample number `index`; at most 31 bits."""
    return _number(f"{seed}/{index}") & ~1


def validation_seed(index: int) -> int:
    return _number(f"validation/{index}") | 1


def _number(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
