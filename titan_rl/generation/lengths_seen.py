"""How long requests get, learnt from those that have ended and from those that still run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
