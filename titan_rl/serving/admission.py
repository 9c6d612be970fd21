"""Who a request is from, by its key."""

from __future__ import annotations

from hashlib import blake2b

from titan_rl.serving.conversations.caller import Caller, Client
from titan_rl.serving.conversations.sessions import Conversations
from titan_rl.serving.episodes.endpoints import EPISODES
from titan_rl.serving.episodes.episode import KEY_PREFIX, Episode
from titan_rl.serving.episodes.store import EpisodeStore
from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.http.keys import OPEN_PATHS, Keys

_PROTOCOLS = ("v1", "inference", "tokenize", "detokenize")


class Admission:
    """Lets a request in, as one of a client or of an episode.

        the key of an episode    its own URL, `/episodes/<id>/...`, and the protocols without that
        a client's               all but the admin calls and what is an episode's
        the admin's              the admin calls

    `/episodes/<id>/v1/chat/completions` is `/v1/chat/completions` of that episode, and so for all protocols.
    """

    def __init__(self, keys: Keys, conversations: Conversations | None, episodes: EpisodeStore | None) -> None:
        self._keys = keys
        self._conversations = conversations
        self._episodes = episodes

    def __call__(self, path: str, key: bytes | None) -> tuple[str, Caller]:
        """
        Args:
            path: of the request.
            key: that came with it.

        Returns:
            The path to serve, and who asks.

        Raises:
            ApiError: 401, the key does not open this.
        """
        if path in OPEN_PATHS:
            return path, self._client(key)
        if path.startswith(f"{EPISODES}/"):
            return self._of_episode(path, key)
        if (episode := self._episode(key)) is not None and path.removeprefix("/").partition("/")[0] in _PROTOCOLS:
            return path, episode
        if episode is not None or not self._keys.allow(path, key):
            raise _wrong_key()
        return path, self._client(key)

    def _of_episode(self, path: str, key: bytes | None) -> tuple[str, Caller]:
        episode_id, *rest = path.removeprefix(f"{EPISODES}/").split("/")
        episode = self._episode(key)
        if episode is None or episode.id != episode_id:
            raise ApiError(401, "the key is not this episode's", code="invalid_api_key")
        return f"/{'/'.join(rest)}" if rest and rest[0] in _PROTOCOLS else path, episode

    def _episode(self, key: bytes | None) -> Episode | None:
        """
        Raises:
            ApiError: 401, it is an episode's key, of none that is known.
        """
        if key is None or not key.startswith(KEY_PREFIX.encode()):
            return None
        found = None if self._episodes is None else self._episodes.find(key.decode("latin-1"))
        if found is None:
            raise ApiError(401, "there is no episode of this key, or it is long over", code="invalid_api_key")
        return found

    def _client(self, key: bytes | None) -> Client:
        """Clients of a server without keys are told apart by those they happen to send."""
        return Client(blake2b(key or b"", digest_size=16).digest(), self._conversations)


def _wrong_key() -> ApiError:
    return ApiError(401, "the key is missing or wrong", code="invalid_api_key")
