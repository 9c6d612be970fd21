"""Reward models: rewards from sequence classifiers, which vLLM serves or which run in this process."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.core.calls.cancellation import gather_or_cancel, stray_cancellation_fails
from titan_rl.core.calls.function_identity import function_identity, function_name
from titan_rl.core.calls.parsing import server_root
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import GenerationError, RequestError, RewardError
from titan_rl.core.plain_data import safe_repr
from titan_rl.rollout.rewards.reward import FailurePolicy, UserFunction, subject_of
from titan_rl.rollout.types import Rollout
from titan_rl.tasks.judge_calls import ModelReward, Verdict
from titan_rl.types import float_or_none, sequence_or_none

if TYPE_CHECKING:
    from titan_rl.serving.client import HttpEndpoint

ScoreFn = Callable[[Sequence[str]], Awaitable[Sequence[float]]]
"""Function from a batch of texts to their scores.  # [num_texts] -> [num_texts]"""


class ServedClassifier:
    """Classifier that vLLM serves (`vllm serve MODEL --runner pooling`), queried at `/classify`.

    Args:
        url: URL of the server, with or without the "/v1" at its end.
        model: Name of the model at the server.
        label: Index of the class whose probability is the score. By default the model must have a single output, as
            reward models do, which is the score.
        api_key: Environment variable with the key, if the server needs one.
        timeout_s: Time limit of one request.
        transport: httpx transport that replaces the network.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        label: int | None = None,
        api_key: str = "OPENAI_API_KEY",
        timeout_s: float = 60.0,
        transport: Any = None,
    ) -> None:
        self.name = f"{model} at {url}, {_describe_label(label)}"
        self._endpoint = f"{server_root(url)}/classify"
        self._model, self._label, self._timeout_s, self._transport = model, label, timeout_s, transport
        self._key = os.environ.get(api_key)
        self._client: HttpEndpoint | None = None

    async def __call__(self, texts: Sequence[str]) -> Sequence[float]:
        """Score texts.

        Raises:
            RequestError: the server refuses the texts, or the model's outputs do not fit `label`.
            GenerationError: the server cannot be reached, or its answer has no scores.
        """
        body = {"model": self._model, "input": list(texts), "use_activation": self._label is not None}
        response = await self._connected().post(body, {})
        try:
            data = sorted(response.json()["data"], key=lambda each: each["index"])
            scores = [float(each["probs"][_output_index(self._label, len(each["probs"]))]) for each in data]
        except RequestError:
            raise
        except (LookupError, TypeError, ValueError) as error:
            raise GenerationError(f"{self._endpoint} sent an invalid classification: {error!r}") from error
        if len(scores) != len(texts):
            raise GenerationError(f"{self._endpoint} sent {len(scores)} scores for {len(texts)} texts")
        return scores

    async def close(self) -> None:
        """Close the connections to the server."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _connected(self) -> HttpEndpoint:
        from titan_rl.serving.client import HttpEndpoint

        self._client = self._client or HttpEndpoint(
            self._endpoint,
            api_key=self._key,
            timeout_s=self._timeout_s,
            connection_attempts=2,
            max_connections=64,
            transport=self._transport,
        )
        return self._client


class LocalClassifier:
    """Classifier of a Hugging Face folder, which runs on the CPU in a thread of this process. For small models and
    tests.

    Args:
        folder: Hugging Face folder of the model.
        label: See `ServedClassifier`.
    """

    def __init__(self, folder: str | Path, *, label: int | None = None) -> None:
        self.name = f"{folder}, {_describe_label(label)}"
        self.folder, self._label = str(folder), label

    async def __call__(self, texts: Sequence[str]) -> Sequence[float]:
        return await in_thread(self._score, list(texts))

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        import transformers

        tokenizers: Any = transformers.AutoTokenizer
        models: Any = transformers.AutoModelForSequenceClassification
        tokenizer = tokenizers.from_pretrained(self.folder, local_files_only=True)
        return tokenizer, models.from_pretrained(self.folder, local_files_only=True).eval()

    def _score(self, texts: Sequence[str]) -> list[float]:
        import torch

        tokenizer, model = self._loaded
        with torch.no_grad():  # one at a time: small models gain nothing from padding, and some have no pad token
            outputs = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
        if self._label is not None:
            outputs = [logits.softmax(-1) for logits in outputs]
        return [float(values[_output_index(self._label, len(values))]) for values in outputs]


def _describe_label(label: int | None) -> str:
    return "its one output" if label is None else f"label {label}"


def _output_index(label: int | None, num_outputs: int) -> int:
    """Index of the output that is the score.

    Raises:
        RequestError: the model's outputs do not fit `label`.
    """
    if label is None and num_outputs > 1:
        raise RequestError(f"the classifier has {num_outputs} outputs; choose the one that scores with label")
    if label is not None and not 0 <= label < num_outputs:
        raise RequestError(f"the classifier has {num_outputs} outputs, numbered from 0; label is {label}")
    return label or 0


def _finite(value: object) -> float:
    """Convert a score to a float.

    Raises:
        ValueError: the score is not a finite number.
    """
    number = float_or_none(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


class Batches:
    """Joins texts that are to be scored at the same time into batches.

    Args:
        score: Scores a batch.
        size: Largest number of texts in a batch.
    """

    def __init__(self, score: ScoreFn, size: int) -> None:
        self._score = score
        self._size = size
        self._waiting: list[tuple[str, asyncio.Future[float]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, text: str) -> float:
        """Score a text as part of a batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        self._waiting.append((text, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._send)
        return await future

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), self._size):
            task = asyncio.ensure_future(self._run(waiting[start : start + self._size]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: Sequence[tuple[str, asyncio.Future[float]]]) -> None:
        try:
            with stray_cancellation_fails(function_name(self._score)):
                given: Any = await self._score([text for text, _ in batch])
            scores = sequence_or_none(given, len(batch))
            if scores is None:
                raise RewardError(
                    f"{function_name(self._score)} returned {safe_repr(given)}; it must return {len(batch)} finite "
                    "numbers in order"
                )
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_result(score)


@dataclass(frozen=True, slots=True)
class _Text:
    """Question for the score of one text."""

    batches: Batches
    model: Any  # identity of the classifier
    text: str

    @property
    def content(self) -> Mapping[str, Any]:
        return {"model": self.model, "text": self.text}

    async def ask(self) -> Verdict:
        return Verdict(await self.batches.score(self.text))


class RewardModel(ModelReward):
    """Reward that a sequence classifier gives to each rollout. Texts that are judged at the same time share a request.

    Example:

        RewardModel(ServedClassifier("http://127.0.0.1:8000", "reward-model"), lambda rollout: answer_of(rollout))

    Metrics of each rollout: NAME_seconds, and NAME_cached (1 if the score was known).

    Args:
        score: `ServedClassifier`, `LocalClassifier`, or an async function of a batch of texts.
        text: Function from a rollout to the text that the classifier reads.
        batch: Largest number of texts in one request.
        weight, name, cache, per_minute, outage_s, on_failure: See `Judge`.
    """

    per_rollout = True

    def __init__(
        self,
        score: ScoreFn,
        text: Callable[[Rollout], str],
        *,
        weight: float = 1.0,
        name: str = "reward_model",
        cache: str | Path | None = None,
        batch: int = 64,
        per_minute: float | None = None,
        outage_s: float = 900.0,
        on_failure: FailurePolicy | None = None,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch of reward model {name!r} is {batch}; it must be at least 1")
        super().__init__(
            text,
            weight,
            name,
            cache=cache,
            in_flight=16 * batch,
            per_minute=per_minute,
            outage_s=outage_s,
            on_failure=on_failure or FailurePolicy(retries=0),
        )
        self._text = text
        self._score = score
        self._model = function_identity(score)
        self._batches = Batches(score, batch)
        self.model_folder = score.folder if isinstance(score, LocalClassifier) else None

    async def values(self, rollouts: Sequence[Rollout], timeout_s: float | None = None) -> Sequence[float]:
        """See `WeightedReward.values`. The model's own `outage_s` is the limit."""
        return await gather_or_cancel([self._value(rollout) for rollout in rollouts])

    async def close(self) -> None:
        """Close the connections of the classifier."""
        if (close := getattr(self._score, "close", None)) is not None:
            await close()

    async def _value(self, rollout: Rollout) -> float:
        about = subject_of([rollout], each=True)
        text: Any = await UserFunction(self._text, self.name)(rollout, about, None)
        if not isinstance(text, str):
            raise RewardError(f"the text of reward model {self.name!r} for {about} is {text!r}; it must be a text")
        verdict = await self._ask(_Text(self._batches, self._model, text), _finite)
        self._note(rollout.rollout_id, {"seconds": verdict.seconds, "cached": float(verdict.is_cached)})
        return float(verdict.value)
