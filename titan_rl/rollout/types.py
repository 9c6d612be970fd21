"""Rollouts and groups: the results of environments and generation, from which training data is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from titan_rl.core.calls.user_code import Failure
from titan_rl.core.pickling import quick_pickle
from titan_rl.types import Completion, PromptScores, SamplingParams, require_member

Message = Mapping[str, Any]
"""Chat message: `{"role": "user", "content": "..."}`, possibly with further keys that the chat template reads."""


class RolloutStatus(StrEnum):
    """Final status of a rollout. A bad rollout is data, not a crash."""

    COMPLETED = "completed"
    TRUNCATED_LENGTH = "truncated_length"  # a completion used up its token budget
    TRUNCATED_PROMPT = "truncated_prompt"  # the next prompt leaves no room to answer
    TRUNCATED_TURNS = "truncated_turns"  # the limit of turns is reached, and the environment has not ended
    TRUNCATED_TIME = "truncated_time"  # the rollout's own time is used up
    UNDECIDED = "undecided"  # a seat that was never asked, or whose game was ended early by another seat
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
        """Whether it is an error of an environment or of generation, which the policy did not cause. All other
        statuses, including ERROR_PARSE, depend on the policy."""
        return self.is_error and self is not RolloutStatus.ERROR_PARSE


@quick_pickle
@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its completion. The turns of a played rollout share one array of tokens; see
    `titan_rl.rollout.shared_tokens`.

    Args:
        prompt_token_ids: Whole context. In a played rollout it is a window on the shared array.
        completion: The completion.
        rewards: Rewards of the environment for the turn, by name.
        token_advantages: Advantages of the environment for each token, in addition to the rollout's.
        sampling: Sampling parameters of the request, with which training scores the tokens as they were sampled. If it
            is None (unknown), `build_samples` needs the temperature.
        teacher: A teacher's scores of the completion's tokens, as far as they are known.
    """

    prompt_token_ids: Sequence[int]  # [num_prompt_tokens], the whole context
    completion: Completion
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    token_advantages: Sequence[float] | None = None  # [num_completion_tokens]
    sampling: SamplingParams | None = None
    teacher: PromptScores | None = None  # scores of the completion's tokens


@dataclass(slots=True)
class Rollout:
    """One run of an environment to its end, or of one trained seat if the environment has several. The rollouter fills
    it in, then scoring.

    `reward` and `advantage` stay None if the rollout is not scored or not compared.

    Raises:
        ValueError: `status` is not a `RolloutStatus`.
    """

    rollout_id: str  # "<group_id>/<sibling>", or "<group_id>/<sibling>/<seat>"; also the session id
    group_id: str
    sibling: int
    sample: Any
    status: RolloutStatus = RolloutStatus.COMPLETED
    turns: list[Turn] = field(default_factory=list[Turn])
    messages: list[Message] = field(default_factory=list[Message])  # the transcript, if the environment has messages
    error: str | None = None  # "ExceptionType: message" of the exception that ended the rollout, or an explanation
    reward: float | None = None
    reward_breakdown: dict[str, float] = field(default_factory=dict[str, float])  # unweighted, by reward name
    advantage: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    failure: Failure | None = None  # `error` with its place and traceback, if an exception ended the rollout
    seat: str | None = None  # name of the seat in an environment with several seats

    def __post_init__(self) -> None:
        require_member(self, "status", RolloutStatus)

    @property
    def role(self) -> str | None:
        """Name of the seat without its number: "solver" for the seats "solver.0" and "solver.1", which do the same
        thing in a game. None without seats."""
        role, dot, number = (self.seat or "").rpartition(".")
        return role if dot and number.isdecimal() else self.seat

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Matched:
    """Sample of a group for which an opponent was chosen: a frozen version of the run plays seats of its games.
    Environments are made from the `Matched`; the rollouts have only the sample."""

    sample: Any
    opponent: int  # version of the run


def sample_alone(sample: Any) -> Any:
    """Sample of a `Matched`. Any other sample is returned unchanged."""
    return sample.sample if isinstance(sample, Matched) else sample


def compared(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """Rollouts of a group that are compared with each other: those of one seat in all games of the group, or, for the
    numbered seats of a role ("solver.0", "solver.1"), those of the role in each game. The keys are names for
    messages."""
    levels: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        name = "" if rollout.seat is None else f"seat {rollout.seat!r}"
        if rollout.role != rollout.seat:
            name = f"role {rollout.role!r} of game {rollout.sibling}"
        levels.setdefault(name, []).append(rollout)
    return levels


@dataclass(slots=True)
class RolloutGroup:
    """Sibling rollouts of one sample. Advantages compare them with each other, separately for each seat."""

    group_id: str
    sample: Any
    rollouts: list[Rollout]  # [group_size], or as many for each trained seat, siblings together
    failure: Failure | None = None  # failure of a reward; the group then has neither rewards nor advantages
    task: str = ""  # name of the sample's task, in a run

    @property
    def by_seat(self) -> dict[str | None, list[Rollout]]:
        """Rollouts by seat; all under None if the environment has no seats."""
        seats: dict[str | None, list[Rollout]] = {}
        for rollout in self.rollouts:
            seats.setdefault(rollout.seat, []).append(rollout)
        return seats

    @property
    def compared(self) -> dict[str, list[Rollout]]:
        """Rollouts that advantages compare with each other; see `compared`."""
        return compared(self.rollouts)

    @property
    def num_faults(self) -> int:
        """Number of rollouts that say nothing about the policy, because a fault that it did not cause ended them, or
        because a reward of the group failed."""
        return sum(self.failure is not None or rollout.status.is_fault for rollout in self.rollouts)

    @property
    def counted(self) -> list[Rollout]:
        """Rollouts that means include: all except faults (`num_faults`) and aborted ones."""
        if self.failure is not None:
            return []
        return [each for each in self.rollouts if not (each.status.is_fault or each.status is RolloutStatus.ABORTED)]

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
