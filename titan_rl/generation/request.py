"""A generation request, and the continuation of its answer from the tokens so far."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from titan_rl.core.arrays import (
    LARGEST_TOKEN_ID,
    LOGPROBS,
    TOKENS,
    ExpertRows,
    NumberArray,
    joined_rows,
    logprob_array,
    token_array,
)
from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.core.pickling import quick_pickle
from titan_rl.core.plain_data import safe_repr
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, TokenChunk, VersionSpan


@quick_pickle
@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. It is made from the keyword arguments of a `GenerateFn` and passed to the engine as one
    object.

    `sampling.max_tokens` counts new tokens only. The prompt is copied into an immutable array. `adapter` names one of
    several adapters that the engine holds.

    Raises:
        RequestError: the prompt contains anything but token ids, which are integers from 0 to 2**31 - 1; or an ID is
            not text that UTF-8 can encode; or the sampling is not a `SamplingParams`.
    """

    request_id: str
    prompt_token_ids: Sequence[int]  # [num_prompt_tokens]
    sampling: SamplingParams
    session_id: str | None = None  # stable over the turns of one rollout
    adapter: str = ""
    version: int | None = None  # version to sample from, in an engine that pins versions; by default the newest

    def __post_init__(self) -> None:
        try:
            prompt = token_array(self.prompt_token_ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                f"the prompt of request {self.request_id!r} contains something other than token ids, which are "
                f"integers from 0 to {LARGEST_TOKEN_ID}: {_not_a_token(self.prompt_token_ids)}"
            ) from error
        if prompt and (least := prompt.least()) < 0:
            raise RequestError(f"the prompt of request {self.request_id!r} has token {least}; none is negative")
        object.__setattr__(self, "prompt_token_ids", prompt)
        sampling: object = self.sampling
        if not isinstance(sampling, SamplingParams):
            shown = safe_repr(sampling)[:100]
            raise RequestError(f"sampling of request {self.request_id!r} is {shown}; it must be a SamplingParams")
        for name, text in (("request_id", self.request_id), ("session_id", self.session_id)):
            if not _is_text(text) and (text is not None or name == "request_id"):
                raise RequestError(f"{name} is {safe_repr(text)[:100]}; it must be text that UTF-8 can encode")

    @property
    def cost(self) -> int:
        """Maximum number of tokens of prompt and completion, which a router reserves."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def after(self, token_ids: Sequence[int]) -> EngineRequest:
        """The rest of the request: these tokens are appended to the prompt and deducted from the budget."""
        if not token_ids:
            return self
        prompt = token_array(self.prompt_token_ids) + token_ids
        return replace(self, prompt_token_ids=prompt, sampling=self.sampling.after(len(token_ids)))

    def sent_to(self, generate: GenerateFn) -> Coroutine[Any, Any, Completion]:
        """Call a `GenerateFn` with this request. The function gets its own copy of the prompt, as a list."""
        return generate(
            list(self.prompt_token_ids), request_id=self.request_id, session_id=self.session_id, sampling=self.sampling
        )


def _is_text(text: Any) -> bool:
    """Whether an ID is text that UTF-8 can encode: strategies hash IDs, and they are sent over the network. A text with
    half a surrogate pair is not."""
    if not isinstance(text, str):
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _not_a_token(prompt: Any) -> str:
    """Description of the first element of a prompt that is not a token id."""
    try:
        tokens = list(prompt)
    except Exception:
        return f"it is {safe_repr(prompt)[:100]}"
    for position, token in enumerate(tokens):
        try:
            if 0 <= index(token) <= LARGEST_TOKEN_ID:
                continue
        except Exception:  # `index` runs code of the object
            pass
        return f"token {position} is {safe_repr(token)[:100]}"
    return f"it is a {type(prompt).__name__}"


OnChunk = Callable[[TokenChunk], None]
"""Called with each chunk of a request, in order."""


class Partial:
    """A request and its tokens so far, over all attempts at it. It continues every interrupted answer.

    Each attempt asks for `rest`: the prompt with the tokens so far, and the budget that remains. `on_chunk` receives
    each token once and in order, even if attempts stream nothing or repeat tokens.

    Example: 40 of 64 tokens were streamed when the replica died. The rest is a request for 24 tokens that follow the
    prompt and the 40 tokens:

        partial = Partial(request)
        with suppress(GenerationError), partial.attempt() as keep:
            partial.add(await replica.stream(partial.rest, keep))  # raises
        with partial.attempt() as keep:
            completion = partial.add(await another.stream(partial.rest, keep))
    """

    def __init__(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> None:
        self.request = request
        self._on_chunk = on_chunk
        self._kept: Completion | None = None  # tokens of finished attempts
        self._present = _Tokens()  # tokens streamed by the present attempt

    @property
    def rest(self) -> EngineRequest:
        """The request of the next attempt."""
        return self.request if self._kept is None else self.request.after(self._kept.token_ids)

    @contextmanager
    def attempt(self) -> Generator[OnChunk]:
        """Context of one attempt. Yields the receiver of its chunks, which drops chunks that arrive after the block or
        `add`. The chunks of an attempt that ends without an answer are kept."""
        tokens = self._present = _Tokens()

        def keep(chunk: TokenChunk) -> None:
            if chunk.token_ids and self._present is tokens:
                tokens.add(chunk)
                if self._on_chunk is not None:
                    self._on_chunk(chunk)

        try:
            yield keep
        finally:
            if self._present.token_ids:
                self._keep(self._present.completion(self.request.request_id))
            self._present = _Tokens()

    def add(self, answer: Completion) -> Completion:
        """Add the answer of the present attempt, and pass `on_chunk` the tokens that had not been streamed.

        Returns:
            The whole completion so far.

        Raises:
            GenerationError: the attempt had streamed other tokens.
        """
        streamed, num_tokens = self._present.token_ids, len(answer.token_ids)
        if streamed and token_array(answer.token_ids[: len(streamed)]).array() != streamed:
            raise GenerationError(
                f"request {self.request.request_id!r} has an answer that differs from the tokens streamed before"
            )
        self._present = _Tokens()
        if self._on_chunk is not None and len(streamed) < num_tokens:
            self._on_chunk(tokens_between(answer, len(streamed), num_tokens))
        return self._keep(answer)

    def _keep(self, part: Completion) -> Completion:
        completion = part if self._kept is None else _continued(self._kept, part)
        if completion.request_id != self.request.request_id:
            completion = replace(completion, request_id=self.request.request_id)
        self._kept = completion
        return completion

    @property
    def ended(self) -> Completion | None:
        """The completion of the finished attempts if it is complete, otherwise None. It is complete if it had ended
        before an abort reached it, ends in a stop token, or has used up its budget."""
        kept, sampling = self._kept, self.request.sampling
        if kept is None:
            return None
        reason, num_tokens = kept.ended, len(kept.token_ids)
        if reason is None and num_tokens >= max(1, sampling.min_tokens):
            reason = FinishReason.STOP if kept.token_ids[-1] in sampling.stop_token_ids else None
        if reason is None and num_tokens >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        return None if reason is None else replace(kept, finish_reason=reason, ended=None)

    @property
    def so_far(self) -> Completion:
        """All tokens so far, including those streamed by the present attempt, as an aborted completion."""
        present = self._present.completion(self.request.request_id)
        if self._kept is None:
            return present
        if not present.token_ids:
            return self._kept
        return replace(_joined(self.request.request_id, [self._kept, present]), metrics=self._kept.metrics)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in `so_far`, without building it."""
        return len(self._present.token_ids) + (0 if self._kept is None else len(self._kept.token_ids))


def aborted_late(completion: Completion) -> Completion:
    """Mark the completion of an aborted request as ABORT. `ended` keeps the original finish reason, so that an already
    complete answer is not continued."""
    if completion.finish_reason is FinishReason.ABORT:
        return completion
    return replace(completion, finish_reason=FinishReason.ABORT, ended=completion.finish_reason)


def tokens_between(tokens: Completion | TokenChunk, start: int, stop: int) -> TokenChunk:
    """The tokens [start, stop).

    Example: if five tokens have the spans (6, 3), (7, 2), then the tokens [2, 4) have the spans (6, 1), (7, 1).
    """
    if isinstance(tokens, TokenChunk) and not start and stop == len(tokens.token_ids):
        return tokens
    spans: list[VersionSpan] = []
    position = 0
    for span in tokens.version_spans:
        num_tokens = min(stop, position + span.num_tokens) - max(start, position)
        if num_tokens > 0:
            spans.append(VersionSpan(span.version, num_tokens))
        position += span.num_tokens
    experts, top, allowed = tokens.routed_experts, tokens.top_logprobs, tokens.allowed_logprobs
    return TokenChunk(
        tokens.request_id,
        tokens.token_ids[start:stop],
        tokens.logprobs[start:stop],
        tuple(spans),
        None if experts is None else experts[start:stop],
        None if top is None else top[start:stop],
        None if allowed is None else allowed[start:stop],
    )


class _Tokens:
    """Accumulator of consecutive parts. The cost of adding a part depends only on the length of that part."""

    def __init__(self) -> None:
        self.token_ids = array(TOKENS)
        self._logprobs = array(LOGPROBS)
        self._spans: list[list[int]] = []  # version and number of tokens
        self._experts: list[Any] = []
        self._top_logprobs: list[Any] = []
        self._allowed_logprobs: array[float] | None = None

    def add(self, part: Completion | TokenChunk) -> None:
        self.token_ids.extend(token_array(part.token_ids).array())
        self._logprobs.extend(logprob_array(part.logprobs).array())
        for span in part.version_spans:
            if self._spans and self._spans[-1][0] == span.version:
                self._spans[-1][1] += span.num_tokens
            else:
                self._spans.append([span.version, span.num_tokens])
        if part.routed_experts is not None:
            self._experts.append(part.routed_experts)
        if part.top_logprobs is not None:
            self._top_logprobs.append(part.top_logprobs)
        if part.allowed_logprobs is not None:
            self._allowed_logprobs = self._allowed_logprobs or array(LOGPROBS)
            self._allowed_logprobs.extend(logprob_array(part.allowed_logprobs).array())

    def completion(self, request_id: str) -> Completion:
        """The tokens as an aborted completion."""
        return Completion(
            request_id,
            NumberArray(self.token_ids[:]),
            NumberArray(self._logprobs[:]),
            FinishReason.ABORT,
            tuple(VersionSpan(version, num_tokens) for version, num_tokens in self._spans),
            _rows(self._experts),
            top_logprobs=_rows(self._top_logprobs),
            allowed_logprobs=None if self._allowed_logprobs is None else NumberArray(self._allowed_logprobs[:]),
        )


def _joined(request_id: str, parts: Sequence[Completion | TokenChunk]) -> Completion:
    """The tokens of consecutive parts, as an aborted completion."""
    tokens = _Tokens()
    for part in parts:
        tokens.add(part)
    return tokens.completion(request_id)


def _rows(of_parts: Sequence[Any]) -> Any:
    """Concatenated rows, one per token, of the parts that have rows; None if there are none."""
    if of_parts and all(isinstance(rows, ExpertRows) for rows in of_parts):
        return joined_rows(of_parts)
    return [row for rows in of_parts for row in rows] if of_parts else None


def _continued(first: Completion, second: Completion) -> Completion:
    """The completion `first` followed by `second`, which has the finish reason."""
    return replace(
        _joined(first.request_id, [first, second]),
        finish_reason=second.finish_reason,
        metrics=_continued_metrics(first, second),
        ended=second.ended,
        prompt_scores=first.prompt_scores,  # the second part has a longer prompt
    )


def _continued_metrics(first: Completion, second: Completion) -> dict[str, float]:
    """Metrics of a continued completion. Queued and interrupted times add up, `inter_token_s` is the mean over both,
    `num_resumes` counts the continuations, and any other metric is that of the first part that has it."""
    before, after = first.metrics, second.metrics
    merged = {**after, **before}
    for name in ("queue_s", "interrupted_s"):
        if name in before or name in after:
            merged[name] = before.get(name, 0.0) + after.get(name, 0.0)
    weights = [
        (part.metrics["inter_token_s"], len(part.token_ids))
        for part in (first, second)
        if part.token_ids and "inter_token_s" in part.metrics
    ]
    if weights:
        merged["inter_token_s"] = sum(mean * count for mean, count in weights) / sum(count for _, count in weights)
    merged["num_resumes"] = before.get("num_resumes", 0.0) + after.get("num_resumes", 0.0) + 1
    return merged
