"""One game: an environment with several seats, played to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.rollout.environment.seats import SeatOutError, TokenSeat
from titan_rl.rollout.group.boundary import EndsWith, RolloutEnded
from titan_rl.rollout.group.env_calls import EnvCalls
from titan_rl.rollout.group.timed import RETURN_S
from titan_rl.rollout.types import Rollout, RolloutStatus

LAST_CALL_S = 1.0
"""What an environment has at least to see an answer that was finished in time."""
_LOOK_S = 0.05  # at least between two looks at a watch that stands


class _TimeIsUp(RolloutEnded):
    """Requests that are out return with what they have, which is to be kept."""


class Game:
    """The time of one game, and how it ends for all its seats.

    A fault of one seat, or an aborted completion, is the end of all. When the time is used up, requests that are out
    return with what they have. The environment needs to handle none of that: its call waits where it asked, and is
    cancelled there.

    Args:
        rollouts: of the seats that the policy plays.
        env_timeout_s: that the environment may take without asking a seat.
    """

    def __init__(self, rollouts: Sequence[Rollout], watch: Stopwatch, *, env_timeout_s: float) -> None:
        self.watch = watch
        self._rollouts = rollouts
        self.env_timeout_s = env_timeout_s
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._is_going = False
        self._stopped_by: RolloutEnded | None = None
        self._never: asyncio.Future[NoReturn] = self._loop.create_future()
        self._asked: set[asyncio.Task[object]] = set()
        self._idle: asyncio.TimerHandle | None = None

    async def play(self, env: EnvCalls, seats: Mapping[str, TokenSeat]) -> SeatOutError | None:
        """Play it to its end.

        Returns:
            what ended it, if that was a seat that cannot go on.

        Raises:
            RolloutEnded: something else ended it.
        """
        out: SeatOutError | None = None
        looking = asyncio.create_task(self._look())
        try:
            async with self._scope:
                self._is_going = True
                self._expect_a_request()
                async with EndsWith(RolloutStatus.ERROR_ENV, watch=self.watch):
                    try:
                        await env.play_seats(seats)
                    except* SeatOutError as outs:
                        out = _first(outs)
        except TimeoutError:
            assert self._stopped_by is not None, "the scope ends by `stop` alone"
        except RolloutEnded as error:
            self._stopped_by = self._stopped_by or error
        finally:
            self._is_going = False
            for task in (looking, *self._asked):  # what the environment has left to itself
                task.cancel()
            self._never.cancel()
            if self._idle is not None:
                self._idle.cancel()
        if isinstance(self._stopped_by, _TimeIsUp):
            raise self.time_is_up()  # some may have said something since
        if self._stopped_by is not None:
            raise self._stopped_by
        return out

    @contextmanager
    def asking(self) -> Generator[None]:
        """Around a request to a seat, whose limits are its own."""
        task = asyncio.current_task()
        if not self._is_going or task is None:
            raise RuntimeError("a seat is asked, and the game is over")
        self._asked.add(task)
        self._expect_a_request()
        try:
            yield
        finally:
            self._asked.discard(task)
            self._expect_a_request()
            if self._stopped_by is not None:
                self._end_when_due()

    async def stop(self, end: RolloutEnded) -> NoReturn:
        """The game is over, with that. Does not return: the environment's call is cancelled meanwhile."""
        self._note(end)
        await self._never
        raise AssertionError("it is only ever cancelled")

    def time_is_up(self) -> RolloutEnded:
        """Left out of training, the games that take longest would bias it towards short ones: what is finished is
        judged as truncated. Only where there is nothing to judge it is an error."""
        has_turns = any(rollout.turns for rollout in self._rollouts)
        status = RolloutStatus.TRUNCATED_TIME if has_turns else RolloutStatus.ERROR_TIMEOUT
        return _TimeIsUp(status, f"its own time is up: rollout_timeout_s is {self.watch.limit_s:g}")

    def _note(self, end: RolloutEnded) -> None:
        if self._stopped_by is None or isinstance(self._stopped_by, _TimeIsUp):
            self._stopped_by = end
        self._end_when_due()

    def _end_when_due(self) -> None:
        if not isinstance(self._stopped_by, _TimeIsUp) or not self._asked:
            self._end()

    def _end(self) -> None:
        if self._is_going:
            self._scope.reschedule(self._loop.time())

    def _expect_a_request(self) -> None:
        """The environment's own time begins with the end of a request, and ends with the next one."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = None
        if not self._asked and self._is_going:
            self._idle = self._loop.call_later(self.env_timeout_s, self._is_late)

    def _is_late(self) -> None:
        error = f"TimeoutError: the environment asked no seat for {self.env_timeout_s:g} s (env_timeout_s)"
        self._note(RolloutEnded(RolloutStatus.ERROR_TIMEOUT, error))

    async def _look(self) -> None:
        while not self.watch.is_over:  # noqa: ASYNC110  it stands and goes on as requests wait
            await asyncio.sleep(max(self.watch.left_s, _LOOK_S))
        await asyncio.sleep(RETURN_S if self._asked else LAST_CALL_S)
        self._stopped_by = self._stopped_by or self.time_is_up()
        self._end()


def _first(outs: BaseExceptionGroup[SeatOutError]) -> SeatOutError:
    first = outs.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
