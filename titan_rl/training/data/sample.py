"""Training samples. Standard library only, so schedulers and journals can hold them without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.types import PromptScores


@dataclass(frozen=True, slots=True)
class SampleRewards:
    """Rewards of a sample's tokens, from which a critic computes advantages.

    Args:
        rewards: Reward after each token.
        turns: Index of the completion that each token belongs to; -1 outside completions.
        is_truncated: Whether rewards would have followed the last token of the rollout. The value of its last state
            then replaces them.
        ends_rollout: Whether the sample ends with the last state of its rollout. Otherwise the rollout continues in
            another sample, because its history was edited.
    """

    rewards: Sequence[float]  # [num_tokens]
    turns: Sequence[int]  # [num_tokens]
    is_truncated: bool = False
    ends_rollout: bool = True


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One token sequence of a rollout. All per-token fields are sequences of the length of `token_ids`; `build_samples`
    makes packed ones, see `titan_rl.core.arrays`.

    Position t holds the values of token t itself, not of the token after it. Where `loss_mask[t]` is False
    (prompt and environment tokens), logprob, advantage and, in a sequence of temperatures, the temperature are 0, and
    the version is -1.

    `temperature` is the temperature at which the trained tokens were sampled and are scored by the loss: one number if
    it is the same for all of them, otherwise a number for each token.

    `loss_weights[t]` multiplies the loss of token t; None stands for 1.

    `teacher` has the top tokens of a teacher, if the loss has a distillation term.

    `episode` has the rewards, if a critic computes the advantages; the values of `advantages` are then added to the
    critic's.

    `routed_experts[t]` are the experts of the forward pass that produced token t from the tokens before it.

    Example: a two-token prompt, a two-token completion:

        TrainingSample("g0", "g0/1", token_ids=[7, 8, 5, 1], loss_mask=[False, False, True, True],
                       behaviour_logprobs=[0.0, 0.0, -0.7, -0.1], advantages=[0.0, 0.0, 1.2, 1.2],
                       versions=[-1, -1, 3, 3], temperature=1.0)
    """

    group_id: str
    rollout_id: str
    token_ids: Sequence[int]  # [num_tokens]
    loss_mask: Sequence[bool]  # [num_tokens]
    behaviour_logprobs: Sequence[float]  # [num_tokens]
    advantages: Sequence[float]  # [num_tokens]
    versions: Sequence[int]  # [num_tokens]
    temperature: float | Sequence[float]  # [num_tokens] if it differs
    routed_experts: Sequence[Any] | None = None  # [num_tokens], each [num_layers, top_k], or None if the router chooses
    loss_weights: Sequence[float] | None = None  # [num_tokens]
    teacher: PromptScores | None = None  # scores of all num_tokens; NaN where there is no score
    episode: SampleRewards | None = None

    @property
    def temperatures(self) -> Sequence[float]:
        """The temperature of each token.  # [num_tokens]"""
        given = self.temperature
        return given if isinstance(given, Sequence) else [given] * len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        return self.loss_mask.count(True)
