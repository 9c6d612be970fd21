"""Strategies that keep related sessions together, so that they share a prefix cache."""

from __future__ import annotations

import bisect
import hashlib
import re

from cachetools import LRUCache

from titan_rl.generation.router.strategies import Candidate, Strategy, WithFallback


class ConsistentHash(WithFallback):
    """The same session to the same replica without remembering sessions, also over restarts and several routers.

    Each replica owns `points` places on a ring of hashes, and a session belongs to the next place after its own
    hash: when a replica leaves, only its sessions move (Karger et al., 1997). O(log(replicas x points)), and a sort for
    the first choice after replicas have come or gone.

    Args:
        points: places of one replica; more spread the sessions more evenly.
        fallback: chooses for requests without a session.

    Raises:
        ValueError: `points` is less than 1.
    """

    def __init__(self, points: int = 64, fallback: Strategy | None = None) -> None:
        if points < 1:
            raise ValueError(f"ConsistentHash.points is {points}; it must be at least 1")
        self._points = points
        super().__init__(fallback)
        self._owners: dict[int, list[Candidate]] = {}  # of each place; several only where hashes are equal
        self._places: list[int] | None = None  # sorted; None while they are to be sorted anew

    def admit(self, candidate: Candidate) -> None:
        super().admit(candidate)
        for place in self._places_of(candidate):
            self._owners.setdefault(place, []).append(candidate)
        self._places = None

    def withdraw(self, candidate: Candidate) -> None:
        super().withdraw(candidate)
        for place in self._places_of(candidate):
            self._owners[place].remove(candidate)
            if not self._owners[place]:
                del self._owners[place]
        self._places = None

    def choose(self, session_id: str | None, cost: int) -> Candidate:
        if session_id is None:
            return self._fallback.choose(None, cost)
        if self._places is None:  # once, however many have come and gone since the last choice
            self._places = sorted(self._owners)
        index = bisect.bisect(self._places, _hash(session_id))
        return self._owners[self._places[index % len(self._places)]][0]

    def _places_of(self, candidate: Candidate) -> list[int]:
        return [_hash(f"{candidate.name}\n{point}") for point in range(self._points)]


class GroupAffinity(WithFallback):
    """The siblings of a group to one replica, because their first prompts are the same.

    As the fallback of `StickySession` it places first turns only: `StickySession(fallback=GroupAffinity())`.
    The group of the sessions "g7/3" and "g7/3/first" is "g7"; it is forgotten when its last session finishes.

    Args:
        fallback: chooses for the first sibling of a group, and for requests without a session.
        max_groups: groups remembered; the least recently used is forgotten first.

    Raises:
        ValueError: `max_groups` is less than 1.
    """

    def __init__(self, fallback: Strategy | None = None, max_groups: int = 16384) -> None:
        if max_groups < 1:
            raise ValueError(f"GroupAffinity.max_groups is {max_groups}; it must be at least 1")
        super().__init__(fallback)
        self._groups: LRUCache[str, tuple[Candidate, set[str]]] = LRUCache(max_groups)  # replica, open sessions

    def choose(self, session_id: str | None, cost: int) -> Candidate:
        if session_id is None:
            return self._fallback.choose(None, cost)
        group_id = _group_of(session_id)
        candidate, sessions = self._groups.get(group_id, (None, set[str]()))
        if candidate is None or not candidate.serving:
            candidate = self._fallback.choose(session_id, cost)
            self._groups[group_id] = (candidate, sessions)
        sessions.add(session_id)
        return candidate

    def finish_session(self, session_id: str) -> None:
        group_id = _group_of(session_id)
        if group_id in self._groups:
            sessions = self._groups[group_id][1]
            sessions.discard(session_id)
            if not sessions:
                del self._groups[group_id]
        super().finish_session(session_id)


def _group_of(session_id: str) -> str:
    return _SIBLING_AND_SEAT.sub("", session_id) or session_id


_SIBLING_AND_SEAT = re.compile(r"/[^/]*(?:(?<=\d)/[^/\d][^/]*)?$")


def _hash(text: str) -> int:
    """Stable over processes, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
