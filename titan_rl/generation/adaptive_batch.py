"""Adaptive batch size: the number of requests that the KV cache is expected to hold, from observed lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

MEMORY = 1024  # an ended request counts for 1/e after this many others
BUCKETS_A_DOUBLING = 4  # buckets of lengths for each doubling of the length
PRIOR_REQUESTS = 1.0  # weight of the prior, in requests, at each length


class Growth(NamedTuple):
    """Number of tokens of a request's prompt and answer: when it joined its batch, now, and at most."""

    start: int
    now: int
    most: int


class ObservedLengths:
    """Life table of contexts: for each length, the share of the requests reaching it that ended there.

    A request is observed from the length at which it joined to its present length, so that neither prompts, nor the
    tokens from before an interruption, nor aborts bias lengths downwards (the actuarial estimate of a survival function
    with late entries and censoring; Kaplan and Meier, 1958). At lengths that no request has reached, the assumed rate
    is one end in half of the maximum length.

    Args:
        most: Maximum number of tokens of a request.
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
        """[num_lengths] numbers of tokens from now at which the future is evaluated."""
        return self._edges

    def ended(self, growth: Growth, *, was_aborted: bool) -> None:
        """Record a request that has left. The length at which an aborted request would have ended is unknown."""
        self._tokens += self._tokens_at([growth])
        if not was_aborted:
            fade = 1 - 1 / MEMORY
            self._tokens, self._ends = self._tokens * fade, self._ends * fade
            self._ends[min(np.searchsorted(self._edges, growth.now), len(self._ends)) - 1] += 1

    def survival(self, running: Sequence[Growth], candidates: Iterable[Growth]) -> Any:
        """Probability that each request of `candidates` still runs, for each length of the horizon.

        Args:
            running: The requests observed at present.

        Returns:
            [num_candidates, num_lengths]; the first column is 1
        """
        tokens = self._tokens + self._prior_tokens + self._tokens_at(running)
        rates = (self._ends + self._prior_ends) / tokens
        hazard = np.concatenate([[0.0], np.cumsum(rates * self._widths)])  # cumulative hazard at each edge
        sizes = np.array([(growth.now, growth.most) for growth in candidates], dtype=float).reshape(-1, 2)
        now, most = sizes[:, :1], sizes[:, 1:]
        later = now + self.horizon
        alive = np.exp(np.interp(now, self._edges, hazard) - np.interp(later, self._edges, hazard))
        return np.where(later <= most, alive, 0.0)

    def _tokens_at(self, growths: Sequence[Growth]) -> Any:
        """[num_buckets] tokens that these requests have generated at the lengths of each bucket."""
        sizes = np.array([(growth.start, growth.now) for growth in growths], dtype=float).reshape(-1, 2, 1)
        in_bucket = np.clip(sizes - self._edges[:-1], 0.0, self._widths)  # [num_growths, 2, num_buckets]
        return (in_bucket[:, 1] - in_bucket[:, 0]).sum(axis=0)


FORESIGHT = 1 / 8
"""Progress that a request should make before the cache is full, as a share of its present tokens. Recomputing tokens
after a preemption costs a small part of generating them, so an engine that waits until everything certainly fits loses
more than one that sometimes preempts. But an engine that preempts requests that have just joined gains nothing."""

DEVIATIONS = 1.0
"""Safety margin: the mean of the expected content plus this many standard deviations has to fit the cache."""


class AdaptiveLimit:
    """Lets requests join as long as the KV cache is expected to hold all of them for a while.

    Lengths are predicted from those of past requests: in t steps the joined requests are expected to hold
    `sum of P(still runs in t tokens) * (tokens now + t)` tokens. Another request joins if this sum, plus one standard
    deviation, fits the cache for every t up to an eighth of the request's tokens. Therefore a burst of short prompts
    does not fill the cache with answers that all grow at once, answers of different ages fill it, and a preempted
    request joins again when it can make progress. (Gong et al., "Past-Future Scheduler", ASPLOS 2025, draw lengths from
    the distribution; here the distribution itself is used.)

    Example: `AdaptiveLimit(most=128, kv_tokens=100_000).num_joining([], waiting)`

    Args:
        most: Maximum number of requests that the engine can advance.
        kv_tokens: Capacity of the engine's KV cache in tokens.
        block_tokens: Tokens of a block of the cache. A request occupies whole blocks, and should generate at least one.
    """

    def __init__(self, most: int, kv_tokens: int, block_tokens: int = 1) -> None:
        self.limit = most
        """Maximum number of requests that the engine advances, by the last decision."""
        self._most = most
        self._kv_tokens = kv_tokens
        self._block_tokens = block_tokens
        self._lengths = ObservedLengths(kv_tokens)

    def ended(self, growth: Growth, *, was_aborted: bool) -> None:
        """Record that a joined request has left the engine."""
        self._lengths.ended(growth, was_aborted=was_aborted)

    def num_joining(self, running: Sequence[Growth], waiting: Iterable[Growth], num_shared: int = 0) -> int:
        """Number of waiting requests that join now, in their order: at least one if nothing runs.

        Args:
            running: Requests that have joined.
            waiting: Waiting requests in their order; preempted ones come first.
            num_shared: Tokens that running requests share, and that the cache holds once.
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
