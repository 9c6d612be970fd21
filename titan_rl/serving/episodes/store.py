"""The episodes of a server, by their keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from dataclasses import replace

from titan_rl.core.errors import BusyError
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.serving.episodes.episode import Episode
from titan_rl.serving.episodes.limits import EpisodeLimits
from titan_rl.serving.policy.stream import StreamFn
from titan_rl.types import SamplingParams


class EpisodeStore:
    """The episodes of a server, by their keys.

    Args:
        renderer: of the episodes that are opened.

    A key is looked up by a digest that nobody outside can foresee, so that the time it takes tells nothing of other
    keys. It opens one episode and no other.

    Example:

        store = EpisodeStore(renderer)
        episode = store.open("g17.3")
        store.find(episode.key) is episode          # True
        episode.end()
        len(store)                                  # 0
    """

    def __init__(self, renderer: Renderer | None, limits: EpisodeLimits | None = None) -> None:
        self.renderer = renderer
        self._limits = limits or EpisodeLimits()
        self._secret = secrets.token_bytes(32)
        self._by_key: dict[bytes, Episode] = {}
        self._num_open = 0

    def __len__(self) -> int:
        """Episodes that are open."""
        return self._num_open

    def open(
        self,
        episode_id: str,
        *,
        stream: StreamFn | None = None,
        sampling: SamplingParams | None = None,
        session_id: str | None = None,
        max_turns: int | None = None,
    ) -> Episode:
        """A new episode. Whoever opens it ends it, or its time does.

        Args:
            stream, sampling, session_id: see `Episode`.
            max_turns: by default the store's limit.

        Raises:
            BusyError: as many are open as the limit allows.
            ValueError: the id is none.
        """
        if self._num_open >= self._limits.episodes:
            raise BusyError(f"{self._num_open} episodes are open, which is the limit")
        episode = Episode(
            episode_id,
            self.renderer,
            self._limits if max_turns is None else replace(self._limits, turns=max_turns),
            stream=stream,
            sampling=sampling,
            session_id=session_id,
            on_end=lambda: self._ended(digest),
        )
        digest = self._digest(episode.key)
        self._by_key[digest] = episode
        self._num_open += 1
        return episode

    def find(self, key: str) -> Episode | None:
        """The episode of this key, also for a while after its end; None where there is none."""
        episode = self._by_key.get(self._digest(key))
        if episode is None or not hmac.compare_digest(episode.key.encode(), key.encode("utf-8", "replace")):
            return None
        return episode

    def _ended(self, digest: bytes) -> None:
        self._num_open -= 1
        asyncio.get_running_loop().call_later(self._limits.keep_s, self._by_key.pop, digest)

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "replace"), key=self._secret, digest_size=32).digest()
