"""Episode of one agent: its limits, rewards and sampling, and the rollout that training uses."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import BusyError, EpisodeEndedError, RequestError
from titan_rl.generation.continuation import RequestFn
from titan_rl.rollout.checked_copies import completion_of
from titan_rl.rollout.group.turns import turn_seed
from titan_rl.rollout.renderer.types import Renderer, Tools
from titan_rl.rollout.types import Message, Rollout, RolloutStatus, Turn
from titan_rl.serving.conversations.caller import CallerPrompt, Show
from titan_rl.serving.conversations.tree import USUAL, ConversationTree, Prompt, Style, TurnNode
from titan_rl.serving.http.errors import UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.http.exchange import PositiveLimits
from titan_rl.serving.policy import CompletionRequest
from titan_rl.types import EXTRA_SAMPLING, Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class EpisodeLimits(PositiveLimits):
    """Limits of episodes.

    Args:
        time_s: Time after which an episode ends by itself, in seconds.
        turns: Maximum number of turns of one episode. A request for another turn ends the episode.
        requests: Maximum number of requests of one episode in flight. Another request raises a `BusyError`.
        memory_bytes: Approximate memory for the conversations of one episode. A request beyond it ends the episode.
        episodes: Maximum number of open episodes. Opening another raises a `BusyError`.
        keep_s: Time for which the key of an ended episode stays known, in seconds, so that late requests learn how it
            ended.
    """

    time_s: float = 3600.0
    turns: int = 1000
    requests: int = 64
    memory_bytes: int = 256 << 20
    episodes: int = 4096
    keep_s: float = 60.0


Answer = tuple[str, int]
"""Key of a completion on the client's side: the id of the answer, and the index of the choice."""


class EpisodeRewards:
    """Rewards by name, of the whole episode and of each turn. The last report of a name counts."""

    def __init__(self) -> None:
        self._by_episode: dict[str, float] = {}
        self._by_answer: dict[Answer, dict[str, float]] = {}  # in the order of the turns

    def add_turn(self, answer: Answer) -> None:
        """Note a turn, whose rewards may then be reported.

        Raises:
            RequestError: There already is a turn of this answer.
        """
        if answer in self._by_answer:
            raise RequestError(f"answer {answer[0]!r} already has a choice {answer[1]}; ids of answers must be unique")
        self._by_answer[answer] = {}

    def report(self, rewards: Mapping[str, float], answer_id: str | None, index: int) -> None:
        """Report rewards by name.

        Args:
            answer_id: Id of the answer; None for the whole episode.
            index: Index of the answer's choice.

        Raises:
            LookupError: There is no such answer.
            ValueError: A reward is not a finite number.
        """
        for name, value in rewards.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"reward {name!r} is {value!r}; it must be a finite number")
        if answer_id is not None and (answer_id, index) not in self._by_answer:
            raise LookupError(f"the episode has no choice {index} of an answer {answer_id!r}")
        of = self._by_episode if answer_id is None else self._by_answer[answer_id, index]
        of.update({str(name): float(value) for name, value in rewards.items()})

    def by_turn(self) -> list[dict[str, float]]:
        """Rewards of each turn; those of the whole episode are added to the last turn's."""
        turns = [dict(rewards) for rewards in self._by_answer.values()]
        for name, value in self._by_episode.items() if turns else ():
            turns[-1][name] = turns[-1].get(name, 0.0) + value
        return turns


_REFUSED = EXTRA_SAMPLING - {"constraint"}


class EpisodeSampling:
    """Sampling parameters of an episode: the agent decides when its completions end, training how they are sampled.

    An agent chooses `max_tokens` up to the episode's, `stop_token_ids`, the number of `top_logprobs` that it receives,
    and a constraint, for which `correction.constrained` accounts. The other parameters are the episode's: training
    cannot account for top-p sampling or a temperature of 0, and an agent that always sends the same seed would get the
    same answer in every sibling. Penalties and biases are refused, because an agent that sends them relies on their
    effect.

    If the episode has a seed, each request draws its own seed from it. That depends on the prompt and on the number of
    earlier requests with the same prompt. So an agent with concurrent requests gets the same answers again, in
    whichever order its requests arrive.

    Args:
        own: Sampling parameters of the episode; None uses the agent's.
        episode_id: Id that the seeds depend on.
    """

    def __init__(self, own: SamplingParams | None, episode_id: str) -> None:
        self._own = own
        self._episode_id = episode_id
        self._num_requests: Counter[str] = Counter()  # by prompt

    def of(self, requested: SamplingParams, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Return the sampling parameters for a request.

        Raises:
            ApiError: With status 400 if the request has penalties or biases.
        """
        own = self._own
        if own is None:
            return requested
        for name, value in requested.shaping.items():
            if name in _REFUSED:
                shown = dict(requested.logit_bias) if name == "logit_bias" else value
                raise ApiError(
                    400,
                    f"{name} = {shown!r} is not supported in an episode: it changes the distribution that completions "
                    "are sampled from, and training does not account for that; leave it out",
                    param=name,
                    code=UNSUPPORTED_VALUE,
                )
        max_tokens = min(own.max_tokens, requested.max_tokens)
        return replace(
            own,
            max_tokens=max_tokens,
            min_tokens=min(own.min_tokens, max_tokens) if requested.constraint is None else 0,
            seed=None if own.seed is None else self._draw(own.seed, prompt_token_ids),
            stop_token_ids=requested.stop_token_ids or own.stop_token_ids,
            top_logprobs=requested.top_logprobs,
            constraint=requested.constraint,
        )

    def _draw(self, seed: int, prompt_token_ids: Sequence[int]) -> int:
        prompt = blake2b(repr(list(prompt_token_ids)).encode(), digest_size=16).hexdigest()
        self._num_requests[prompt] += 1
        return turn_seed(seed, f"{self._episode_id}/{prompt}", self._num_requests[prompt] - 1)


KEY_PREFIX = "episode-"
"""Prefix of episode keys, which distinguishes them from server keys even after the episode is forgotten."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")


class Episode:
    """Episode of one agent: its conversations, requests in flight, rewards, and its end. A `Caller`.

    It ends once: by `end`, by its time limit, or by another limit. Requests in flight are then cancelled, and nothing
    is recorded or rewarded afterwards. It belongs to the event loop in which it is made.

    Example of one request:

        prompt = episode.prompt(messages, tools, None)
        completion_request = prompt.request(sampling, num_choices=1, request_id="chatcmpl-17")
        (completion,) = await policy.complete(completion_request)
        prompt.record(0, completion, message)

    Example of the end:

        episode.reward({"solved": 1.0})
        episode.end()
        episode.fill_in(rollout)

    Args:
        episode_id: Id of 1 to 128 letters, digits and `._~-`. It is part of the episode's URL.
        renderer: Converts messages to tokens. Without it there are no messages.
        stream: Generates for the episode, and is never interrupted by an abort. None is the server's policy.
        sampling: Sampling parameters that take precedence over the agent's; see `EpisodeSampling`.
        session_id: Session of the router. Defaults to the episode's id.
        on_end: Called once when the episode has ended.

    Attributes:
        key: Secret that identifies requests of the episode. It appears in no message and no `repr`.
        name: Name that is unique among episodes and clients.
        sampling: Determines the sampling parameters of each request.
        num_prompt_tokens: Number of prompt tokens of the latest request, answered or not.
        status: Status at its end; None while the episode is open.
        error: Error that ended it; None if there was none.

    Raises:
        ValueError: The id has other characters, or a wrong length.
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
        self.sampling = EpisodeSampling(sampling, self.session_id)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._sampled: list[SamplingParams] = []  # by index of the turn
        self._rewards = EpisodeRewards()
        self._in_flight: dict[asyncio.Timeout, int] = {}  # number of completions that each request asks for
        late = f"its time limit of {self._limits.time_s:g} s is over"
        self._timer = self._loop.call_later(self._limits.time_s, self.time_is_up, late)

    def __repr__(self) -> str:
        return f"Episode({self.id!r}, {self.status or 'open'}, {len(self._sampled)} turns)"

    @property
    def num_turns(self) -> int:
        return len(self._sampled)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def prompt(
        self, messages: Sequence[Message], tools: Tools | None, session_id: str | None, style: Style = USUAL
    ) -> CallerPrompt:
        """Begin a turn of a conversation with these messages.

        Raises:
            EpisodeEndedError: The episode is over.
            RequestError: The messages cannot be rendered.
        """
        self._require_open()
        return _EpisodePrompt(self, self.tree.prompt(messages, tools, style))

    def prompt_of_tokens(self, token_ids: Sequence[int], show: Show, session_id: str | None) -> CallerPrompt:
        self._require_open()
        return _EpisodePrompt(self, self.tree.prompt_of_tokens(token_ids, show))

    @asynccontextmanager
    async def request(self, num_choices: int = 1) -> AsyncGenerator[None]:
        """Context manager of one request for `num_choices` turns. The block is cancelled when the episode ends.

        Raises:
            EpisodeEndedError: The episode is over, or ends during the request.
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
        """Check that a request for `num_choices` turns may begin.

        Raises:
            EpisodeEndedError: The episode is over, or ends with this request because a limit is exhausted.
            RequestError: The request asks for more turns than are left.
            BusyError: The limit of requests in flight is reached, or the requests in flight may take up the turns that
                are left.
        """
        self._require_open()
        left = self._limits.turns - len(self._sampled)
        if left <= 0:
            self.end(RolloutStatus.TRUNCATED_TURNS, f"it has used all of its {self._limits.turns} turns")
        elif self.tree.num_bytes >= self._limits.memory_bytes:
            self.end(RolloutStatus.TRUNCATED_LENGTH, "its conversations have reached the memory limit of an episode")
        self._require_open()
        if num_choices > left:
            raise RequestError(
                f"{num_choices} completions were requested, but the episode has {left} of its {self._limits.turns} "
                "turns left; each completion is a turn"
            )
        if len(self._in_flight) >= self._limits.requests:
            raise BusyError(f"the episode has {len(self._in_flight)} requests in flight, which is its limit")
        if num_choices > left - sum(self._in_flight.values()):
            raise BusyError(f"the episode's requests in flight may take up the {left} turns that it has left")

    def record(
        self,
        prompt: Prompt,
        completion: Completion,
        message: Message,
        sampling: SamplingParams,
        answer: Answer | None = None,
    ) -> TurnNode:
        """Record a turn. The completion is copied, and the copy becomes part of the rollout.

        Args:
            message: The completion in the form in which the client receives it; see `ConversationTree.add`.
            sampling: Sampling parameters with which the completion was requested.
            answer: Key of the completion for the client: the id of the answer, and the index of the choice. Defaults to
                the completion's request id and 0.

        Raises:
            EpisodeEndedError: The episode is over. The client must not receive this completion.
            RequestError: There already is a turn of this answer.
            ValueError: A logprob is not finite, or there are more tokens than were requested.
        """
        self._require_open()
        own = replace(completion_of(completion, sampling.max_tokens), top_logprobs=None)  # only the agent needs them
        self._rewards.add_turn(answer or (completion.request_id, 0))
        self._sampled.append(sampling)
        return self.tree.add(prompt, own, message)

    def reward(self, rewards: Mapping[str, float], answer_id: str | None = None, index: int = 0) -> None:
        """Report rewards by name, of the whole episode or of one turn. The last report of a name counts.

        Args:
            answer_id: Id of the turn's answer, as the client knows it; None for the whole episode.
            index: Index of the answer's choice.

        Raises:
            EpisodeEndedError: The episode is over, and may have been scored.
            LookupError: The episode has no such answer.
            ValueError: A reward is not a finite number.
        """
        self._require_open()
        self._rewards.report(rewards, answer_id, index)

    def end(self, status: RolloutStatus = RolloutStatus.COMPLETED, error: str | Failure | None = None) -> bool:
        """End the episode. Returns False if it had already ended, because only the first end counts."""
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
        """End by timeout; see `end`. An episode with turns counts as truncated, and one without turns as an error."""
        return self.end(RolloutStatus.TRUNCATED_TIME if self._sampled else RolloutStatus.ERROR_TIMEOUT, error)

    async def wait(self) -> None:
        """Wait until the episode is over."""
        await asyncio.shield(self._ended)

    def fill_in(self, rollout: Rollout) -> None:
        """Fill a rollout with turns, transcript and status. Called when the episode is over.

        Every turn is in the rollout once. The turns of a branch follow each other, so that `build_samples` makes one
        sample of each branch and trains each sampled token in one of them. Rewards of the whole episode are added to
        the last turn. If an agent completed without ever asking the policy, the status is ERROR_ENV, because the
        episode says nothing about the policy.
        """
        assert self.status is not None, "the episode has not ended"
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
            rollout.status, rollout.error = (
                RolloutStatus.ERROR_ENV,
                "the agent ended without sending a request to the policy",
            )

    def _require_open(self) -> None:
        if self.status is not None:
            raise self._is_over()

    def _is_over(self) -> EpisodeEndedError:
        return EpisodeEndedError(f"the episode is over: {self.status}")


class _EpisodePrompt:
    def __init__(self, episode: Episode, prompt: Prompt) -> None:
        self.prompt_token_ids = prompt.token_ids
        episode.num_prompt_tokens = len(prompt.token_ids)
        self._episode = episode
        self._prompt = prompt
        self._request: CompletionRequest | None = None
        self._first_index = 0

    def request(
        self, sampling: SamplingParams, num_choices: int, request_id: str, first_index: int = 0
    ) -> CompletionRequest:
        episode = self._episode
        episode.check_room(num_choices)  # first, so that a refused request draws no seed
        own = episode.sampling.of(sampling, self.prompt_token_ids)
        self._first_index = first_index
        scope = partial(episode.request, num_choices)
        self._request = CompletionRequest(
            self.prompt_token_ids, own, num_choices, episode.session_id, request_id, episode.stream, scope
        )
        return self._request

    def record(self, index: int, completion: Completion, message: Message) -> None:
        assert self._request is not None
        answer = self._request.request_id, self._first_index + index
        self._episode.record(self._prompt, completion, message, self._request.sampling_of(index), answer)
