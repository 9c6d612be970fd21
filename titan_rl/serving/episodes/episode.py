"""What one agent does from its start to its end, and the rollout that training takes of it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace

from titan_rl.calls.user_code import Failure
from titan_rl.errors import BusyError, EpisodeEndedError
from titan_rl.rollout.copies import completion_of
from titan_rl.rollout.group.rollout_ids import turn_seed
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message, Rollout, RolloutStatus, Turn
from titan_rl.serving.conversations.tree import ConversationTree, Prompt, TurnNode
from titan_rl.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """
    Args:
        time_s: until an episode ends by itself.
        turns: of one episode; asking for another ends it.
        requests: of one episode, in flight at once; one more is a `BusyError`.
        episodes: open at once; one more is a `BusyError`.
        keep_s: how long the key of an ended episode is still known, so that late requests are told how it ended.

    Raises:
        ValueError: names the limit that is not positive.
    """

    time_s: float = 3600.0
    turns: int = 1000
    requests: int = 64
    episodes: int = 4096
    keep_s: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                value = getattr(self, each.name)
                raise ValueError(f"EpisodeLimits.{each.name} is {value!r}; it must be greater than 0")


@dataclass(slots=True)
class _Record:
    sampling: SamplingParams
    rewards: dict[str, float] = field(default_factory=dict[str, float])


class Episode:
    """One agent at work: its conversations, its requests in flight, its rewards, and how it ended.

    It ends once: by `end`, by its time, or by its turns. What is in flight then is cancelled, and nothing is recorded
    or rewarded after that. It belongs to the event loop that it is made in.

    Example, of one request:

        async with episode.request():
            prompt = episode.tree.prompt(messages, tools)
            sampling = episode.sampling_for(asked)
            completion = await generate(prompt.token_ids, request_id=request_id, session_id=..., sampling=sampling)
            episode.record(prompt, completion, message, sampling)

    and of the end:

        episode.reward({"solved": 1.0})
        episode.end()
        episode.fill_in(rollout)

    Args:
        sampling: how its completions are sampled, whatever its agent asks for: see `sampling_for`.
        on_end: called once, when it has ended.

    Attributes:
        key: the secret by which its requests are known. It is not in any message or `repr`.
        status: None while it goes on.
        error: what ended it, where that was an error.
    """

    def __init__(
        self,
        episode_id: str,
        renderer: Renderer,
        limits: EpisodeLimits | None = None,
        *,
        sampling: SamplingParams | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self.id = episode_id
        self.key = secrets.token_urlsafe(32)
        self.tree = ConversationTree(renderer)
        self.status: RolloutStatus | None = None
        self.error: str | None = None
        self._failure: Failure | None = None
        self._limits = limits or EpisodeLimits()
        self._sampling = sampling
        self._num_sampled = 0
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._records: list[_Record] = []  # by the turn's index
        self._by_request: dict[str, _Record] = {}
        self._rewards: dict[str, float] = {}
        self._in_flight: set[asyncio.Timeout] = set()
        self._timer = self._loop.call_later(self._limits.time_s, self._time_is_up)

    def __repr__(self) -> str:
        return f"Episode({self.id!r}, {self.status or 'open'}, {len(self._records)} turns)"

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[None]:
        """The block is one request, which is cancelled when the episode ends.

        Raises:
            EpisodeEndedError: it is over, or ends meanwhile.
            BusyError: as many requests are in flight as its limit allows.
        """
        self._require_open()
        if len(self._records) >= self._limits.turns:
            self.end(RolloutStatus.TRUNCATED_TURNS)
            self._require_open()
        if len(self._in_flight) >= self._limits.requests:
            raise BusyError(f"the episode has {len(self._in_flight)} requests in flight, which is its limit")
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._in_flight.add(scope)
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self._is_over() from error
        finally:
            self._in_flight.discard(scope)

    def sampling_for(self, asked: SamplingParams) -> SamplingParams:
        """How to sample a completion that was asked for like this.

        An agent chooses for itself when a completion ends: `max_tokens`, up to the episode's, and `stop_token_ids`. The
        rest is the episode's: training cannot account for a nucleus or a temperature of 0, and an agent that always
        asks for the same seed would get the same answer in every sibling. Where the episode's sampling has a seed, each
        call gets one of its own.
        """
        own = self._sampling
        if own is None:
            return asked
        seed = None if own.seed is None else turn_seed(own.seed, self.id, self._num_sampled)
        self._num_sampled += 1
        max_tokens = min(own.max_tokens, asked.max_tokens)
        return replace(
            own,
            max_tokens=max_tokens,
            min_tokens=min(own.min_tokens, max_tokens),
            seed=seed,
            stop_token_ids=asked.stop_token_ids or own.stop_token_ids,
        )

    def record(self, prompt: Prompt, completion: Completion, message: Message, sampling: SamplingParams) -> TurnNode:
        """A turn. Its completion is copied, and the rollout's.

        Args:
            message: the completion as the client is given it: see `ConversationTree.add`.
            sampling: what the completion was asked for with.

        Raises:
            EpisodeEndedError: the episode is over; the client must not be given this completion.
            ValueError: there is a turn of this request id, or a logprob is not finite.
        """
        self._require_open()
        if completion.request_id in self._by_request:
            raise ValueError(f"request id {completion.request_id!r} is of another turn; each has one of its own")
        turn = self.tree.add(prompt, completion_of(completion), message)
        record = _Record(sampling)
        self._records.append(record)
        self._by_request[completion.request_id] = record
        return turn

    def reward(self, rewards: Mapping[str, float], request_id: str | None = None) -> None:
        """Rewards by name, of the whole or of a turn. The last report of a name is the one that counts.

        Args:
            request_id: of the turn; None for the whole.

        Raises:
            EpisodeEndedError: it is over, and may have been judged.
            LookupError: it has no turn of this request.
            ValueError: a reward is no finite number.
        """
        self._require_open()
        for name, value in rewards.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"reward {name!r} is {value!r}; it must be a finite number")
        if request_id is not None and request_id not in self._by_request:
            raise LookupError(f"the episode has no turn of request {request_id!r}")
        of = self._rewards if request_id is None else self._by_request[request_id].rewards
        of.update({str(name): float(value) for name, value in rewards.items()})

    def end(self, status: RolloutStatus = RolloutStatus.COMPLETED, error: str | Failure | None = None) -> bool:
        """The episode is over. Returns whether it was not before: the first end counts."""
        if self.status is not None:
            return False
        self.status = status
        self._failure = error if isinstance(error, Failure) else None
        self.error = error.error if isinstance(error, Failure) else error
        self._timer.cancel()
        for scope in self._in_flight:
            if not scope.expired():
                scope.reschedule(self._loop.time())
        self._ended.set_result(None)
        if self._on_end is not None:
            self._on_end()
        return True

    async def wait(self) -> None:
        """Return when the episode is over."""
        await asyncio.shield(self._ended)

    def fill_in(self, rollout: Rollout) -> None:
        """What training takes: turns, transcript, status. Called when the episode is over.

        Every turn is in the rollout once, the turns of a branch behind each other, so that `build_samples` makes one
        sample of each branch and trains each sampled token in one of them. Rewards of the whole are the last turn's.

        An agent that completed and never asked the policy is an ERROR_ENV: it says nothing of the policy.
        """
        assert self.status is not None, "the episode goes on"
        rollout.turns = [self._turn(turn) for branch in self.tree.branches() for turn in branch]
        rollout.messages = self.tree.transcript()
        rollout.status, rollout.error, rollout.failure = self.status, self.error, self._failure
        rollout.metrics["branches"] = float(len(self.tree.branches()))
        if not rollout.turns and self.status is RolloutStatus.COMPLETED:
            rollout.status, rollout.error = RolloutStatus.ERROR_ENV, "the agent ended and had never asked the policy"

    def _turn(self, turn: TurnNode) -> Turn:
        record = self._records[turn.index]
        rewards = dict(record.rewards)
        if turn.index == len(self._records) - 1:
            for name, value in self._rewards.items():
                rewards[name] = rewards.get(name, 0.0) + value
        return Turn(turn.prompt_token_ids, turn.completion, rewards, sampling=record.sampling)

    def _require_open(self) -> None:
        if self.status is not None:
            raise self._is_over()

    def _is_over(self) -> EpisodeEndedError:
        return EpisodeEndedError(f"the episode is over: {self.status}")

    def _time_is_up(self) -> None:
        status = RolloutStatus.TRUNCATED_TIME if self._records else RolloutStatus.ERROR_TIMEOUT
        self.end(status, f"its own time is up: it has {self._limits.time_s:g} s")
