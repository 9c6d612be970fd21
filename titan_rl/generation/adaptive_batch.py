"""Adaptive batch size: the number of requests that the KV cache is expected to hold, from observed lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

MEMORY = 1024  # ended requests after which one counts for 1/e
BUCKETS_A_DOUBLING = 4
PRIOR_REQUESTS = 1.0  # that the prior counts for, at each length


class Growth(NamedTuple):
    """A request's tokens, prompt and answer: when it joined its batch, now, and at most."""

    start: int
    now: int
    most: int


class LengthsSeen:
    """A life table of contexts: of those that reached a length, how many ended there.

    A request is under observation from the length it joined with to the one it has, so neither a prompt, nor what
    an answer had before it was interrupted, nor an abort makes lengths look shorter (the actuarial estimate of a
    survival function, with late entries and censoring; Kaplan and Meier, 1958). At lengths that none has reached a
    request is taken to end at the rate of one in half of the longest there may be.

    Args:
        most: tokens that a request has at most.
    """

    def __init__(self, most: int) -> None:
        edges = [0.0, 16.0]
        while edges[-1] < most:
            edges.append(edges[-1] * 2 ** (1 / BUCKETS_A_DOUBLING))
        self._edges = np.array(edges)
        self._widths = np.diff(self._edges)
        prior = PRIOR_REQUESTS * self._widths
        self._prior_tokens, self._prior_ends = prior, prior * 2 / most
        self._tokens = np.zeros_like(prior)  # generated at such lengths
        self._ends = np.zeros_like(prior)

    @property
    def horizon(self) -> Any:
        """[num_lengths] tokens from now, at which it is worth looking ahead."""
        return self._edges

    def ended(self, growth: Growth, *, was_aborted: bool) -> None:
        """A request is no longer observed. Of one that was aborted nobody knows where it would have ended."""
        self._tokens += self._tokens_at([growth])
        if not was_aborted:
            fade = 1 - 1 / MEMORY
            self._tokens, self._ends = self._tokens * fade, self._ends * fade
            self._ends[min(np.searchsorted(self._edges, growth.now), len(self._ends)) - 1] += 1

    def survival(self, running: Sequence[Growth], asked: Iterable[Growth]) -> Any:
        """The share of requests like each of `asked` that run on, for each length of the horizon.

        Args:
            running: what is under observation now.

        Returns:
            [num_asked, num_lengths], of which the first column is 1
        """
        tokens = self._tokens + self._prior_tokens + self._tokens_at(running)
        rates = (self._ends + self._prior_ends) / tokens
        hazard = np.concatenate([[0.0], np.cumsum(rates * self._widths)])  # at each edge
        sizes = np.array([(growth.now, growth.most) for growth in asked], dtype=float).reshape(-1, 2)
        now, most = sizes[:, :1], sizes[:, 1:]
        later = now + self.horizon
        alive = np.exp(np.interp(now, self._edges, hazard) - np.interp(later, self._edges, hazard))
        return np.where(later <= most, alive, 0.0)

    def _tokens_at(self, growths: Sequence[Growth]) -> Any:
        """[num_buckets] tokens that these have generated at such lengths."""
        sizes = np.array([(growth.start, growth.now) for growth in growths], dtype=float).reshape(-1, 2, 1)
        in_bucket = np.clip(sizes - self._edges[:-1], 0.0, self._widths)  # [num_growths, 2, num_buckets]
        return (in_bucket[:, 1] - in_bucket[:, 0]).sum(axis=0)


FORESIGHT = 1 / 8
"""Of its tokens, as many more as a request is to generate before the cache is full. What is computed anew after a
preemption costs a small part of what generating as much does, so an engine that waits until all is sure to fit loses
more than one that preempts now and then; one that preempts what has just joined gains nothing."""

DEVIATIONS = 1.0
"""Standard deviations above its mean that what the cache is expected to hold has to fit at."""


class AdaptivePlaces:
    """Lets requests join as long as the KV cache is expected to hold all of them for a while.

    What a request will take is not known, what requests like it took is: those that joined are expected to hold
    `sum of P(still runs in t tokens) * (tokens now + t)` in t steps. Another joins where that, and a standard deviation
    more, is within the cache for every t up to an eighth of its own tokens. A burst of short prompts then does not fill
    the cache with answers that all grow in it at once; answers of different ages, of which some end while others grow,
    fill it; and what was preempted joins again once it can get somewhere. (Gong et al., "Past-Future Scheduler", ASPLOS
    2025, draw lengths where this takes their distribution.)

    Example: `AdaptivePlaces(most=128, kv_tokens=100_000).num_joining([], waiting)`

    Args:
        most: requests that the engine can advance.
        kv_tokens: that its KV cache holds.
        block_tokens: that a block of it holds; a request has whole ones, and is to generate as many at least.
    """

    def __init__(self, most: int, kv_tokens: int, block_tokens: int = 1) -> None:
        self.limit = most
        """Requests that the engine advances at most, as was decided last."""
        self._most = most
        self._kv_tokens = kv_tokens
        self._block_tokens = block_tokens
        self._lengths = LengthsSeen(kv_tokens)

    def ended(self, growth: Growth, *, was_aborted: bool) -> None:
        """A request that had joined has left the engine."""
        self._lengths.ended(growth, was_aborted=was_aborted)

    def num_joining(self, running: Sequence[Growth], waiting: Iterable[Growth], num_shared: int = 0) -> int:
        """Number of waiting requests that join now, in their order: at least one if nothing runs.

        Args:
            waiting: those that were preempted first.
            num_shared: tokens that the running requests need not hold twice, since they have them in common.
        """
        candidates = list(islice(waiting, max(0, self._most - len(running))))
        count = 0
        if candidates:
            count = max(self._num_that_fit(running, candidates, num_shared), 0 if running else 1)
        self.limit = len(running) + count if count < len(candidates) else self._most
        return count

    def _num_that_fit(self, running: Sequence[Growth], candidates: Sequence[Growth], num_shared: int) -> int:
        growths = [*running, *candidates]
        alive = self._lengths.survival(running, growths)  # [num_growths, num_lengths]
        now = np.array([growth.now for growth in growths])[:, None]
        later = np.ceil((now + self._lengths.horizon) / self._block_tokens) * self._block_tokens
        mean = (alive * later).cumsum(axis=0)
        variance = (alive * (1 - alive) * later**2).cumsum(axis=0)
        expected = mean + DEVIATIONS * np.sqrt(variance) - num_shared
        is_ahead = self._lengths.horizon <= np.maximum(FORESIGHT * now, self._block_tokens)
        peaks = np.where(is_ahead, expected, 0.0)[len(running) :].max(axis=1)
        return int(np.searchsorted(np.maximum.accumulate(peaks), self._kv_tokens, side="right"))
