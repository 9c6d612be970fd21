"""Which lanes of a pool are taken."""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict


class LaneNumbers:
    """Numbers from 1 on for each pool, those given back first and the smallest of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[str, list[int]] = defaultdict(list)
        self._most: defaultdict[str, int] = defaultdict(int)

    def take(self, pool: str) -> int:
        with self._lock:
            if free := self._free[pool]:
                return heapq.heappop(free)
            self._most[pool] += 1
            return self._most[pool]

    def give_back(self, pool: str, number: int) -> None:
        with self._lock:
            heapq.heappush(self._free[pool], number)
