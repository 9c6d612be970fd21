"""Helpers of several adapters: names that another library lists, and seeds of episodes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from difflib import get_close_matches

from titan_rl.core.errors import ConfigError


def check_name(setting: str, name: str, known: Collection[str], what: str) -> None:
    """Check that a name is known.

    Args:
        setting: Name of the setting, for the message.
        name: Value of the setting.
        known: Known names.
        what: Kind of the names, in the plural.

    Raises:
        ConfigError: the name is unknown. The message lists the nearest names, or all names if there are few.
    """
    if name in known:
        return
    nearest = get_close_matches(name.lower(), sorted(known), n=8, cutoff=0.5)
    if nearest and len(known) > 20:
        known_names = f"the nearest are {', '.join(nearest)}"
    else:
        known_names = f"there are {', '.join(sorted(known)) or 'none'}"
    raise ConfigError(f"{setting} = {name!r} is not one of the {len(known)} {what}; {known_names}")


def train_seed(seed: int, index: int) -> int:
    """Seed of training sample number `index`: even, and at most 31 bits."""
    return _number(f"{seed}/{index}") & ~1


def validation_seed(index: int) -> int:
    """Seed of held-out sample number `index`: odd, and at most 31 bits."""
    return _number(f"validation/{index}") | 1


def _number(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
