"""How the completions of an episode are sampled, whatever its agent asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from titan_rl.rollout.group.rollout_ids import turn_seed
from titan_rl.serving.http.api_error import UNSUPPORTED_VALUE, ApiError
from titan_rl.types import EXTRA_SAMPLING, SamplingParams

_REFUSED = EXTRA_SAMPLING - {"constraint"}


class EpisodeSampling:
    """An agent says when its completions end, and training how they are sampled.

    An agent chooses `max_tokens`, up to the episode's, `stop_token_ids`, how many `top_logprobs` it is told, and a
    constraint, for which `correction.constrained` accounts. The rest is the episode's: training cannot account for a
    nucleus or a temperature of 0, and an agent that always asks for the same seed would get the same answer in every
    sibling. Penalties and biases are refused: an agent that asks for them depends on what they do.

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
        """
        Raises:
            ApiError: 400, penalties or biases are asked for.
        """
        own = self._own
        if own is None:
            return asked
        for name, value in asked.shaping.items():
            if name in _REFUSED:
                shown = dict(asked.logit_bias) if name == "logit_bias" else value
                raise ApiError(
                    400,
                    f"{name} = {shown!r} is not supported in an episode: it changes the distribution that completions "
                    "are sampled from, and training does not account for that; leave it out",
                    param=name,
                    code=UNSUPPORTED_VALUE,
                )
        max_tokens = min(own.max_tokens, asked.max_tokens)
        return replace(
            own,
            max_tokens=max_tokens,
            min_tokens=min(own.min_tokens, max_tokens) if asked.constraint is None else 0,
            seed=None if own.seed is None else self._draw(own.seed, prompt_token_ids),
            stop_token_ids=asked.stop_token_ids or own.stop_token_ids,
            top_logprobs=asked.top_logprobs,
            constraint=asked.constraint,
        )

    def _draw(self, seed: int, prompt_token_ids: Sequence[int]) -> int:
        prompt = blake2b(repr(list(prompt_token_ids)).encode(), digest_size=16).hexdigest()
        self._asked[prompt] += 1
        return turn_seed(seed, f"{self._episode_id}/{prompt}", self._asked[prompt] - 1)
