"""Rollouts and groups: what environments and generation produced, before it is training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from titan_rl.core.calls.user_code import Failure
from titan_rl.types import Completion, SamplingParams, require_member

Message = Mapping[str, Any]
"""One chat message: `{"role": "user", "content": "..."}`, plus what the chat template knows of."""


class RolloutStatus(StrEnum):
    """How a rollout ended. A bad rollout is data, not a crash."""

    COMPLETED = "completed"
    TRUNCATED_LENGTH = "truncated_length"  # a completion used up its token budget
    TRUNCATED_PROMPT = "truncated_prompt"  # the next prompt leaves no room to answer
    TRUNCATED_TURNS = "truncated_turns"  # the turn cap is reached and the environment has not ended
    TRUNCATED_TIME = "truncated_time"  # the rollout's own time is used up
    UNDECIDED = "undecided"  # of a seat that was never asked, or whose game another seat kept from its end
    ABORTED = "aborted"
    ERROR_PARSE = "error_parse"
    ERROR_TIMEOUT = "error_timeout"
    ERROR_ENV = "error_env"
    ERROR_GENERATE = "error_generate"

    @property
    def is_truncated(self) -> bool:
        return self.value.startswith("truncated")

    @property
    def is_error(self) -> bool:
        return self.value.startswith("error")

    @property
    def is_fault(self) -> bool:
        """An error of an environment or of generation, which says nothing of the policy. All other ends are the
        policy's doing, ERROR_PARSE too."""
        return self.is_error and self is not RolloutStatus.ERROR_PARSE


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its completion. Those of a rollout that has been played share one array of tokens, in which each
    has what it adds to the context: `titan_rl.rollout.copies`.

    Args:
        prompt_token_ids: the whole context, which is read out of that array where it is asked for.
        sampling: what the request asked for, so that training scores the completion's tokens as they were sampled. None
            says that nobody knows: `build_samples` then has to be told the temperature.
    """

    prompt_token_ids: Sequence[int]  # [num_prompt_tokens], the whole context
    completion: Completion
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])  # from the environment, by name
    token_advantages: Sequence[float] | None = None  # [num_completion_tokens], from the environment
    sampling: SamplingParams | None = None


@dataclass(slots=True)
class Rollout:
    """One environment, run to its end; of one with several seats, what one trained seat did. Filled in place by the
    rollouter, then by scoring.

    `reward` and `advantage` stay None where the rollout was not scored or does not take part.

    Raises:
        ValueError: `status` is no `RolloutStatus`.
    """

    rollout_id: str  # "<group_id>/<sibling>", or "<group_id>/<sibling>/<seat>"; also the session id
    group_id: str
    sibling: int
    sample: Any
    status: RolloutStatus = RolloutStatus.COMPLETED
    turns: list[Turn] = field(default_factory=list[Turn])
    messages: list[Message] = field(default_factory=list[Message])  # the transcript, where the env has one
    error: str | None = None  # "ExceptionType: message" of what ended it
    reward: float | None = None
    reward_breakdown: dict[str, float] = field(default_factory=dict[str, float])  # unweighted, by reward name
    advantage: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    failure: Failure | None = None  # `error` with its place and traceback, where an exception ended it
    seat: str | None = None  # of an environment with several

    def __post_init__(self) -> None:
        require_member(self, "status", RolloutStatus)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(slots=True)
class RolloutGroup:
    """The sibling rollouts of one sample; advantages compare them with each other, those of a seat for themselves."""

    group_id: str
    sample: Any
    rollouts: list[Rollout]  # [group_size], or as many for each trained seat, siblings together
    failure: Failure | None = None  # of a reward: the group was given up, and has neither rewards nor advantages
    task: str = ""  # the name of the task that the sample is of, in a run

    @property
    def by_seat(self) -> dict[str | None, list[Rollout]]:
        """What can be compared: the rollouts of each seat, or all under None where the environment has no seats."""
        seats: dict[str | None, list[Rollout]] = {}
        for rollout in self.rollouts:
            seats.setdefault(rollout.seat, []).append(rollout)
        return seats

    @property
    def is_aborted(self) -> bool:
        return any(rollout.status is RolloutStatus.ABORTED for rollout in self.rollouts)

    @property
    def versions(self) -> set[int]:
        """Every policy version that produced a token of this group."""
        return {
            span.version
            for rollout in self.rollouts
            for turn in rollout.turns
            for span in turn.completion.version_spans
        }
