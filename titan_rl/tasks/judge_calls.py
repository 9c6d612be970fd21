"""Base of rewards that a model computes, whose calls are rate-limited, deduplicated, retried with backoff, and cached.

    question -> cache on disk -> same question in flight -> limit in flight -> rate -> model, with retries -> cache

A call continues if its caller is cancelled, for example because a pause of generation interrupts judging. The answer is
then in the cache when the reward is computed again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from cachetools import FIFOCache

from titan_rl.core.calls.cancellation import stray_cancellation_fails
from titan_rl.core.calls.retries import Backoff, Outage
from titan_rl.core.calls.user_code import summary, where
from titan_rl.core.console import Console
from titan_rl.core.errors import GenerationError, RequestError, RewardError
from titan_rl.rollout.rewards.reward import FailurePolicy, FunctionReward

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

MOST_IN_MEMORY = 16_384
"""Largest number of verdicts in memory. The oldest are forgotten, so that memory does not grow with the run."""

MOST_JUDGED = 4096
"""Largest number of rollouts whose metrics are kept for the rubric, which does not collect those of dropped groups."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer of a judge.

    Args:
        value: Text of a model, or numbers of a reward model.
        prompt_tokens: Number of tokens of the question, as the endpoint reports it; 0 if it does not.
        completion_tokens: Number of tokens of the answer, as the endpoint reports it; 0 if it does not.
        seconds: Duration of the call, including retries and waits.
        is_cached: Whether the answer was known, or another call was asking for it at the same time.
    """

    value: Any
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    is_cached: bool = False


class JudgeQuestion(Protocol):
    """Question to a model: its identity in the cache, and the call itself."""

    @property
    def content(self) -> Mapping[str, Any]:
        """Everything on which the answer depends, as JSON values."""
        ...

    async def ask(self) -> Verdict: ...


class VerdictCache:
    """Verdicts in a folder, one file for each, by a hash of the question's content. Processes may share the folder,
    because files appear atomically.

    Args:
        folder: Folder, which is made for the first verdict. None keeps verdicts in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: FIFOCache[str, Verdict] = FIFOCache(MOST_IN_MEMORY)

    @staticmethod
    def key_of(content: Mapping[str, Any]) -> str:
        data = json.dumps(content, sort_keys=True, ensure_ascii=True, default=repr)
        return hashlib.blake2b(data.encode(), digest_size=20).hexdigest()

    def get(self, key: str) -> Verdict | None:
        if key in self._known:
            return self._known[key]
        if self._folder is None:
            return None
        try:
            stored = json.loads(self._path(key).read_text(encoding="utf-8"))
            return Verdict(stored["value"], int(stored["prompt_tokens"]), int(stored["completion_tokens"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("the verdict %s cannot be read and is requested again: %s", self._path(key), error)
            return None

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict. A verdict that cannot be written is kept in memory."""
        if self._folder is None:
            self._known[key] = verdict
            return
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(verdict), file)
            os.replace(name, path)
        except (OSError, TypeError) as error:
            logger.warning("the verdict %s cannot be written to disk: %s", path, error)
            self._known[key] = verdict

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"


class ModelReward(FunctionReward[Any]):
    """Reward that a model computes.

    Args:
        fn: User's function from a rollout, or from a group, to the question.
        weight, name, on_failure: See `Reward`.
        cache: Folder of the verdicts; None keeps them in memory.
        in_flight: Largest number of concurrent calls.
        per_minute: Largest number of calls per minute, which are spaced evenly; None sets no limit.
        outage_s: Seconds for which the model may fail before a call fails.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        weight: float,
        name: str,
        *,
        cache: str | Path | None,
        in_flight: int,
        per_minute: float | None,
        outage_s: float,
        on_failure: FailurePolicy,
    ) -> None:
        super().__init__(fn, weight, name, timeout_s=outage_s, on_failure=on_failure)
        for field, value in (("in_flight", in_flight), ("per_minute", per_minute)):
            if value is not None and not value > 0:
                raise ValueError(f"{field} of judge {name!r} is {value!r}; it must be positive")
        if in_flight != int(in_flight):
            raise ValueError(f"in_flight of judge {name!r} is {in_flight!r}; it must be an integer")
        self._cache = VerdictCache(None if cache is None else Path(cache))
        self._in_flight = in_flight
        self._spacing_s = 60 / per_minute if per_minute else 0.0
        self._outage = Outage(f"judge {name!r}")
        self._next_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(in_flight)
        self._running: dict[str, asyncio.Task[Verdict]] = {}
        self._metrics: FIFOCache[str, dict[str, float]] = FIFOCache(MOST_JUDGED)  # by rollout id

    def take_metrics(self, rollout_id: str) -> dict[str, float]:
        """Return the metrics of the judging of a rollout, and forget them."""
        return self._metrics.pop(rollout_id, {})

    def show_on(self, console: Console) -> None:
        """Show outages on a console; by default they are logged."""
        self._outage.console = console

    def _note(self, rollout_id: str, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of the judging of a rollout."""
        self._metrics[rollout_id] = {f"{self.name}_{key}": value for key, value in metrics.items()}

    async def _ask(self, question: JudgeQuestion, check: Callable[[Any], object]) -> Verdict:
        """Answer a question. `check` is called with each answer before it is cached. If it does not accept a cached
        answer, for example because a judge's `parse` has changed, the question is asked again.

        Raises:
            RewardError: the model refuses the question, has failed for `timeout_s`, or `check` raised.
        """
        self._begin()
        key = self._cache.key_of(question.content)
        known = self._cache.get(key)
        if known is not None and self._accepts(known, check):
            return replace(known, is_cached=True)
        task = self._running.get(key)
        is_first = task is None
        if task is None:
            task = self._running[key] = asyncio.ensure_future(self._answer(key, question, check))
            task.add_done_callback(lambda done: self._ended(key, done))
        verdict = await asyncio.shield(task)
        return verdict if is_first else replace(verdict, is_cached=True)

    def _accepts(self, known: Verdict, check: Callable[[Any], object]) -> bool:
        try:
            check(known.value)
        except Exception as error:
            logger.warning("a cached answer of judge %r cannot be parsed and is requested again: %s", self.name, error)
            return False
        return True

    def _begin(self) -> None:
        """Forget the calls of an earlier event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._running, self._next_at = loop, {}, 0.0
            self._slots = asyncio.Semaphore(self._in_flight)

    def _ended(self, key: str, task: asyncio.Task[Verdict]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved here, so that asyncio does not report it if no caller waits any more

    async def _answer(self, key: str, question: JudgeQuestion, check: Callable[[Any], object]) -> Verdict:
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self._slots:
            verdict = await self._until_answered(question.ask)
        try:
            check(verdict.value)
        except Exception as error:
            raise RewardError(
                f"the answer of judge {self.name!r} cannot be parsed: {type(error).__name__}: {error}; it said "
                f"{str(verdict.value)[:200]!r}"
            ) from error
        verdict = replace(verdict, seconds=clock() - began)
        self._cache.put(key, verdict)
        return verdict

    async def _until_answered(self, ask: Callable[[], Awaitable[Verdict]]) -> Verdict:
        outage_s = self.timeout_s or math.inf
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, limit_s=outage_s)
        cause = "it did not answer, or demanded longer waits"
        while True:
            waited_s = await self._turn()
            if not self._outage.is_on:
                backoff.extend(waited_s)  # the rate makes this call wait, not the model
            try:
                async with asyncio.timeout(backoff.left_s):
                    with self._outage.waiting(outage_s), stray_cancellation_fails(f"a call of judge {self.name!r}"):
                        verdict = await ask()
            except RequestError as error:
                raise RewardError(f"judge {self.name!r} refuses a question: {error}") from error
            except (GenerationError, TimeoutError) as error:
                cause = str(error) or cause  # a TimeoutError has no text
                if backoff.is_over:
                    raise RewardError(f"judge {self.name!r} has failed for {outage_s:g} s: {cause}") from error
                self._outage.failed(cause, outage_s)
            except RewardError:
                raise
            except Exception as error:
                raise RewardError(f"judge {self.name!r} failed: {summary(error)}", where(error)) from error
            else:
                self._outage.answered()
                return verdict
            await backoff.pause()

    async def _turn(self) -> float:
        """Wait for the next call that the rate allows. Returns the seconds waited."""
        if not self._spacing_s:
            return 0.0
        now = asyncio.get_running_loop().time()
        at = max(now, self._next_at)
        self._next_at = at + self._spacing_s
        await asyncio.sleep(at - now)
        return at - now
