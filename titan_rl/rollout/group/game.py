"""Play of a `SeatedEnv`: the game with its time limits, and its seats with their players."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeVar, cast

from titan_rl.core.calls.bounded import OutOfTimeError, bounded
from titan_rl.core.calls.user_code import Failure, summary
from titan_rl.core.plain_data import snapshot
from titan_rl.rollout.checked_copies import completion_for_user, completion_of, messages_of, token_ids_of
from titan_rl.rollout.environment.types import MessagePlayer, Player, SeatOutError, TokenPlayer, TokenSeat
from titan_rl.rollout.group.turns import LAST_CALL_S, RETURN_S, TurnTaker, turn_seed, used_up
from titan_rl.rollout.group.user_code_boundary import EnvCalls, RolloutEnded, TimeBudget, TimeIsUp, UserCodeBoundary
from titan_rl.rollout.types import Message, Rollout, RolloutStatus
from titan_rl.types import Completion, FinishReason


class Game:
    """Time limits and end of one game, shared by its seats.

    A fault of one seat, or an aborted completion, ends the whole game. When the time is used up, requests in flight
    return with the tokens they have. The environment need not handle this: its call is cancelled where it waits for a
    seat.

    Args:
        time_budget: Time that the seats of the policy share.
        env_timeout_s: Longest time that the environment may take without asking a seat.
    """

    def __init__(self, time_budget: TimeBudget, *, env_timeout_s: float) -> None:
        self.time_budget = time_budget
        self.watch = time_budget.watch
        self.env_timeout_s = env_timeout_s
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._is_running = False
        self._stopped_by: RolloutEnded | None = None
        self._never: asyncio.Future[NoReturn] = self._loop.create_future()
        self._pending: set[asyncio.Task[object]] = set()
        self._env_timer: asyncio.TimerHandle | None = None

    async def play(self, env: EnvCalls, seats: Mapping[str, TokenSeat]) -> SeatOutError | None:
        """Play the game to its end.

        Returns:
            Error of the seat that ended the game, if one did.

        Raises:
            RolloutEnded: something else ended the game.
        """
        out: SeatOutError | None = None
        time_limit = asyncio.create_task(self._end_at_own_time_limit())
        try:
            async with self._scope:
                self._is_running = True
                self._restart_env_timer()
                async with UserCodeBoundary(RolloutStatus.ERROR_ENV, watch=self.watch):
                    try:
                        await env.play_seats(seats)
                    except* SeatOutError as outs:
                        out = _first(outs)
        except TimeoutError:
            assert self._stopped_by is not None, "only `stop` ends the scope"
        except RolloutEnded as error:
            self._stopped_by = self._stopped_by or error
        finally:
            self._is_running = False
            for task in (time_limit, *self._pending):  # tasks that the environment did not await
                task.cancel()
            self._never.cancel()
            if self._env_timer is not None:
                self._env_timer.cancel()
        if isinstance(self._stopped_by, TimeIsUp):
            raise self.time_budget.error()  # seats may have completed turns in the meantime
        if self._stopped_by is not None:
            raise self._stopped_by
        return out

    @contextmanager
    def asking(self) -> Generator[None]:
        """Context of a request to a seat. The seat has its own time limits."""
        task = asyncio.current_task()
        if not self._is_running or task is None:
            raise RuntimeError("a seat received a request after the end of the game")
        self._pending.add(task)
        self._restart_env_timer()
        try:
            yield
        finally:
            self._pending.discard(task)
            self._restart_env_timer()
            if self._stopped_by is not None:
                self._end_when_due()

    async def stop(self, end: RolloutEnded) -> NoReturn:
        """End the game. Does not return, because the environment's call is cancelled."""
        self._stop_by(end)
        await self._never
        raise AssertionError("it can only be cancelled")

    def _stop_by(self, end: RolloutEnded) -> None:
        if self._stopped_by is None or isinstance(self._stopped_by, TimeIsUp):
            self._stopped_by = end
        self._end_when_due()

    def _end_when_due(self) -> None:
        if not isinstance(self._stopped_by, TimeIsUp) or not self._pending:
            self._end()

    def _end(self) -> None:
        if self._is_running and not self._scope.expired():
            self._scope.reschedule(self._loop.time())

    def _restart_env_timer(self) -> None:
        """Restart the timer of the environment's own time, which runs from the end of one request to the start of the
        next."""
        if self._env_timer is not None:
            self._env_timer.cancel()
        self._env_timer = None
        if not self._pending and self._is_running:
            self._env_timer = self._loop.call_later(self.env_timeout_s, self._env_timed_out)

    def _env_timed_out(self) -> None:
        error = f"TimeoutError: the environment asked no seat for {self.env_timeout_s:g} s (env_timeout_s)"
        self._stop_by(RolloutEnded(RolloutStatus.ERROR_TIMEOUT, error))

    async def _end_at_own_time_limit(self) -> None:
        await used_up(self.watch)
        await asyncio.sleep(RETURN_S if self._pending else LAST_CALL_S)
        self._stopped_by = self._stopped_by or self.time_budget.error()
        self._end()


def _first(outs: BaseExceptionGroup[SeatOutError]) -> SeatOutError:
    first = outs.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


T = TypeVar("T")

SEAT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def rollouts_of_seats(game: Rollout, given: Any) -> list[Rollout]:
    """Rollouts of the seats that the policy plays, with IDs such as "g17/3/first".

    Raises:
        TypeError, ValueError: the result of `players` does not name a player for each seat, or the policy plays none.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"players returned {type(given).__name__}; it must map the names of seats to their players")
    players = cast("Mapping[Any, Any]", given)
    for name, player in players.items():
        if not (isinstance(name, str) and SEAT_NAME.fullmatch(name)):
            raise ValueError(f"a seat is called {name!r}; it must be letters and digits, and begin with a letter")
        if not (player == "policy" or isinstance(player, TokenPlayer | MessagePlayer)):
            raise TypeError(f'seat {name!r} has {player!r}; it must be "policy", a TokenPlayer or a MessagePlayer')
    trained = [name for name, player in players.items() if player == "policy"]
    if not trained:
        raise ValueError(f'the policy plays none of the seats {list(players)}; assign "policy" to one of them')
    return [
        Rollout(f"{game.rollout_id}/{name}", game.group_id, game.sibling, game.sample, seat=name) for name in trained
    ]


async def play_game(
    env: EnvCalls, game_id: str, players: Mapping[str, Player], rollouts: Sequence[Rollout], turns: TurnTaker
) -> None:
    """Play a `SeatedEnv` to its end, and fill in the rollouts of the policy's seats.

    Args:
        env: Environment.
        game_id: ID of the game, from which the session ids of the other players are made.
        players: Player of each seat.
        rollouts: Rollouts of the policy's seats.
        turns: Limits, sampling and time of the policy's seats.

    Raises:
        RolloutEnded: the game ended in a way that ends all rollouts with the same status.
    """
    game = Game(turns.time_budget, env_timeout_s=turns.limits.env_timeout_s)
    seats: dict[str, _PolicySeat | _OtherSeat] = {}
    own = {str(rollout.seat): rollout for rollout in rollouts}
    for name, player in players.items():
        if name in own:
            seats[name] = _PolicySeat(game, replace(turns, rollout=own[name]))
        else:
            seats[name] = _OtherSeat(game, name, player, turns, f"{game_id}/{name}")
    out: SeatOutError | None = None
    end = RolloutStatus.COMPLETED
    try:
        out = await game.play(env, seats)
    except RolloutEnded as error:
        if error.status is not RolloutStatus.TRUNCATED_TIME:
            raise
        end = error.status
        for rollout in rollouts:
            rollout.error = error.error
    if out is not None and out.seat not in own:
        raise RolloutEnded(RolloutStatus.ERROR_ENV, f"{out}; the policy does not play it")
    for name, rollout in own.items():
        gone = seats[name].out
        if gone is not None:
            rollout.status, rollout.error = gone.status, gone.why
        else:
            rollout.status = end if rollout.turns and out is None else RolloutStatus.UNDECIDED
        if rollout.status is RolloutStatus.UNDECIDED and out is not None:
            rollout.error = str(out)


class _Seat:
    """Base class of seats. A seat answers one request at a time, until it is out.

    Attributes:
        out: Error that took the seat out of the game; None while it can continue.
    """

    def __init__(self, game: Game, name: str, player: Player) -> None:
        self.name = name
        self.player: Player = player
        self.out: SeatOutError | None = None
        self._game = game
        self._is_answering = False

    async def reply(self, messages: Sequence[Message]) -> Message:
        raise TypeError(f"seat {self.name!r} receives messages, but its player is not a MessagePlayer")

    def leave(self, status: RolloutStatus, why: str) -> SeatOutError:
        self.out = self.out or SeatOutError(self.name, status, why)
        return self.out

    def record(self, messages: Sequence[Message]) -> None:
        pass

    def reward(self, name: str, value: float) -> None:
        if not isinstance(name, str) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"seat {self.name!r} got the reward {name!r}: {value!r}; it must be a finite number")

    @contextmanager
    def _answering(self) -> Generator[None]:
        if self.out is not None:
            raise self.out
        if self._is_answering:
            raise RuntimeError(
                f"seat {self.name!r} received a request before it answered the previous one; await its answer first"
            )
        self._is_answering = True
        try:
            with self._game.asking():
                yield
        finally:
            self._is_answering = False


class _PolicySeat(_Seat):
    """Seat of the policy, whose turns form a rollout."""

    def __init__(self, game: Game, turns: TurnTaker) -> None:
        super().__init__(game, str(turns.rollout.seat), "policy")
        self._rollout = turns.rollout
        self._turns = turns
        self._early: dict[str, float] = {}  # rewards from before its first turn

    async def generate(self, prompt_token_ids: Sequence[int]) -> Completion:
        prompt = token_ids_of(prompt_token_ids, "the prompt")
        is_cut = False
        end: RolloutEnded | None = None
        with self._answering():
            if len(self._rollout.turns) >= (most := self._turns.limits.max_turns):
                raise self.leave(RolloutStatus.TRUNCATED_TURNS, f"it has had {most} turns (max_turns)")
            try:
                is_cut = await self._turns.take(prompt)
            except RolloutEnded as error:
                if error.status is RolloutStatus.TRUNCATED_PROMPT:
                    raise self.leave(error.status, str(error.error)) from None
                end = error
        for name, value in self._early.items():
            self.reward(name, value)
        self._early = {}
        if end is not None or is_cut:
            await self._game.stop(end or self._game.time_budget.error())
        completion = self._rollout.turns[-1].completion
        if completion.finish_reason is FinishReason.LENGTH:
            self.leave(RolloutStatus.TRUNCATED_LENGTH, "an answer used up the token budget")
        return completion_for_user(completion)

    def record(self, messages: Sequence[Message]) -> None:
        self._rollout.messages.extend(messages_of(messages))

    def reward(self, name: str, value: float) -> None:
        super().reward(name, value)
        if not self._rollout.turns:
            self._early[name] = self._early.get(name, 0.0) + float(value)
            return
        last = self._rollout.turns[-1]
        rewards = {**last.rewards, name: last.rewards.get(name, 0.0) + float(value)}
        self._rollout.turns[-1] = replace(last, rewards=rewards)


class _OtherSeat(_Seat):
    """Seat of another player, which counts as a part of the environment: the game's time is paused while it answers,
    and its errors end the game as a fault."""

    def __init__(self, game: Game, name: str, player: Player, policys: TurnTaker, session_id: str) -> None:
        super().__init__(game, name, player)
        self._session_id = session_id
        self._sampling = policys.sampling
        self._max_context = policys.max_context
        self._num_turns = 0

    async def generate(self, prompt_token_ids: Sequence[int]) -> Completion:
        player = self.player
        if not isinstance(player, TokenPlayer):
            raise TypeError(f"seat {self.name!r} receives tokens, but its player is not a TokenPlayer")
        prompt = token_ids_of(prompt_token_ids, "the prompt")
        if len(prompt) >= self._max_context:
            raise self.leave(RolloutStatus.TRUNCATED_PROMPT, f"its prompt has {len(prompt)} tokens")
        with self._answering():
            completion = await self._within(player.timeout_s, self._completion(player, prompt))
        if completion.finish_reason is FinishReason.LENGTH:
            self.leave(RolloutStatus.TRUNCATED_LENGTH, "an answer used up the token budget")
        return completion

    async def reply(self, messages: Sequence[Message]) -> Message:
        player = self.player
        if not isinstance(player, MessagePlayer):
            return await super().reply(messages)
        timeout_s = self._game.env_timeout_s if player.timeout_s is None else player.timeout_s
        with self._answering():
            return await self._within(timeout_s, self._message(player, messages))

    async def _completion(self, player: TokenPlayer, prompt: list[int]) -> Completion:
        base, request_id = self._sampling.seed, f"{self._session_id}/{self._num_turns}"
        sampling = replace(
            self._sampling.within(self._max_context - len(prompt)),
            temperature=self._sampling.temperature if player.temperature is None else player.temperature,
            seed=None if base is None else turn_seed(base, self._session_id, self._num_turns),
            return_routed_experts=False,
        )
        given = await player.generate(prompt, request_id=request_id, session_id=self._session_id, sampling=sampling)
        completion = completion_of(given, sampling.max_tokens)
        if completion.finish_reason is FinishReason.ABORT:
            raise RuntimeError("its completion was aborted")
        return completion

    async def _message(self, player: MessagePlayer, messages: Sequence[Message]) -> Message:
        answer: Any = player.reply(messages)
        answer = await answer if inspect.isawaitable(answer) else answer
        if isinstance(answer, str):
            return {"role": "assistant", "content": answer}
        if not isinstance(answer, Mapping):
            raise TypeError(f"it returned {answer!r}; a reply must be text or a message")
        return snapshot(answer)

    async def _within(self, timeout_s: float, answering: Coroutine[Any, Any, T]) -> T:
        """The player's answer. An error or a late answer ends the game."""
        try:
            with self._game.watch.pause():
                answer = await bounded(answering, timeout_s, f"the player of seat {self.name!r}")
        except Exception as error:
            status = RolloutStatus.ERROR_TIMEOUT if isinstance(error, OutOfTimeError) else RolloutStatus.ERROR_ENV
            failure = Failure.of(error, f"the player of seat {self.name!r}: {summary(error)}")
        else:
            self._num_turns += 1
            return answer
        return await self._game.stop(RolloutEnded(status, failure))
