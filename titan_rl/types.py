"""Types of the seam between rollouts and generation: tokens in, tokens out. Standard library only.

Every plane of titan_rl shares these types, so importing them must never need torch, vLLM or Monarch.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import index
from typing import Any, Protocol, SupportsFloat, cast, runtime_checkable

from titan_rl.core.arrays import NumberArray, version_array
from titan_rl.core.pickling import quick_pickle


def require_member(owner: object, field_name: str, kind: type[StrEnum]) -> None:
    """Check that a dataclass field is a member of an enum. A plain string would be equal to the member, but not
    identical.

    Raises:
        ValueError: the field's value is not a member of `kind`.
    """
    value = getattr(owner, field_name)
    if not isinstance(value, kind):
        name = value.upper() if isinstance(value, str) and value in set(kind) else next(iter(kind)).name
        raise ValueError(
            f"{type(owner).__name__}.{field_name} is {value!r}; it must be a {kind.__name__}, "
            f"such as {kind.__name__}.{name}"
        )


def keep_integer(owner: object, field_name: str, least: float, most: float, allowed: str) -> None:
    """Check an integer field of a frozen dataclass, and convert it to an `int`: NumPy's integers cannot be encoded.

    Raises:
        ValueError: the field's value is not an integer, or not between `least` and `most`. The message says that it
            must be `allowed`.
    """
    given = getattr(owner, field_name)
    value = given if type(given) is int else _integer_or_none(given)
    if value is None or not least <= value <= most:
        raise ValueError(f"{type(owner).__name__}.{field_name} is {given!r}; it must be {allowed}")
    if value is not given:
        object.__setattr__(owner, field_name, value)


def keep_float(owner: object, field_name: str, least: float, most: float, allowed: str) -> None:
    """Check a number field of a frozen dataclass, and convert it to a `float`.

    Raises:
        ValueError: the field's value is not a number, or not between `least` and `most`. The message says that it must
            be `allowed`.
    """
    given = getattr(owner, field_name)
    value = given if type(given) is float else float_or_none(given)
    if value is None or not least <= value <= most:
        raise ValueError(f"{type(owner).__name__}.{field_name} is {given!r}; it must be {allowed}")
    if value is not given:
        object.__setattr__(owner, field_name, value)


def float_or_none(value: Any) -> float | None:
    """`value` as a `float`; None if it is not a number. Text is not a number, even if `float` could parse it."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def sequence_or_none(values: Any, count: int) -> list[Any] | None:
    """Values of a sequence of `count` values; None if it is anything else. Text, sets and mappings are no sequences,
    because their entries are not in the order of what they are about."""
    if isinstance(values, str | bytes | bytearray | Set | Mapping) or not isinstance(values, Iterable):
        return None
    given = list(cast("Iterable[Any]", values))
    return given if len(given) == count else None


def _integer_or_none(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else int(index(value))
    except TypeError:
        return None


_MAX_INT = 2**63 - 1  # largest integer that journals and engines can store
_MAX_FLOAT = sys.float_info.max
_LEAST_FLOAT = math.ulp(0.0)
MOST_TOP_LOGPROBS = 20
"""Largest number of alternatives per token. It is the limit of OpenAI's API and of vLLM."""


class FinishReason(StrEnum):
    """Reason why a completion ended."""

    STOP = "stop"  # a stop token; it is the completion's last token
    LENGTH = "length"  # the token budget or the context is used up
    TOOL_CALLS = "tool_calls"  # only in a reply that a server parsed: it stopped, and calls tools
    ABORT = "abort"  # interrupted; the tokens so far are valid


@quick_pickle
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one completion. Never mutated: `dataclasses.replace` makes a changed copy.

    Args:
        max_tokens: Largest number of tokens to generate, at least 1.
        temperature: Sampling temperature; 0 is greedy. Behaviour logprobs are those of the distribution at this
            temperature.
        top_p: Nucleus mass in (0, 1].
        top_k: Number of likeliest tokens to sample from; -1 keeps every token.
        min_p: Least probability relative to the most likely token, in [0, 1].
        min_tokens: Number of tokens before which no stop token is sampled.
        seed: Seed that makes the draw reproducible for the same prompt and weights.
        stop_token_ids: Tokens that end the completion. The stop token is part of the completion.
        return_routed_experts: Whether a mixture-of-experts model returns the experts of each token.
        top_logprobs: Number of likeliest tokens to return at each position, at most 20. The sampled tokens stay the
            same.
        prompt_logprobs: Number of likeliest tokens to return at each position of the prompt, at most 20, in addition
            to the logprobs of the prompt's own tokens. None returns no scores of the prompt. Teachers use it.
        presence_penalty: Subtracted from the logits of tokens that the completion already has, in [-2, 2].
        frequency_penalty: Subtracted from a token's logit for each occurrence in the completion, in [-2, 2].
        repetition_penalty: Divides the positive logits and multiplies the negative logits of tokens that the prompt or
            the completion already has. 1 changes nothing.
        logit_bias: (token, value) pairs, or a mapping. Each value, in [-100, 100], is added to its token's logit.
        constraint: Set of texts that may be sampled, as the JSON of an xgrammar structural tag, which vLLM also reads:
            `{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {...}}}`. Tokens that cannot
            lead to an allowed text are not sampled, so the completion is an allowed text unless its budget cuts it off.
        num_continued: Number of tokens at the end of the prompt that belong to the completion: an earlier attempt
            generated them before it was interrupted. A constraint continues after them. Only `after` sets it.

    Raises:
        ValueError: a value is not allowed. The message names the field, the value and what is allowed.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    return_routed_experts: bool = False
    top_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: str | None = None
    num_continued: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        keep_integer(self, "max_tokens", 1, _MAX_INT, "an integer of at least 1")
        keep_float(self, "temperature", 0.0, _MAX_FLOAT, "finite and >= 0")
        keep_float(self, "top_p", _LEAST_FLOAT, 1.0, "in (0, 1]")
        keep_integer(self, "top_k", -1, _MAX_INT, "an integer, -1 (off) or at least 1")
        if self.top_k == 0:
            raise ValueError("SamplingParams.top_k is 0; it must be an integer, -1 (off) or at least 1")
        keep_float(self, "min_p", 0.0, 1.0, "in [0, 1]")
        keep_integer(self, "top_logprobs", 0, MOST_TOP_LOGPROBS, f"from 0 to {MOST_TOP_LOGPROBS}")
        if self.prompt_logprobs is not None:
            keep_integer(
                self, "prompt_logprobs", 0, MOST_TOP_LOGPROBS, f"None or an integer from 0 to {MOST_TOP_LOGPROBS}"
            )
        keep_integer(self, "min_tokens", 0, self.max_tokens, "an integer between 0 and max_tokens")
        if self.seed is not None:
            keep_integer(self, "seed", -math.inf, math.inf, "None or an integer")
        object.__setattr__(self, "stop_token_ids", self._checked_stop_token_ids())
        if type(self.return_routed_experts) is not bool:
            if self.return_routed_experts not in (True, False):
                raise ValueError(
                    f"SamplingParams.return_routed_experts is {self.return_routed_experts!r}; it must be True or False"
                )
            object.__setattr__(self, "return_routed_experts", bool(self.return_routed_experts))
        keep_float(self, "presence_penalty", -2.0, 2.0, "in [-2, 2]")
        keep_float(self, "frequency_penalty", -2.0, 2.0, "in [-2, 2]")
        keep_float(self, "repetition_penalty", _LEAST_FLOAT, _MAX_FLOAT, "finite and above 0")
        object.__setattr__(self, "logit_bias", self._checked_logit_bias())
        keep_integer(self, "num_continued", 0, _MAX_INT, "an integer of at least 0")
        if self.constraint is not None:
            self._check_constraint_combination()

    def _checked_logit_bias(self) -> tuple[tuple[int, float], ...]:
        given: Any = self.logit_bias
        try:
            pairs = [(_integer_or_none(token), float_or_none(value)) for token, value in dict(given).items()]
        except (TypeError, ValueError):
            pairs = [(None, None)]
        checked = [(token, value) for token, value in pairs if token is not None and value is not None]
        if len(checked) < len(pairs) or not all(token >= 0 and -100 <= value <= 100 for token, value in checked):
            raise ValueError(f"SamplingParams.logit_bias is {given!r}; it must be token ids with values in [-100, 100]")
        return tuple(sorted(checked))

    def _check_constraint_combination(self) -> None:
        if not isinstance(self.constraint, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"SamplingParams.constraint is {self.constraint!r}; it must be JSON as a string, or None")
        if self.min_tokens:
            raise ValueError(
                f"SamplingParams.min_tokens is {self.min_tokens}; it must be 0 with a constraint, "
                "which determines when a completion may end"
            )
        if not self.stop_token_ids:
            raise ValueError(
                "SamplingParams.stop_token_ids is (); with a constraint at least one is needed, to end the completion"
            )

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        given: Any = self.stop_token_ids
        tokens: tuple[int | None, ...] = (None,)
        if isinstance(given, Iterable):
            tokens = tuple(_integer_or_none(token) for token in cast("Iterable[Any]", given))
        if None in tokens:
            raise ValueError(f"SamplingParams.stop_token_ids is {given!r}; it must be a sequence of token ids")
        return cast("tuple[int, ...]", tokens)

    @property
    def shaping(self) -> dict[str, Any]:
        """The parameters that make the sampling distribution differ from the policy's at this temperature, with their
        values. They include a constraint.

        Example: `SamplingParams(64, temperature=0.7, top_p=0.9).shaping` is `{"top_p": 0.9}`.
        """
        unshaped = ((each.name, each.default) for each in fields(self) if each.name in _SHAPING)
        return {name: value for name, default in unshaped if (value := getattr(self, name)) != default}

    def within(self, room: int) -> SamplingParams:
        """Return the same parameters with a budget of at most `room` tokens; `room` is at least 1.

        Example: `SamplingParams(max_tokens=64, min_tokens=8)` within 6 is `SamplingParams(max_tokens=6, min_tokens=6)`.
        """
        if self.max_tokens <= room:
            return self
        return replace(self, max_tokens=room, min_tokens=min(self.min_tokens, room))

    def after(self, num_tokens: int) -> SamplingParams:
        """Return the parameters for the rest of a completion that already has `num_tokens` tokens.

        A seed becomes another one, since repeating it would repeat its draws.

        Example: `SamplingParams(max_tokens=8, min_tokens=4)` after 6 tokens is `SamplingParams(max_tokens=2)`.
        """
        seed = self.seed
        return replace(
            self,
            max_tokens=self.max_tokens - num_tokens,
            min_tokens=max(0, self.min_tokens - num_tokens),
            seed=None if seed is None else zlib.crc32(f"{seed}/{num_tokens}".encode()),
            num_continued=self.num_continued + num_tokens if self._looks_back else 0,
        )

    @property
    def _looks_back(self) -> bool:
        """Whether the next sample depends on the position in the context at which the completion began."""
        return self.constraint is not None or bool(self.presence_penalty or self.frequency_penalty)


EXTRA_SAMPLING = frozenset(("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "constraint"))
"""Fields of `SamplingParams` that an engine honours only if it says so; see `titan_rl.generation.engine.Engine`."""

_SHAPING = EXTRA_SAMPLING | {"top_p", "top_k", "min_p", "min_tokens"}


TopLogprobs = Sequence[Sequence[tuple[int, float]]]
"""The likeliest tokens at each position of a completion, the likeliest first, as (token id, logprob). The logprobs are
those of the distribution that the token was sampled from; tokens that cannot be sampled from it are omitted.
# [num_tokens, at most top_logprobs]"""


@quick_pickle
@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`num_tokens` consecutive tokens that policy version `version` produced. Integers of other types, such as NumPy's,
    are converted to `int`.

    Raises:
        ValueError: a field is not an integer, or negative.
    """

    version: int
    num_tokens: int

    def __post_init__(self) -> None:
        keep_integer(self, "version", 0, _MAX_INT, "an integer of at least 0")
        keep_integer(self, "num_tokens", 0, _MAX_INT, "an integer of at least 0")


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of a prompt's tokens after the first, at temperature 1, and of the likeliest tokens at their positions.

    Example: the prompt [7, 8, 5] with `prompt_logprobs = 1`, where 5 is the likeliest token after [7, 8]:

        PromptScores([-2.0, -0.1], top_k=1, top_ids=[9, 5], top_logprobs=[-0.5, -0.1])

    Args:
        logprobs: Logprobs of the prompt's own tokens.
        top_k: Number of likeliest tokens at each position.
        top_ids: Likeliest tokens at each position, the likeliest first; the positions are concatenated.
        top_logprobs: Logprobs of `top_ids`.

    Raises:
        ValueError: a position does not have exactly `top_k` of the likeliest tokens.
    """

    logprobs: Sequence[float]  # [num_prompt_tokens - 1]
    top_k: int = 0
    top_ids: Sequence[int] = ()  # [(num_prompt_tokens - 1) * top_k]
    top_logprobs: Sequence[float] = ()  # [(num_prompt_tokens - 1) * top_k]

    def __post_init__(self) -> None:
        if not len(self.top_ids) == len(self.top_logprobs) == len(self.logprobs) * self.top_k:
            raise ValueError(
                f"PromptScores of {len(self.logprobs)} tokens and top_k = {self.top_k} has {len(self.top_ids)} top_ids "
                f"and {len(self.top_logprobs)} top_logprobs; each position needs {self.top_k}"
            )

    def between(self, start: int, stop: int) -> PromptScores:
        """Return the scores of the tokens [start, stop) of the prompt; `start` is at least 1.

        Example: for a prompt of 3 tokens, `between(2, 3)` are the scores of the last token.
        """
        first, last = start - 1, stop - 1
        at = slice(first * self.top_k, last * self.top_k)
        return PromptScores(self.logprobs[first:last], self.top_k, self.top_ids[at], self.top_logprobs[at])


def _plain(value: Any) -> Any:
    """Convert sequences and arrays to lists, whose `==` returns a single boolean."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(each) for each in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value


@quick_pickle
@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens generated for one request, each with its behaviour logprob and policy version.

    `len(token_ids) == len(logprobs) == sum(span.num_tokens for span in version_spans)`. The fields may be any
    sequences. In completions of an engine and of a `Rollout` they are packed arrays, see `titan_rl.core.arrays`.
    `logprobs` are those of the distribution that was sampled from. If a constraint excluded tokens, `allowed_logprobs`
    has at each position the log of the total probability of the allowed tokens under the policy, at the same
    temperature. The sum of both is the token's logprob under the policy without the constraint; an allowed logprob of 0
    means that no token was excluded.

    Completions with equal numbers are equal, whether these are in lists, tuples or arrays. To write JSON, convert
    sequences with `list(completion.token_ids)`, or packed and NumPy arrays with `tolist()`.

    Example: five tokens, the last two sampled after weights 7 replaced weights 6:

        Completion("g0/1/0", [5, 9, 9, 2, 1], [-0.1, -2.0, -0.3, -0.2, -0.9], FinishReason.STOP,
                   (VersionSpan(6, 3), VersionSpan(7, 2)))

    Raises:
        ValueError: the lengths disagree, a metric is not a number, or `request_id`, `finish_reason`, `version_spans`,
            `metrics` or `ended` has the wrong type.
    """

    request_id: str
    token_ids: Sequence[int]  # [num_tokens]
    logprobs: Sequence[float]  # [num_tokens]
    finish_reason: FinishReason
    version_spans: Sequence[VersionSpan]
    routed_experts: Any = None  # [num_tokens, num_layers, top_k] of the forward that produced each token, or None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    ended: FinishReason | None = None  # with ABORT: the request's own end, if it ended before the abort reached it
    top_logprobs: TopLogprobs | None = None  # [num_tokens, ...] if requested
    allowed_logprobs: Sequence[float] | None = None  # [num_tokens] under a constraint, or None
    prompt_scores: PromptScores | None = None  # if `prompt_logprobs` were requested

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"Completion.request_id is {self.request_id!r}; it must be that of its request, a string")
        if type(self.request_id) is not str:  # a string of NumPy
            object.__setattr__(self, "request_id", str.__str__(self.request_id))
        require_member(self, "finish_reason", FinishReason)
        if self.ended is not None:
            require_member(self, "ended", FinishReason)
        _keep_metrics(self)
        require_aligned(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return NotImplemented
        return all(_plain(getattr(self, each.name)) == _plain(getattr(other, each.name)) for each in fields(self))

    @property
    def versions(self) -> NumberArray[int]:
        """The policy version of each token.  # [num_tokens]"""
        return version_array((span.version, span.num_tokens) for span in self.version_spans)


def _keep_metrics(completion: Completion) -> None:
    """Check the metrics. A mapping of names to floats is kept; any other is replaced by a dictionary of floats."""
    metrics: Any = completion.metrics
    if not isinstance(metrics, Mapping):
        raise ValueError(f"Completion.metrics is {metrics!r}; it must map names to numbers")
    values = cast("Mapping[Any, Any]", metrics)
    if set(map(type, values)) <= {str} and set(map(type, values.values())) <= {float}:
        return
    floats = {str(name): float_or_none(value) for name, value in values.items()}
    for name, value in floats.items():
        if value is None:
            raise ValueError(f"Completion.metrics[{name!r}] is {values.get(name)!r}; it must be a number")
    object.__setattr__(completion, "metrics", floats)


@quick_pickle
@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The tokens that a request has gained since its last chunk, streamed before its completion. A chunk without tokens
    means that the engine is stepping.

    Raises:
        ValueError: the lengths disagree.
    """

    request_id: str
    token_ids: Sequence[int]  # [num_tokens]
    logprobs: Sequence[float]  # [num_tokens]
    version_spans: Sequence[VersionSpan]
    routed_experts: Any = None  # [num_tokens, num_layers, top_k], or None
    top_logprobs: TopLogprobs | None = None  # [num_tokens, ...], or None
    allowed_logprobs: Sequence[float] | None = None  # [num_tokens] under a constraint, or None

    def __post_init__(self) -> None:
        require_aligned(self)


def require_aligned(tokens: TokenChunk | Completion) -> None:
    """Check that every token has exactly one logprob, one version, and one row of each further field that is not None.

    Raises:
        ValueError: the lengths disagree, or `version_spans` has the wrong type.
    """
    spans = tokens.version_spans
    if not all(isinstance(span, VersionSpan) for span in spans):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{type(tokens).__name__}.version_spans is {spans!r}; it must be a sequence of VersionSpan")
    spanned = spans[0].num_tokens if len(spans) == 1 else sum(span.num_tokens for span in spans)
    if not len(tokens.token_ids) == len(tokens.logprobs) == spanned:
        raise ValueError(
            f"{type(tokens).__name__} {tokens.request_id!r} has {len(tokens.token_ids)} token_ids, "
            f"{len(tokens.logprobs)} logprobs and {spanned} tokens in version_spans; the three must be equal"
        )
    for name in ("routed_experts", "top_logprobs", "allowed_logprobs"):
        rows = getattr(tokens, name)
        if rows is not None and len(rows) != len(tokens.token_ids):
            raise ValueError(
                f"{type(tokens).__name__} {tokens.request_id!r} has {len(tokens.token_ids)} token_ids and "
                f"{len(rows)} rows in {name}; give each token a row, or set {name} to None"
            )


@runtime_checkable
class GenerateFn(Protocol):
    """The seam between rollouts and generation.

    A caller does not know the implementation: a router over a mesh of engines, an HTTP client, a closure in a test, or
    a wrapper around any of them. Calls run concurrently; each returns a completion or raises.

    Args:
        prompt_token_ids: Whole context, including the unchanged tokens of earlier turns.
        request_id: Identifier that is unique to this call.
        session_id: Identifier that is the same for all turns of a rollout, so that a router can reuse its KV cache.
        sampling: Sampling parameters.

    Raises:
        titan_rl.core.errors.RequestError: this request can never succeed (too long, bad parameters).
        titan_rl.core.errors.GenerationError: the infrastructure failed.
    """

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion: ...
