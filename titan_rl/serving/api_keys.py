"""API keys, and the client or episode that a request's key belongs to."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import blake2b

from titan_rl.core.errors import ConfigError
from titan_rl.serving.conversations.caller import Caller, Client, Conversations
from titan_rl.serving.episode import KEY_PREFIX, Episode
from titan_rl.serving.episode_store import EPISODES, EpisodeStore
from titan_rl.serving.http.errors import ApiError

OPEN_PATHS = ("/health",)
ADMIN_PREFIX = "/admin/"


class Keys:
    """Keys of a server. They are compared in constant time, and never shown.

    Args:
        api: Keys of clients. Each opens everything but the admin calls. If there are none, the server is open.
        admin: Key that opens the admin calls and nothing else. Without it there are no admin calls.

    Raises:
        ConfigError: A key is empty, not ASCII, or both an admin's and a client's; or `api` is a single string.
    """

    def __init__(self, api: Iterable[str] = (), admin: str | None = None) -> None:
        if isinstance(api, str):
            raise ConfigError("the client keys are a single string; give a list of keys")
        api = tuple(api)
        for key in api if admin is None else (*api, admin):
            if not key or not all("!" <= character <= "~" for character in key):
                raise ConfigError("a server key is empty or has characters other than printable ASCII")
        self._api = tuple(key.encode() for key in api)
        self._admin = None if admin is None else admin.encode()
        if self._admin in self._api:
            raise ConfigError("the admin key is also a client key; use a different one")

    @property
    def required(self) -> bool:
        """Whether clients need a key."""
        return bool(self._api)

    def __repr__(self) -> str:
        return f"Keys({len(self._api)} of clients, {'an' if self._admin else 'no'} admin key)"

    def allow(self, path: str, given: bytes | None) -> bool:
        """Return whether a request to `path` with this key may pass."""
        if path in OPEN_PATHS:
            return True
        if path.startswith(ADMIN_PREFIX):
            return self._admin is not None and _is_one_of(given, (self._admin,))
        return not self._api or _is_one_of(given, self._api)


def _is_one_of(given: bytes | None, keys: tuple[bytes, ...]) -> bool:
    matches = [hmac.compare_digest(given or b"", key) for key in keys]  # compares all, so that the time reveals nothing
    return any(matches)


_PROTOCOLS = ("v1", "inference", "tokenize", "detokenize")


class Admission:
    """Admits requests, each as a request of a client or of an episode.

        key of an episode    its own URL, `/episodes/<id>/...`, and the protocols without that prefix
        key of a client      everything but the admin calls and the URLs of episodes
        admin key            the admin calls

    `/episodes/<id>/v1/chat/completions` is `/v1/chat/completions` of that episode, and likewise for all protocols.
    """

    def __init__(self, keys: Keys, conversations: Conversations | None, episodes: EpisodeStore | None) -> None:
        self._keys = keys
        self._conversations = conversations
        self._episodes = episodes

    def __call__(self, path: str, key: bytes | None) -> tuple[str, Caller]:
        """Check the key of a request.

        Args:
            path: Path of the request.
            key: Key that came with it; None if there was none.

        Returns:
            The path to serve, and the caller.

        Raises:
            ApiError: With status 401 if the key does not open this path.
        """
        if path in OPEN_PATHS:
            return path, self._client(key)
        if path.startswith(f"{EPISODES}/"):
            return self._of_episode(path, key)
        if (episode := self._episode(key)) is not None and path.removeprefix("/").partition("/")[0] in _PROTOCOLS:
            return path, episode
        if episode is not None or not self._keys.allow(path, key):
            raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        return path, self._client(key)

    def _of_episode(self, path: str, key: bytes | None) -> tuple[str, Caller]:
        episode_id, *rest = path.removeprefix(f"{EPISODES}/").split("/")
        episode = self._episode(key)
        if episode is None or episode.id != episode_id:
            raise ApiError(401, "the key is not this episode's", code="invalid_api_key")
        return f"/{'/'.join(rest)}" if rest and rest[0] in _PROTOCOLS else path, episode

    def _episode(self, key: bytes | None) -> Episode | None:
        """Find the episode of a key; None if it is not an episode's key.

        Raises:
            ApiError: With status 401 if the key has the form of an episode's key, but no known episode has it.
        """
        if key is None or not key.startswith(KEY_PREFIX.encode()):
            return None
        found = None if self._episodes is None else self._episodes.find(key.decode("latin-1"))
        if found is None:
            raise ApiError(401, "no episode has this key, or it ended long ago", code="invalid_api_key")
        return found

    def _client(self, key: bytes | None) -> Client:
        """Make the client of a key. Clients of a server without keys are distinguished by the keys that they happen to
        send."""
        return Client(blake2b(key or b"", digest_size=16).digest(), self._conversations)
