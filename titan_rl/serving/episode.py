"""Episode of one agent: its limits, rewards and sampling, and the rollout that training takes from it."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b

from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import BusyError, EpisodeEndedError, RequestError
from titan_rl.generation.resume import RequestFn
from titan_rl.rollout.copies import completion_of
from titan_rl.rollout.group.turns import turn_seed
from titan_rl.rollout.renderer.types import Renderer, Tools
from titan_rl.rollout.types import Message, Rollout, RolloutStatus, Turn
from titan_rl.serving.conversations.caller import Show, Talk
from titan_rl.serving.conversations.tree import ConversationTree, Prompt, Style, TurnNode
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.policy import Ask
from titan_rl.types import EXTRA_SAMPLING, Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """
    Args:
        time_s: Until an episode ends by itself.
        turns: Of one episode; asking for another ends it.
        requests: Of one episode, in flight at once; one more is a `BusyError`.
        memory_bytes: About what the conversations of one episode may keep; asking for more ends it.
        episodes: Open at once; one more is a `BusyError`.
        keep_s: How long the key of an ended episode is still known, so that late requests are told how it ended.

    Raises:
        ValueError: Names the limit that is not positive.
    """

    time_s: float = 3600.0
    turns: int = 1000
    requests: int = 64
    memory_bytes: int = 256 << 20
    episodes: int = 4096
    keep_s: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                value = getattr(self, each.name)
                raise ValueError(f"EpisodeLimits.{each.name} is {value!r}; it must be greater than 0")


Answer = tuple[str, int]
"""Key of a completion on the client's side: the id of the answer, and the index of the choice."""


class EpisodeRewards:
    """Rewards by name, of the whole and of each turn. The last report of a name is the one that counts."""

    def __init__(self) -> None:
        self._whole: dict[str, float] = {}
        self._by_answer: dict[Answer, dict[str, float]] = {}  # in the order of the turns

    def add_turn(self, answer: Answer) -> None:
        """
        Raises:
            RequestError: There is a turn of this answer.
        """
        if answer in self._by_answer:
            raise RequestError(f"answer {answer[0]!r} has a choice {answer[1]}; each has an id of its own")
        self._by_answer[answer] = {}

    def report(self, rewards: Mapping[str, float], answer_id: str | None, index: int) -> None:
        """
        Args:
            answer_id: None for the whole.

        Raises:
            LookupError: There is no such answer.
            ValueError: A reward is no finite number.
        """
        for name, value in rewards.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"reward {name!r} is {value!r}; it must be a finite number")
        if answer_id is not None and (answer_id, index) not in self._by_answer:
            raise LookupError(f"the episode has no choice {index} of an answer {answer_id!r}")
        of = self._whole if answer_id is None else self._by_answer[answer_id, index]
        of.update({str(name): float(value) for name, value in rewards.items()})

    def by_turn(self) -> list[dict[str, float]]:
        """Rewards of each turn; those of the whole episode are added to the last turn's."""
        turns = [dict(rewards) for rewards in self._by_answer.values()]
        for name, value in self._whole.items() if turns else ():
            turns[-1][name] = turns[-1].get(name, 0.0) + value
        return turns


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
        episode_id: In the seeds.
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


KEY_PREFIX = "episode-"
"""Prefix of episode keys, which distinguishes them from server keys even after the episode is forgotten."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")


class Episode:
    """One agent at work: its conversations, its requests in flight, its rewards, and how it ended. A `Caller`.

    It ends once: by `end`, by its time, or by a limit. What is in flight then is cancelled, and nothing is recorded or
    rewarded after that. It belongs to the event loop that it is made in.

    Example, of one request:

        talk = episode.talk(messages, tools, None)
        ask = talk.ask(sampling, num_choices=1, request_id="chatcmpl-17")
        (completion,) = await policy.complete(ask)
        talk.record(0, completion, message)

    and of the end:

        episode.reward({"solved": 1.0})
        episode.end()
        episode.fill_in(rollout)

    Args:
        episode_id: Of letters, digits and `._~-`; it is part of the episode's URL.
        renderer: Without one there are no messages.
        stream: What generates for it; never broken off by an abort. None is the policy of the server.
        sampling: How its completions are sampled, whatever its agent asks for: see `EpisodeSampling`.
        session_id: Of the router; by default the episode's id.
        on_end: Called once, when it has ended.

    Attributes:
        key: The secret that identifies its requests. It is in no message and no `repr`.
        name: Unique among episodes and clients.
        num_prompt_tokens: Of the last request, answered or not.
        status: None while the episode is open.
        error: The error that ended it, if one did.

    Raises:
        ValueError: The id has other characters.
    """

    def __init__(
        self,
        episode_id: str,
        renderer: Renderer | None,
        limits: EpisodeLimits | None = None,
        *,
        stream: RequestFn | None = None,
        sampling: SamplingParams | None = None,
        session_id: str | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        if not _ID.fullmatch(episode_id):
            raise ValueError(f"an episode's id is {episode_id!r}; it must be 1 to 128 letters, digits and ._~-")
        self.id = episode_id
        self.key = KEY_PREFIX + secrets.token_urlsafe(32)
        self.name = blake2b(self.key.encode(), digest_size=16).digest()
        self.session_id = session_id or episode_id
        self.stream = stream
        self.tree = ConversationTree(renderer)
        self.num_prompt_tokens = 0
        self.status: RolloutStatus | None = None
        self.error: str | None = None
        self._failure: Failure | None = None
        self._limits = limits or EpisodeLimits()
        self._sampling = EpisodeSampling(sampling, self.session_id)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._sampled: list[SamplingParams] = []  # by the turn's index
        self._rewards = EpisodeRewards()
        self._in_flight: dict[asyncio.Timeout, int] = {}  # and how many completions each asks for
        self._timer = self._loop.call_later(self._limits.time_s, self._own_time_is_up)

    def __repr__(self) -> str:
        return f"Episode({self.id!r}, {self.status or 'open'}, {len(self._sampled)} turns)"

    @property
    def num_turns(self) -> int:
        return len(self._sampled)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def talk(
        self, messages: Sequence[Message], tools: Tools | None, session_id: str | None, style: Style | None = None
    ) -> Talk:
        """
        Raises:
            EpisodeEndedError: It is over.
            RequestError: The messages cannot be rendered.
        """
        self._require_open()
        return _EpisodeTalk(self, self.tree.prompt(messages, tools, style or Style()))

    def talk_in_tokens(self, token_ids: Sequence[int], show: Show, session_id: str | None) -> Talk:
        self._require_open()
        return _EpisodeTalk(self, self.tree.prompt_of_tokens(token_ids, show))

    @asynccontextmanager
    async def request(self, num_choices: int = 1) -> AsyncGenerator[None]:
        """The block is one request for so many turns, which is cancelled when the episode ends.

        Raises:
            EpisodeEndedError: It is over, or ends meanwhile.
            RequestError, BusyError: See `check_room`.
        """
        self.check_room(num_choices)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._in_flight[scope] = num_choices
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self._is_over() from error
        finally:
            self._in_flight.pop(scope, None)

    def check_room(self, num_choices: int) -> None:
        """Check that a request for so many turns may begin.

        Raises:
            EpisodeEndedError: It is over, or ends with this request, for which its limits have nothing left.
            RequestError: It asks for more turns than are left.
            BusyError: As many requests are in flight as its limit allows, or they may take up the turns that are left.
        """
        self._require_open()
        left = self._limits.turns - len(self._sampled)
        if left <= 0:
            self.end(RolloutStatus.TRUNCATED_TURNS, f"it has had its {self._limits.turns} turns")
        elif self.tree.num_bytes >= self._limits.memory_bytes:
            self.end(RolloutStatus.TRUNCATED_LENGTH, "its conversations take up the memory that one episode may have")
        self._require_open()
        if num_choices > left:
            raise RequestError(
                f"{num_choices} completions are asked for, and the episode has {left} of its {self._limits.turns} turns"
                " left; each completion is one"
            )
        if len(self._in_flight) >= self._limits.requests:
            raise BusyError(f"the episode has {len(self._in_flight)} requests in flight, which is its limit")
        if num_choices > left - sum(self._in_flight.values()):
            raise BusyError(f"the episode's requests in flight may take up the {left} turns that it has left")

    def sampling_for(self, asked: SamplingParams, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Sampling parameters for a completion that was requested with `asked`; see `EpisodeSampling`."""
        return self._sampling.of(asked, prompt_token_ids)

    def record(
        self,
        prompt: Prompt,
        completion: Completion,
        message: Message,
        sampling: SamplingParams,
        answer: Answer | None = None,
    ) -> TurnNode:
        """Record a turn. Its completion is copied, and belongs to the rollout.

        Args:
            message: The completion as the client is given it: see `ConversationTree.add`.
            sampling: What the completion was asked for with.
            answer: What the client knows it by: the id of the answer, and which of its choices. By default the
                completion's request id, and the first.

        Raises:
            EpisodeEndedError: The episode is over; the client must not be given this completion.
            RequestError: There is a turn of this answer.
            ValueError: A logprob is not finite, or there are more tokens than were asked for.
        """
        self._require_open()
        own = replace(completion_of(completion, sampling.max_tokens), top_logprobs=None)  # they were the agent's
        self._rewards.add_turn(answer or (completion.request_id, 0))
        self._sampled.append(sampling)
        return self.tree.add(prompt, own, message)

    def reward(self, rewards: Mapping[str, float], answer_id: str | None = None, index: int = 0) -> None:
        """Report rewards by name, of the whole episode or of a turn. The last report of a name counts.

        Args:
            answer_id: Of the turn, as its client has it; None for the whole.
            index: Which of the answer's choices.

        Raises:
            EpisodeEndedError: It is over, and may have been judged.
            LookupError: It has no such answer.
            ValueError: A reward is no finite number.
        """
        self._require_open()
        self._rewards.report(rewards, answer_id, index)

    def end(self, status: RolloutStatus = RolloutStatus.COMPLETED, error: str | Failure | None = None) -> bool:
        """End the episode. Returns False if it had already ended: the first end counts."""
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

    def time_is_up(self, error: str) -> bool:
        """End by timeout; see `end`. An episode with turns is judged as truncated, and one without is an error."""
        return self.end(RolloutStatus.TRUNCATED_TIME if self._sampled else RolloutStatus.ERROR_TIMEOUT, error)

    async def wait(self) -> None:
        """Return when the episode is over."""
        await asyncio.shield(self._ended)

    def fill_in(self, rollout: Rollout) -> None:
        """Fill a rollout with turns, transcript and status. Called when the episode is over.

        Every turn is in the rollout once, the turns of a branch behind each other, so that `build_samples` makes one
        sample of each branch and trains each sampled token in one of them. Rewards of the whole are the last turn's.

        An agent that completed and never asked the policy is an ERROR_ENV: it says nothing of the policy.
        """
        assert self.status is not None, "the episode goes on"
        branches, rewards = self.tree.branches(), self._rewards.by_turn()
        rollout.turns = [
            Turn(turn.prompt_token_ids, turn.completion, rewards[turn.index], sampling=self._sampled[turn.index])
            for branch in branches
            for turn in branch
        ]
        rollout.messages = self.tree.transcript()
        rollout.status, rollout.error, rollout.failure = self.status, self.error, self._failure
        rollout.metrics["branches"] = float(len(branches))
        if not rollout.turns and self.status is RolloutStatus.COMPLETED:
            rollout.status, rollout.error = RolloutStatus.ERROR_ENV, "the agent ended and had never asked the policy"

    def _require_open(self) -> None:
        if self.status is not None:
            raise self._is_over()

    def _is_over(self) -> EpisodeEndedError:
        return EpisodeEndedError(f"the episode is over: {self.status}")

    def _own_time_is_up(self) -> None:
        self.time_is_up(f"its own time is up: it has {self._limits.time_s:g} s")


class _EpisodeTalk:
    def __init__(self, episode: Episode, prompt: Prompt) -> None:
        self.prompt_token_ids = prompt.token_ids
        episode.num_prompt_tokens = len(prompt.token_ids)
        self._episode = episode
        self._prompt = prompt
        self._ask: Ask | None = None
        self._first_index = 0

    def ask(self, sampling: SamplingParams, num_choices: int, request_id: str, first_index: int = 0) -> Ask:
        episode = self._episode
        episode.check_room(num_choices)  # a request that is refused draws no seed, so that its retry gets that one
        own = episode.sampling_for(sampling, self.prompt_token_ids)
        self._first_index = first_index
        scope = partial(episode.request, num_choices)
        self._ask = Ask(self.prompt_token_ids, own, num_choices, episode.session_id, request_id, episode.stream, scope)
        return self._ask

    def record(self, index: int, completion: Completion, message: Message) -> None:
        assert self._ask is not None
        answer = self._ask.request_id, self._first_index + index
        self._episode.record(self._prompt, completion, message, self._ask.sampling_of(index), answer)
