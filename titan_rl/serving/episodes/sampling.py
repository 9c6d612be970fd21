"""How the completions of an episode are sampled, whatever its agent asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from titan_rl.rollout.group.rollout_ids import turn_seed
from titan_rl.types import SamplingParams


class EpisodeSampling:
    """An agent says when its completions end, and training how they are sampled.

    An agent chooses `max_tokens`, up to the episode's, `stop_token_ids`, and how many `top_logprobs` it is told. The
    rest is the episode's: training cannot account for a nucleus or a temperature of 0, and an agent that always asks
    for the same seed would get the same answer in every sibling.

    Where the episode has a seed, each request draws one of its own from it, which depends on its prompt and on how
    often that was asked before: so agents that ask for several things at once get the same answers again, in whichever
    order their requests arrive.

    Args:
        own: None is what the agent asks for.
        episode_id: in the seeds.
    """

    def __init__(self, own: SamplingParams | None, episode_id: str) -> None:
        self._own = own
        self._episode_id = episode_id
        self._asked: Counter[str] = Counter()  # times, by prompt

    def of(self, asked: SamplingParams, prompt_token_ids: Sequence[int]) -> SamplingParams:
        own = self._own
        if own is None:
            return asked
        max_tokens = min(own.max_tokens, asked.max_tokens)
        return replace(
            own,
            max_tokens=max_tokens,
            min_tokens=min(own.min_tokens, max_tokens),
            seed=None if own.seed is None else self._draw(own.seed, prompt_token_ids),
            stop_token_ids=asked.stop_token_ids or own.stop_token_ids,
            top_logprobs=asked.top_logprobs,
        )

    def _draw(self, seed: int, prompt_token_ids: Sequence[int]) -> int:
        prompt = blake2b(repr(list(prompt_token_ids)).encode(), digest_size=16).hexdigest()
        self._asked[prompt] += 1
        return turn_seed(seed, f"{self._episode_id}/{prompt}", self._asked[prompt] - 1)
