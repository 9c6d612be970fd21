"""Reward functions with their weights, and the handling of their failures."""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

from titan_rl.core.calls.bounded import OutOfTimeError, bounded
from titan_rl.core.calls.cancellation import gather_or_cancel, is_ctrl_c
from titan_rl.core.calls.pulse import PULSE
from titan_rl.core.calls.threads import DaemonThreads
from titan_rl.core.calls.user_code import is_async, source_location, summary, where
from titan_rl.core.errors import RewardError
from titan_rl.core.plain_data import safe_repr, snapshot
from titan_rl.rollout.checked_copies import completion_for_user
from titan_rl.rollout.types import Rollout, RolloutStatus, Turn
from titan_rl.types import float_or_none

T = TypeVar("T")

MAX_BACKOFF_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Policy for failed calls of a reward: it raises, returns no finite number, or takes too long.

    Example: a judge behind a network, which is retried after 2, 4, 8 and 16 seconds before its group is dropped:

        Reward(judge, on_failure=FailurePolicy(retries=4, backoff_s=2.0))

    Args:
        retries: Number of retries. A call that took too long is not retried.
        backoff_s: Seconds before the first retry. Each further wait is twice as long, up to 60 s.
        then: Action after the last retry. "drop_group" leaves the group out of training, and
            `scheduling.max_failed_groups` such groups in a row end the run; "fail_run" ends the run.

    Raises:
        ValueError: a value is not allowed. The message names the field, the value and what is allowed.
    """

    retries: int = 2
    backoff_s: float = 1.0
    then: Literal["drop_group", "fail_run"] = "drop_group"

    def __post_init__(self) -> None:
        if not isinstance(self.retries, int) or self.retries < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"FailurePolicy retries is {self.retries!r}; it must be a whole number, at least 0")
        backoff_s = float_or_none(self.backoff_s)
        if backoff_s is None or not 0 <= backoff_s < math.inf:
            raise ValueError(f"FailurePolicy backoff_s is {self.backoff_s!r}; it must be finite and at least 0")
        if self.then not in ("drop_group", "fail_run"):
            raise ValueError(f"FailurePolicy then is {self.then!r}; it must be 'drop_group' or 'fail_run'")

    def wait_s(self, retry: int, error: RewardError) -> float:
        """Seconds to wait after an error before a retry; the first retry is number 0.

        Raises:
            RewardError: the call is not retried. This is `error`, with `ends_run` set according to the policy.
        """
        if retry == self.retries or isinstance(error.__cause__, OutOfTimeError):
            error.ends_run = self.then == "fail_run"
            raise error
        wait_s = min(self.backoff_s * 2.0 ** min(retry, 60), MAX_BACKOFF_S)
        logger.warning("%s; retry %d of %d in %g s", error, retry + 1, self.retries, wait_s)
        return wait_s


class UserFunction:
    """User function, sync or async, called on the event loop or in its own threads.

    Args:
        fn: The function.
        name: Name of the reward, for messages.
        max_threads: Largest number of concurrent calls in threads; None calls the function on the event loop.
    """

    def __init__(self, fn: Callable[..., Any], name: str, max_threads: int | None = None) -> None:
        self._fn = fn
        self._name = name
        self._threads = None if max_threads is None else DaemonThreads(max_threads, f"reward {name!r}")

    async def __call__(self, argument: Any, about: str, timeout_s: float | None) -> Any:
        """Call the function and return its result. The time limit of a call in a thread starts when a thread is free.

        Args:
            argument: Argument of the function.
            about: Subject of the call for messages, such as "rollout 'g17/3'".
            timeout_s: Time limit; None sets no limit.

        Raises:
            RewardError: the function raised, was cancelled by other code, or took too long.
        """

        def call() -> Any:
            with PULSE.limited(timeout_s):
                try:
                    return self._fn(argument)
                except BaseException as error:  # including SystemExit, and a CancelledError, which is not the caller's
                    if is_ctrl_c(error):
                        raise
                    raise reward_error(self._name, about, error) from error

        try:
            result = call() if self._threads is None else await self._threads.run(call, timeout_s)
            if inspect.isawaitable(result):
                result = await bounded(_awaited(result), timeout_s, f"reward {self._name!r} on {about}")
        except RewardError:
            raise
        except OutOfTimeError as error:
            raise RewardError(
                f"reward {self._name!r} took longer than {timeout_s:g} s on {about}; "
                "raise its timeout_s, or the rubric's, or make it faster",
                where(error) or source_location(self._fn),
            ) from error
        except Exception as error:
            raise reward_error(self._name, about, error) from error
        return result


async def _awaited(result: Awaitable[T]) -> T:
    return await result  # the watchdog identifies rewards by this frame


def reward_error(name: str, about: str, error: BaseException) -> RewardError:
    return RewardError(f"reward {name!r} failed on {about}: {summary(error)}", where(error))


def subject_of(rollouts: Sequence[Rollout], *, each: bool = False) -> str:
    """Subject of a call for messages: a rollout, or a group."""
    return f"rollout {rollouts[0].rollout_id!r}" if each else f"group {rollouts[0].group_id!r}"


def copy_of(rollout: Rollout) -> Rollout:
    """Copy of a rollout that a reward may change. The sample is shared, and routed experts are left out."""
    return replace(
        rollout,
        turns=list(map(_copy_of_turn, rollout.turns)),
        messages=[snapshot(message) for message in rollout.messages],
        reward_breakdown=dict(rollout.reward_breakdown),
        metrics=dict(rollout.metrics),
    )


def _copy_of_turn(turn: Turn) -> Turn:
    return Turn(
        turn.prompt_token_ids,
        completion_for_user(turn.completion),
        dict(turn.rewards),
        None if turn.token_advantages is None else list(turn.token_advantages),
        turn.sampling,
    )


def finite_numbers(values: Any, count: int, name: str, about: str) -> list[float]:
    """Convert the result of a reward to `count` finite numbers.

    Raises:
        RewardError: the result cannot be converted.
    """
    try:
        given = list(values)
        if isinstance(values, Set | Mapping):
            raise TypeError("its entries have no order, or are keys")
    except Exception as error:
        raise RewardError(
            f"reward {name!r} returned {safe_repr(values)} for {about}; it must return a sequence"
        ) from error
    if len(given) != count:
        raise RewardError(f"reward {name!r} returned {len(given)} values for the {count} rollouts of {about}")
    return [_number(value, name, about) for value in given]


def _number(value: Any, name: str, about: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except Exception as error:  # `float` runs code of the value
        raise RewardError(
            f"reward {name!r} returned {safe_repr(value)} for {about}; it must return a number"
        ) from error
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} returned {number} for {about}; it must be finite")
    return number


RewardFn = Callable[[Rollout], float | Awaitable[float]]
GroupRewardFn = Callable[[Sequence[Rollout]], Sequence[float] | Awaitable[Sequence[float]]]


F = TypeVar("F", bound=Callable[..., Any])


class WeightedReward(Protocol):
    """Reward in a rubric: `Reward`, `GroupReward`, or your own class.

    With an attribute `per_rollout = True`, `values` is called for one rollout at a time, possibly before its siblings
    end. An attribute `on_failure` holds the `FailurePolicy` for exceptions of `values`. A judge has a method
    `take_metrics(rollout_id)`, whose metrics are added to the rollout's, with the distance of its value from those of
    other rewards. A reward with connections has a coroutine method `close()`, awaited after the last rollout. If it has
    a method `show_on(console)`, a run calls it with the `Console` that shows lines in its terminal.
    """

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    async def values(self, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """Finite values, one per rollout.  # [num_rollouts]"""
        ...


class FunctionReward(ABC, Generic[F]):
    """Base of `Reward` and `GroupReward`: a user function with its weight and failure policy."""

    def __init__(
        self,
        fn: F,
        weight: float = 1.0,
        name: str | None = None,
        *,
        in_thread: bool = False,
        max_threads: int = 32,
        timeout_s: float | None = None,
        on_failure: FailurePolicy | None = None,
    ) -> None:
        if not callable(fn):
            raise ValueError(f"{type(self).__name__} got {fn!r}; it must be a function")
        self.name: str = name or getattr(fn, "__name__", type(fn).__name__)
        number = float_or_none(weight)
        if number is None or not math.isfinite(number):
            raise ValueError(f"reward {self.name!r} has weight {weight!r}; it must be finite")
        self.weight = number
        if timeout_s is not None and not (float_or_none(timeout_s) or 0) > 0:
            raise ValueError(f"reward {self.name!r} has timeout_s {timeout_s!r}; it must be positive or None")
        if not isinstance(max_threads, int) or max_threads < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"reward {self.name!r} has max_threads {max_threads!r}; it must be an integer, at least 1")
        self.timeout_s = timeout_s
        self._call = UserFunction(fn, self.name, max_threads if in_thread else None)
        only_computes = not in_thread and not is_async(fn)  # a retry would give the same error
        self.on_failure = on_failure or (FailurePolicy(retries=0) if only_computes else FailurePolicy())

    @abstractmethod
    async def values(self, rollouts: Sequence[Rollout], timeout_s: float | None = None) -> Sequence[float]:
        """See `WeightedReward.values`. `timeout_s` is the time limit of a call if the reward has no `timeout_s`."""


class Reward(FunctionReward[RewardFn]):
    """Reward that is a function of one rollout.

    Example:

        def is_right(rollout):
            return rollout.messages[-1]["content"] == rollout.sample["answer"]

        Rubric([Reward(is_right), Reward(judge, weight=0.5, timeout_s=30.0)])  # `judge` is async

    Args:
        fn: Function `fn(rollout) -> float`, sync or async. Booleans count as 0 and 1.
        weight: Weight of the value in the rubric's mean or sum. With 0 the value is only recorded.
        name: Key in `reward_breakdown`; by default `fn.__name__`.
        in_thread: Whether a sync `fn` runs in a worker thread. Otherwise it runs on the event loop, where a call of
            more than a few milliseconds delays all other rollouts.
        max_threads: Largest number of concurrent calls in threads. Further calls wait, and their time limit does not
            start yet. The threads are not shared: a call that never returns blocks neither other rewards nor the end of
            the process.
        timeout_s: Seconds that one call may take; None takes the rubric's limit.
        on_failure: Policy for failed calls. By default they are retried twice if `fn` is async or in a thread, and not
            at all otherwise; then the group is dropped.

    Raises:
        ValueError: the weight is not finite, or a limit is not positive.
    """

    per_rollout = True

    async def values(self, rollouts: Sequence[Rollout], timeout_s: float | None = None) -> Sequence[float]:
        limit = self.timeout_s or timeout_s
        one = [self._call(rollout, subject_of([rollout], each=True), limit) for rollout in rollouts]
        return await gather_or_cancel(one)


class GroupReward(FunctionReward[GroupRewardFn]):
    """Reward that is a function of all siblings at once: rankings, diversity, one call of a judge.

    Args:
        fn: Function `fn(rollouts) -> one float per rollout, in order`, sync or async. It receives the siblings that are
            judged: none that ended in an error, and no truncated ones if the rubric has a `truncated_reward`. If the
            environment has several seats, it is called once for each seat.
        weight, name, in_thread, max_threads, timeout_s, on_failure: See `Reward`.

    Raises:
        ValueError: see `Reward`.
    """

    async def values(self, rollouts: Sequence[Rollout], timeout_s: float | None = None) -> Sequence[float]:
        return await self._call(rollouts, subject_of(rollouts), self.timeout_s or timeout_s)


class EnvReward(Reward):
    """Reward made by `env_reward`."""


def env_reward(name: str, weight: float = 1.0) -> EnvReward:
    """Make a reward from the environment's rewards with this name, summed over the turns.

    It fails with a `RewardError` if the environment of a completed rollout never gave the reward. An `AgentEnv` may
    check this itself with `RolloutPolicy.env_rewards`, and end with another status.
    """

    def value(rollout: Rollout) -> float:
        given = [turn.rewards for turn in rollout.turns]
        if rollout.status is RolloutStatus.COMPLETED and not any(name in rewards for rewards in given):
            names = sorted({key for rewards in given for key in rewards})
            raise LookupError(f"the environment gave no reward {name!r}, only {names}")
        return sum(rewards.get(name, 0.0) for rewards in given)

    return EnvReward(value, weight, name)


class SoftOverlong:
    """Penalty for answers that approach the length limit.

        0                                      up to max_tokens - margin
        (max_tokens - margin - length) / margin    in the margin, falling to -1
        -1                                     beyond max_tokens

    This is the soft overlong punishment of DAPO (Yu et al., 2025, arXiv:2503.14476, eq. 13). The length is the number
    of tokens of the rollout's longest completion.

    Example:

        Rubric([Reward(correct), Reward(SoftOverlong(max_tokens=1024, margin=256), name="overlong")])

    Raises:
        ValueError: the margin is not between 1 and max_tokens.
    """

    def __init__(self, max_tokens: int, margin: int) -> None:
        are_integers = isinstance(margin, int) and isinstance(max_tokens, int)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not (are_integers and 1 <= margin <= max_tokens):
            raise ValueError(f"SoftOverlong margin is {margin}; it must be between 1 and max_tokens, {max_tokens}")
        self._max_tokens = max_tokens
        self._margin = margin

    def __call__(self, rollout: Rollout) -> float:
        length = max((len(turn.completion.token_ids) for turn in rollout.turns), default=0)
        return max(-1.0, min(0.0, (self._max_tokens - self._margin - length) / self._margin))
