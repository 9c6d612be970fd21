"""`Judge`: a reward computed by a model, which grades each answer separately or compares the answers of a group.

rubric = Rubric([
    Reward(is_right, weight=0.7),
    Judge(Endpoint(url="http://127.0.0.1:8000/v1", model="judge"), ask_for_style, grade, weight=0.3),
])
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from titan_rl.core.calls.cancellation import gather_or_cancel
from titan_rl.core.calls.function_identity import function_identity, function_name
from titan_rl.core.errors import RewardError
from titan_rl.core.plain_data import plain_json, safe_repr
from titan_rl.rollout.chat_env import ChatFn, ChatReply
from titan_rl.rollout.rewards.reward import FailurePolicy
from titan_rl.rollout.types import Message, Rollout
from titan_rl.tasks.judge_calls import ModelReward, Verdict
from titan_rl.tasks.players import Endpoint
from titan_rl.types import FinishReason, SamplingParams, float_or_none, sequence_or_none

if TYPE_CHECKING:
    from titan_rl.serving.client import HttpChatFn

Prompt = str | Sequence[Message]
PromptFn = Callable[[Any], Prompt]
"""Function from a rollout, or from the rollouts of a group, to the question."""
ParseFn = Callable[[str], float | Sequence[float]]
"""Function from a judge's text to the value of a rollout, or to the values of a group."""

logger = logging.getLogger(__name__)

MAX_TOKENS = 512
"""Default limit of the tokens of a judge's answer; `Endpoint.max_tokens` overrides it."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """Question to a judge, in messages."""

    generate: ChatFn
    model: str  # for messages
    identity: Any
    messages: Sequence[Message]
    sampling: SamplingParams
    request_id: str

    @property
    def content(self) -> Mapping[str, Any]:
        sampling = {"max_tokens": self.sampling.max_tokens, "temperature": self.sampling.temperature}
        return {"model": self.identity, "messages": [plain_json(message) for message in self.messages], **sampling}

    async def ask(self) -> Verdict:
        reply: Any = await self.generate(self.messages, request_id=self.request_id, sampling=self.sampling)
        if not isinstance(reply, ChatReply):
            raise TypeError(f"{self.model} returned {safe_repr(reply)}; it must return a ChatReply")
        if not isinstance(reply.message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{self.model} returned a ChatReply with the message {reply.message!r}")
        if reply.finish_reason is FinishReason.LENGTH:
            _warn_cut_off(self.model, self.sampling.max_tokens)
        text = str(reply.message.get("content") or "")
        return Verdict(text, reply.num_prompt_tokens or 0, reply.num_tokens or 0)


class Judge(ModelReward):
    """Reward computed by a model.

    Absolute grades, possibly against a reference in the prompt:

        def ask(rollout):
            return f"Grade the answer from 0 to 10. Question: {rollout.sample} Answer: {answer_of(rollout)}"

        Judge(endpoint, ask, lambda text: float(text) / 10)

    Grades relative to the group, with `relative=True`: the prompt shows all answers, and the parsed text has a number
    for each answer, in the order shown. The judge sees each group in a random order and in the reverse order, and the
    numbers are averaged, which cancels a preference for positions. The preference is also measured.

    Metrics of each rollout: NAME_seconds, NAME_tokens, NAME_cost (with a price), NAME_cached (1 if the answer was
    known). Relative judges also have NAME_position_bias, the mean number of an answer in the first half of the order
    minus the mean number of the same answer in the second half.

    Args:
        model: Endpoint of OpenAI's chat protocol, or a `ChatFn`, an async function of messages. In the cache a function
            is identified by its attribute `name` if it has one, otherwise by its code and the values it is bound to.
        prompt: Function from a rollout, or from the rollouts of a group, to the question: a text, or messages.
        parse: Function from the judge's answer to a value, or to a value for each rollout. It raises an exception
            if the answer has no value.
        relative: Whether the judge compares the rollouts of a group.
        weight, name: See `Reward`.
        cache: Folder with the answers, keyed by the content of the question, so that a resumed run repeats no question.
            None keeps the newest answers in memory.
        in_flight: Maximum number of questions in flight.
        per_minute: Maximum number of questions per minute.
        price: Cost of a million tokens of prompt and of completion, for the metric.
        outage_s: Longest outage of the model that is tolerated. Groups wait in their slots until it ends.
        on_failure: Policy for answers that cannot be parsed and for longer outages; see `FailurePolicy`.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        model: Endpoint | ChatFn,
        prompt: PromptFn,
        parse: ParseFn,
        *,
        relative: bool = False,
        weight: float = 1.0,
        name: str = "judge",
        cache: str | Path | None = None,
        in_flight: int = 32,
        per_minute: float | None = None,
        price: tuple[float, float] | None = None,
        outage_s: float = 900.0,
        on_failure: FailurePolicy | None = None,
    ) -> None:
        super().__init__(
            prompt,
            weight,
            name,
            cache=cache,
            in_flight=in_flight,
            per_minute=per_minute,
            outage_s=outage_s,
            on_failure=on_failure or FailurePolicy(retries=1),
        )
        if not callable(parse):
            raise ValueError(f"parse of judge {name!r} is {parse!r}; it must be a function of the judge's text")
        self.per_rollout = not relative
        if not (isinstance(model, Endpoint) or callable(model)):
            raise ValueError(f"model of judge {name!r} is {model!r}; it must be an Endpoint or an async function")
        _check_price(price, name)
        self._model = model
        self._label = f"{model.model} at {model.url}" if isinstance(model, Endpoint) else function_name(model)
        self._identity = self._label if isinstance(model, Endpoint) else function_identity(model)
        self._prompt = prompt
        self._parse: Callable[[str], Any] = parse
        self._price = price
        self._client: HttpChatFn | None = None

    async def values(self, rollouts: Sequence[Rollout], timeout_s: float | None = None) -> Sequence[float]:
        """See `WeightedReward.values`. The judge's own `outage_s` is the limit."""
        if self.per_rollout:
            return await gather_or_cancel([self._absolute(rollout) for rollout in rollouts])
        return await self._relative(rollouts)

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _absolute(self, rollout: Rollout) -> float:
        verdict = await self._ask_about(rollout, rollout.rollout_id, self._number)
        self._note_verdicts(rollout.rollout_id, [verdict], 1)
        return self._number(verdict.value)

    async def _relative(self, rollouts: Sequence[Rollout]) -> Sequence[float]:
        order = list(range(len(rollouts)))
        random.Random(rollouts[0].group_id).shuffle(order)
        orders = [order, order[::-1]] if len(order) > 1 else [order]

        def numbers(text: str) -> list[float]:
            return _numbers(self._parse(text), len(rollouts))

        verdicts = await gather_or_cancel(
            [
                self._ask_about([rollouts[i] for i in shown], f"{rollouts[0].group_id}/{number}", numbers)
                for number, shown in enumerate(orders)
            ]
        )
        given: list[list[float]] = [[] for _ in rollouts]
        early, late = list[float](), list[float]()
        for shown, verdict in zip(orders, verdicts, strict=True):
            for index, (i, value) in enumerate(zip(shown, numbers(verdict.value), strict=True)):
                given[i].append(value)
                if 2 * index + 1 != len(shown):
                    (early if 2 * index + 1 < len(shown) else late).append(value)
        bias = fmean(early) - fmean(late) if early else 0.0
        for rollout in rollouts:
            self._note_verdicts(rollout.rollout_id, verdicts, len(rollouts), position_bias=bias)
        return [fmean(values) for values in given]

    async def _ask_about(self, about: Any, request_id: str, check: Callable[[str], object]) -> Verdict:
        try:
            prompt = self._prompt(about)
        except Exception as error:
            raise RewardError(
                f"the prompt of judge {self.name!r} failed on {request_id!r}: {type(error).__name__}: {error}"
            ) from error
        if (messages := _messages(prompt)) is None:
            raise RewardError(
                f"the prompt of judge {self.name!r} for {request_id!r} is {prompt!r}; it must be a text or a list of "
                "messages"
            )
        generate, sampling = self._judge()
        request_id = f"{self.name}/{request_id}"
        return await self._ask(_Chat(generate, self._label, self._identity, messages, sampling, request_id), check)

    def _judge(self) -> tuple[ChatFn, SamplingParams]:
        if not isinstance(self._model, Endpoint):
            return self._model, SamplingParams(MAX_TOKENS, temperature=0.0)
        from titan_rl.serving.client import HttpChatFn

        given = self._model
        self._client = self._client or HttpChatFn(
            given.url, model=given.model, api_key=os.environ.get(given.api_key), timeout_s=given.timeout_s
        )
        temperature = 0.0 if given.temperature is None else given.temperature
        return self._client, SamplingParams(given.max_tokens or MAX_TOKENS, temperature)

    def _number(self, text: str) -> float:
        return _numbers([self._parse(text)], 1)[0]

    def _note_verdicts(self, rollout_id: str, verdicts: Sequence[Verdict], num_rollouts: int, **more: float) -> None:
        """Record a rollout's share of the cost of the verdicts, which are about `num_rollouts` rollouts."""
        fresh = [verdict for verdict in verdicts if not verdict.is_cached]
        prompt = sum(verdict.prompt_tokens for verdict in fresh) / num_rollouts
        completion = sum(verdict.completion_tokens for verdict in fresh) / num_rollouts
        noted = {
            "seconds": max((verdict.seconds for verdict in fresh), default=0.0),
            "tokens": prompt + completion,
            "cached": 1 - len(fresh) / len(verdicts),
            **more,
        }
        if self._price is not None:
            noted["cost"] = (prompt * self._price[0] + completion * self._price[1]) / 1e6
        self._note(rollout_id, noted)


def _check_price(price: Any, name: str) -> None:
    """Check the price of a judge.

    Raises:
        ValueError: the price is neither None nor a pair of costs.
    """
    costs = [float_or_none(cost) for cost in cast("Sequence[Any]", price)] if isinstance(price, tuple | list) else []
    is_pair = len(costs) == 2 and all(cost is not None and 0 <= cost < math.inf for cost in costs)
    if price is not None and not is_pair:
        raise ValueError(
            f"price of judge {name!r} is {price!r}; it must be (cost per million prompt tokens, cost per million "
            "completion tokens)"
        )


def _messages(prompt: Any) -> Sequence[Message] | None:
    """Messages of a prompt; None if it is neither a text nor messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages: list[Any] = list(cast("Sequence[Any]", prompt)) if isinstance(prompt, Sequence) else [None]
    return messages if all(isinstance(message, Mapping) for message in messages) else None


@cache
def _warn_cut_off(model: str, max_tokens: int) -> None:
    """Warn of an answer that was cut off, once for each model."""
    logger.warning(
        "an answer of judge %s was cut off after max_tokens = %d, and is parsed as it is; raise max_tokens of the "
        "Endpoint, unless the grade comes first",
        model,
        max_tokens,
    )


def _numbers(given: Any, count: int) -> list[float]:
    """Convert the result of `parse` to `count` finite numbers.

    Raises:
        ValueError: the result is not `count` finite numbers.
    """
    values = map(float_or_none, sequence_or_none(given, count) or ())
    numbers = [value for value in values if value is not None and abs(value) < float("inf")]
    if len(numbers) != count:
        raise ValueError(f"parse returned {given!r}; it must return {count} finite numbers in order")
    return numbers
