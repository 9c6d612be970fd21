"""Who may call what."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from titan_rl.core.errors import ConfigError

OPEN_PATHS = ("/health",)
ADMIN_PREFIX = "/admin/"


class Keys:
    """The keys of a server. They are compared in constant time, and never shown.

    Args:
        api: any of these opens everything but the admin calls. None at all: it is open.
        admin: opens the admin calls and nothing else. Without it there are none.

    Raises:
        ConfigError: a key is empty, not ASCII, or both an admin's and a client's; or `api` is one string.
    """

    def __init__(self, api: Iterable[str] = (), admin: str | None = None) -> None:
        if isinstance(api, str):
            raise ConfigError("the keys of clients are one string; give a list of keys")
        api = tuple(api)
        for key in api if admin is None else (*api, admin):
            if not key or not all("!" <= character <= "~" for character in key):
                raise ConfigError("a key of the server is empty or has other than printable ASCII characters")
        self._api = tuple(key.encode() for key in api)
        self._admin = None if admin is None else admin.encode()
        if self._admin in self._api:
            raise ConfigError("the admin key is also a client's; it must be one of its own")

    @property
    def required(self) -> bool:
        """Whether clients need a key."""
        return bool(self._api)

    def __repr__(self) -> str:
        return f"Keys({len(self._api)} of clients, {'an' if self._admin else 'no'} admin key)"

    def allow(self, path: str, given: bytes | None) -> bool:
        """Whether a request to `path` with this key may pass."""
        if path in OPEN_PATHS:
            return True
        if path.startswith(ADMIN_PREFIX):
            return self._admin is not None and _is_one_of(given, (self._admin,))
        return not self._api or _is_one_of(given, self._api)


def _is_one_of(given: bytes | None, keys: tuple[bytes, ...]) -> bool:
    matches = [hmac.compare_digest(given or b"", key) for key in keys]  # all of them, whichever it is
    return any(matches)
