"""Routing strategies: by load, in turn, by session, or by group; and the registry that finds them by name."""

from __future__ import annotations

import bisect
import hashlib
import heapq
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol

from cachetools import LRUCache

from titan_rl.core.calls.imports import find_function
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import ConfigError

MAX_SESSIONS = 1 << 18
"""Maximum number of sessions that a strategy remembers. If a run has more rollouts in flight, some lose their KV
cache."""


class Candidate(Protocol):
    """A replica as a strategy sees it. Compared by identity."""

    name: str
    load: int  # tokens reserved on the replica

    @property
    def serving(self) -> bool:
        """Whether the replica is in service."""
        ...


class Strategy(ABC):
    """Chooses among the replicas in service. An instance belongs to one router, and a second router refuses it.

    The router reports every change: `admit` and `withdraw` when a replica enters and leaves service, `released` after
    its load has fallen. Right after `choose(session_id, cost)` it reserves `cost` tokens on the returned replica.
    """

    _owner: object | None = None  # a class attribute, so that a user's strategy need not call `__init__`

    def belong_to(self, owner: object) -> None:
        """Note the router that uses the strategy. Called once, before any other method. A strategy that contains others
        calls this method of theirs, too.

        Raises:
            ValueError: the strategy belongs to another router, whose replicas would be chosen for this router's
                requests.
        """
        if self._owner is not None and self._owner is not owner:
            raise ValueError(
                f"this {type(self).__name__} is the strategy of another router, and would choose among the replicas of "
                "both; make one for each router"
            )
        self._owner = owner

    @abstractmethod
    def admit(self, candidate: Candidate) -> None:
        """Note that `candidate` may be chosen from now on."""

    @abstractmethod
    def withdraw(self, candidate: Candidate) -> None:
        """Note that `candidate`, which was admitted before, must not be chosen until it is admitted again."""

    @abstractmethod
    def choose(self, session_id: str | None, cost: int) -> Candidate:
        """Choose the replica for one request. At least one replica is admitted.

        Args:
            session_id: Identifier that is the same for all turns of a rollout: "<group_id>/<sibling>", followed by
                "/<seat>" if there are several seats. None for a request without a session.
            cost: Largest number of tokens of the request: prompt and token budget.
        """

    def released(self, candidate: Candidate) -> None:  # noqa: B027
        """Note that the load of `candidate` has fallen."""

    def moved(self, session_id: str, candidate: Candidate) -> None:  # noqa: B027
        """Note that a request of a session continues on `candidate`, which `choose` did not select. That replica now
        has the KV cache that later requests of the session can reuse."""

    def finish_session(self, session_id: str) -> None:  # noqa: B027
        """Note that a session sends no further request. Unknown ids are ignored."""


class RoundRobin(Strategy):
    """Round robin: each replica in turn, regardless of its load."""

    def __init__(self) -> None:
        self._turns: deque[Candidate] = deque()

    def admit(self, candidate: Candidate) -> None:
        self._turns.append(candidate)

    def withdraw(self, candidate: Candidate) -> None:
        self._turns.remove(candidate)

    def choose(self, session_id: str | None, cost: int) -> Candidate:
        turns = self._turns
        chosen = turns[0]
        turns.rotate(-1)
        return chosen


Entry = tuple[int, int, Candidate]  # load, number of the last choice of the candidate, candidate


class LeastLoaded(Strategy):
    """Least loaded: the replica with the fewest reserved tokens; among equals, the one chosen longest ago. O(log
    replicas).

    A heap of (load, last choice, replica) with lazy deletion. Each replica has one live entry, whose load is never
    above the true one. An increased load is corrected when its entry is popped; a decreased load pushes a new entry,
    and the old one is dropped when it is popped or when dead entries outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[Candidate, Entry] = {}
        self._choices = 0

    def admit(self, candidate: Candidate) -> None:
        self._choices += 1  # unique, so that entries never compare candidates
        self._post(candidate, self._choices)

    def withdraw(self, candidate: Candidate) -> None:
        del self._live[candidate]

    def choose(self, session_id: str | None, cost: int) -> Candidate:
        heap, live = self._heap, self._live
        while True:
            entry = heap[0]
            load, last_choice, candidate = entry
            if live.get(candidate) is not entry:
                heapq.heappop(heap)
            elif candidate.load != load:
                live[candidate] = entry = (candidate.load, last_choice, candidate)
                heapq.heapreplace(heap, entry)
            else:
                self._choices = choice = self._choices + 1
                live[candidate] = entry = (load + cost, choice, candidate)
                heapq.heapreplace(heap, entry)
                return candidate

    def released(self, candidate: Candidate) -> None:
        entry = self._live.get(candidate)
        if entry is not None and candidate.load < entry[0]:
            self._post(candidate, entry[1])

    def _post(self, candidate: Candidate, last_choice: int) -> None:
        self._live[candidate] = entry = (candidate.load, last_choice, candidate)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)


class WithFallback(Strategy):
    """Base of strategies that choose for some requests, and leave the others to `fallback`.

    Args:
        fallback: Strategy for the other requests. It receives every change. By default `LeastLoaded`.
    """

    def __init__(self, fallback: Strategy | None = None) -> None:
        self._fallback = fallback or LeastLoaded()

    def belong_to(self, owner: object) -> None:
        super().belong_to(owner)
        self._fallback.belong_to(owner)

    def admit(self, candidate: Candidate) -> None:
        self._fallback.admit(candidate)

    def withdraw(self, candidate: Candidate) -> None:
        self._fallback.withdraw(candidate)

    def released(self, candidate: Candidate) -> None:
        self._fallback.released(candidate)

    def finish_session(self, session_id: str) -> None:
        self._fallback.finish_session(session_id)


class StickySession(WithFallback):
    """Sticky sessions: the replica that served the session before, for its KV cache; `fallback` chooses for new
    sessions.

    A session whose replica is out of service moves to another and stays there.

    Args:
        fallback: Chooses for new sessions; by default `LeastLoaded`.
        max_sessions: Number of sessions remembered; the least recently used is forgotten first.

    Raises:
        ValueError: `max_sessions` is less than 1.
    """

    def __init__(self, fallback: Strategy | None = None, max_sessions: int = MAX_SESSIONS) -> None:
        if max_sessions < 1:
            raise ValueError(f"StickySession.max_sessions is {max_sessions}; it must be at least 1")
        super().__init__(fallback)
        self._pins: LRUCache[str, Candidate] = LRUCache(max_sessions)

    def choose(self, session_id: str | None, cost: int) -> Candidate:
        if session_id is None:
            return self._fallback.choose(None, cost)
        pinned = self._pins.get(session_id)
        if pinned is None or not pinned.serving:
            self._pins[session_id] = pinned = self._fallback.choose(session_id, cost)
        return pinned

    def moved(self, session_id: str, candidate: Candidate) -> None:
        self._pins[session_id] = candidate

    def finish_session(self, session_id: str) -> None:
        self._pins.pop(session_id, None)
        super().finish_session(session_id)


RingPoint = tuple[int, str, Candidate]  # hash, name and candidate; a name belongs to one candidate


class ConsistentHash(WithFallback):
    """Consistent hashing: the same session goes to the same replica without remembering sessions, even across restarts
    and several routers.

    Each replica owns `points` positions on a ring of hashes, and a session belongs to the next position after its own
    hash. When a replica leaves, only its sessions move (Karger et al., 1997). A choice costs O(log(replicas x points));
    the first one after replicas have come or gone also sorts the positions.

    Args:
        points: Number of positions of each replica. More positions spread the sessions more evenly.
        fallback: Chooses for requests without a session; by default `LeastLoaded`.

    Raises:
        ValueError: `points` is less than 1.
    """

    def __init__(self, points: int = 64, fallback: Strategy | None = None) -> None:
        if points < 1:
            raise ValueError(f"ConsistentHash.points is {points}; it must be at least 1")
        self._points = points
        super().__init__(fallback)
        self._positions: dict[str, list[RingPoint]] = {}  # by name
        self._ring: list[RingPoint] | None = None  # all positions, sorted; None if they have to be sorted again

    def admit(self, candidate: Candidate) -> None:
        super().admit(candidate)
        name = candidate.name
        self._positions[name] = [(_hash(f"{name}\n{point}"), name, candidate) for point in range(self._points)]
        self._ring = None

    def withdraw(self, candidate: Candidate) -> None:
        super().withdraw(candidate)
        del self._positions[candidate.name]
        self._ring = None

    def choose(self, session_id: str | None, cost: int) -> Candidate:
        if session_id is None:
            return self._fallback.choose(None, cost)
        if self._ring is None:  # once, however many replicas have joined or left since the last choice
            self._ring = sorted(chain.from_iterable(self._positions.values()))
        index = bisect.bisect(self._ring, _hash(session_id), key=itemgetter(0))
        return self._ring[index % len(self._ring)][2]


class GroupAffinity(WithFallback):
    """Group affinity: the siblings of a group go to one replica, because they have the same first prompt.

    As the fallback of `StickySession` it places first turns only: `StickySession(fallback=GroupAffinity())`.
    The group of the sessions "g7/3" and "g7/3/first" is "g7"; it is forgotten when its last session finishes.

    Args:
        fallback: Chooses for the first sibling of a group, and for requests without a session.
        max_groups: Number of groups remembered; the least recently used is forgotten first.

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
    """Hash of a text that is the same in all processes, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


StrategyFn = Callable[[int], Strategy]
"""Factory of a router's strategy, called with the maximum number of sessions to remember. A class is a factory, too."""

BY_NAME: dict[str, StrategyFn] = {
    "sticky": lambda max_sessions: StickySession(LeastLoaded(), max_sessions),
    "group_affinity": lambda max_sessions: StickySession(GroupAffinity(LeastLoaded()), max_sessions),
    "consistent_hash": lambda _: ConsistentHash(),
    "least_loaded": lambda _: LeastLoaded(),
    "round_robin": lambda _: RoundRobin(),
}
"""Built-in strategies that `routing.strategy` can name."""


def make_strategy(name: str) -> Strategy:
    """Make the strategy that `routing.strategy` names, for one router.

    Raises:
        ConfigError: there is no strategy of that name, or it cannot be made.
    """
    make = find_function("routing.strategy", name, BY_NAME)
    try:
        strategy: Any = make(MAX_SESSIONS)
    except Exception as error:
        raise ConfigError(f"routing.strategy = {name!r} failed: {describe(error)}") from error
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"routing.strategy = {name!r} returned {strategy!r}; it must return a Strategy")
    return strategy
