"""Deterministic engine without weights, for tests and the simulator. Standard library only."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.core.errors import RequestError
from titan_rl.generation.engine import HeldTensor, TokenDelta
from titan_rl.generation.request import EngineRequest
from titan_rl.types import FinishReason, PromptScores

_MASK = (1 << 64) - 1
_BLOCK = 16  # tokens of a block of the simulated prefix cache
_SCORE_SLOTS = 8  # sequences scored in one step


def _mix(state: int, value: int) -> int:
    """One round of splitmix64 over (state, value). https://prng.di.unimi.it/splitmix64.c"""
    z = (state ^ (value * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _logprob(state: int, token: int, version: int) -> float:
    return -4.0 * (_mix(_mix(state, token), version) >> 11) / (1 << 53)


def scripted_logprobs(token_ids: Sequence[int], version: int, seed: int = 0) -> list[float]:
    """Logprobs that a `ScriptedEngine` gives to a sequence's tokens after the first.

    The logprobs differ between versions, so that tests notice a token that is marked with the wrong version.

    Returns:
        [len(token_ids) - 1], each in (-4, 0]
    """
    state, logprobs = _mix(0, seed), list[float]()
    for index, token in enumerate(token_ids):
        if index:
            logprobs.append(_logprob(state, token, version))
        state = _mix(state, token)
    return logprobs


@dataclass(frozen=True, slots=True)
class CostModel:
    """Duration of simulated work, in seconds."""

    step: float = 0.0  # every step, however many requests run
    request: float = 0.0  # added for each running request
    prompt_token: float = 0.0  # added for each prompt token that is not in the prefix cache
    context_token: float = 0.0  # added for each token that the running requests have in the KV cache
    load: float = 0.0  # loading one state dict

    def step_seconds(self, num_running: int, num_prompt_tokens: int, num_context_tokens: int = 0) -> float:
        return (
            self.step
            + self.request * num_running
            + self.prompt_token * num_prompt_tokens
            + self.context_token * num_context_tokens
        )


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    state: int  # hash of every token so far
    context: list[int]  # prompt and completion
    generated: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class ScriptedPolicy:
    """One of several adapters of a `ScriptedEngine`, with its own version.

    Attributes:
        versions: All versions loaded so far, the current one last.
    """

    def __init__(self, version: int, seed: int) -> None:
        self.versions = [version]
        self.state_dict: dict[str, Any] = {}
        self._seed = seed

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        self.state_dict = dict(items)
        self.versions.append(version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [scripted_logprobs(sequence, self.versions[-1], self._seed) for sequence in sequences]

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Do nothing: the simulated cache depends on tokens alone."""


class ScriptedEngine:
    """Engine that generates tokens as a pure function of the context so far and `seed`.

    An interrupted completion that is continued from its tokens is therefore equal to an uninterrupted one. The sampling
    seed of a request has no effect.

    Args:
        vocab_size: Number of tokens in the vocabulary.
        seed: Seed of the tokens and logprobs.
        version: Version that is loaded at first.
        script: Returns the next token for a context (prompt and completion so far). By default a hash of the context.
        mean_tokens: Expected length of a completion with stop tokens; None samples no stop tokens except by `script`.
        tokens_depend_on_version: Whether tokens also depend on the loaded version, as logprobs always do.
        max_context: Largest number of tokens of prompt and completion.
        max_running: Largest number of requests that run at a time.
        experts: Simulated mixture of experts: numbers of layers, of chosen experts per layer, and of all experts.
        cost: Duration of the simulated work; by default none.
        sleep: Called with the seconds of `cost`. In virtual time, a function that advances the clock.
        fail_at_step: Step, counted from 1, that raises RuntimeError.
        block_at_step: Step that sets `started` and waits for `release`.
    """

    scores_prompts = True

    def __init__(
        self,
        *,
        vocab_size: int = 128,
        seed: int = 0,
        version: int = 0,
        script: Callable[[Sequence[int]], int] | None = None,
        mean_tokens: float | None = None,
        tokens_depend_on_version: bool = False,
        max_context: int = 4096,
        max_running: int = 64,
        experts: tuple[int, int, int] | None = None,
        cost: CostModel | None = None,
        sleep: Callable[[float], None] = time.sleep,
        fail_at_step: int | None = None,
        block_at_step: int | None = None,
    ) -> None:
        self.versions = [version]  # all versions loaded so far, the current one last
        self.state_dict: dict[str, Any] = {}
        self.num_steps = 0
        self.num_score_steps = 0
        self.started = threading.Event()
        self.release = threading.Event()
        self.closed = False
        self._vocab_size = vocab_size
        self._seed = seed
        self._script = script
        self._mean_tokens = mean_tokens
        self._tokens_depend_on_version = tokens_depend_on_version
        self._max_context = max_context
        self._max_running = max_running
        self._experts = experts
        self._cost = cost or CostModel()
        self._sleep = sleep
        self._fail_at_step = fail_at_step
        self._block_at_step = block_at_step
        self._waiting: dict[str, _Sequence] = {}
        self._running: dict[str, _Sequence] = {}
        self._cached: set[int] = set()  # hash of the context at each block's end
        self._policies: dict[str, ScriptedPolicy] = {}
        self._num_prompt_tokens = self._num_cached_tokens = 0

    @property
    def version(self) -> int:
        return self.versions[-1]

    def add(self, request: EngineRequest) -> None:
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError(f"request_id {request.request_id!r} is already running; ids must be unique")
        length = len(request.prompt_token_ids)
        if not 0 < length < self._max_context:
            raise RequestError(
                f"request {request.request_id!r} has {length} prompt tokens; between 1 and {self._max_context - 1} "
                f"leave room for a completion in a context of {self._max_context}"
            )
        context = list(request.prompt_token_ids)
        self._waiting[request.request_id] = _Sequence(request, _mix(0, self._seed), context)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)

    def step(self) -> list[TokenDelta]:
        self.num_steps += 1
        if self.num_steps == self._fail_at_step:
            raise RuntimeError(f"injected failure at step {self.num_steps}")
        if self.num_steps == self._block_at_step:
            self.started.set()
            assert self.release.wait(timeout=30), "a blocked step was never released"
        num_prompt_tokens = self._admit()
        num_context_tokens = sum(len(sequence.context) for sequence in self._running.values())
        if seconds := self._cost.step_seconds(len(self._running), num_prompt_tokens, num_context_tokens):
            self._sleep(seconds)
        return [self._advance(sequence) for sequence in list(self._running.values())]

    def policy(self, adapter: str) -> ScriptedPolicy:
        return self._policies.setdefault(adapter, ScriptedPolicy(self.versions[0], self._seed))

    def _version_of(self, request: EngineRequest) -> int:
        return self.policy(request.adapter).versions[-1] if request.adapter else self.version

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        self.state_dict = dict(items)
        if self._cost.load:
            self._sleep(self._cost.load)
        self.versions.append(version)

    def held_weights(self) -> Iterable[HeldTensor]:
        for name, tensor in self.state_dict.items():
            if hasattr(tensor, "shape"):  # tests also load values that are not tensors
                shape = tuple(tensor.shape)
                yield HeldTensor(name, name, tensor, (0,) * len(shape), shape)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        for sequence in sequences:
            if len(sequence) > self._max_context:
                raise RequestError(
                    f"a sequence to score has {len(sequence)} tokens; there is room for {self._max_context}"
                )
        computed = [sequence for sequence in sequences if len(sequence) > 1]
        for first in range(0, len(computed), _SCORE_SLOTS):
            batch = computed[first : first + _SCORE_SLOTS]
            self.num_score_steps += 1
            if seconds := self._cost.step_seconds(len(batch), sum(map(len, batch))):
                self._sleep(seconds)
        return [scripted_logprobs(sequence, self.version, self._seed) for sequence in sequences]

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        self._cached.clear()

    def gauges(self) -> Mapping[str, float]:
        return {
            "running_requests": len(self._running),
            "waiting_requests": len(self._waiting),
            "prefix_cache_queries_total": self._num_prompt_tokens,
            "prefix_cache_hits_total": self._num_cached_tokens,
        }

    def close(self) -> None:
        self.closed = True

    def _admit(self) -> int:
        """Start waiting requests while there is room. Returns the number of prompt tokens to compute."""
        computed = 0
        while self._waiting and len(self._running) < self._max_running:
            request_id = next(iter(self._waiting))
            sequence = self._running[request_id] = self._waiting.pop(request_id)
            cached = 0
            for position, token in enumerate(sequence.context, start=1):
                sequence.state = _mix(sequence.state, token)
                if position % _BLOCK == 0:
                    if sequence.state in self._cached:
                        cached = position
                    self._cached.add(sequence.state)
            sequence.metrics["cached_prompt_tokens"] = float(cached)
            self._num_prompt_tokens += len(sequence.context)
            self._num_cached_tokens += cached
            computed += len(sequence.context) - cached
        return computed

    def _advance(self, sequence: _Sequence) -> TokenDelta:
        request, sampling = sequence.request, sequence.request.sampling
        token = self._next_token(sequence)
        before = sequence.state
        version = self._version_of(request)
        logprob = _logprob(before, token, version)
        sequence.context.append(token)
        sequence.state = _mix(sequence.state, token)
        sequence.generated += 1
        finish = None
        if token in sampling.stop_token_ids and sequence.generated >= sampling.min_tokens:
            finish = FinishReason.STOP
        elif sequence.generated == sampling.max_tokens or len(sequence.context) == self._max_context:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self._running[request.request_id]
        metrics, sequence.metrics = sequence.metrics, {}
        rows = [self._route(sequence.state)] if sampling.return_routed_experts and self._experts is not None else None
        top = [self._likeliest(before, sampling.top_logprobs, version)] if sampling.top_logprobs else None
        scores = self._scores_of(request) if sequence.generated == 1 and sampling.prompt_logprobs is not None else None
        return TokenDelta(
            request.request_id, (token,), (logprob,), finish, rows, metrics, top_logprobs=top, prompt_scores=scores
        )

    def _scores_of(self, request: EngineRequest) -> PromptScores:
        prompt, top_k = request.prompt_token_ids, request.sampling.prompt_logprobs or 0
        top: list[tuple[int, float]] = []
        state, version = _mix(0, self._seed), self._version_of(request)
        for token in prompt[:-1] if top_k else ():
            state = _mix(state, token)
            top += self._likeliest(state, top_k, version)
        logprobs = scripted_logprobs(prompt, version, self._seed)
        return PromptScores(logprobs, top_k, [token for token, _ in top], [logprob for _, logprob in top])

    def _likeliest(self, state: int, count: int, version: int) -> list[tuple[int, float]]:
        scored = ((_logprob(state, token, version), token) for token in range(self._vocab_size))
        return [(token, logprob) for logprob, token in heapq.nlargest(count, scored)]

    def _route(self, state: int) -> list[list[int]]:
        """Routed experts of one token.  # [num_layers, top_k]"""
        assert self._experts is not None
        layers, top_k, num_experts = self._experts
        return [[(_mix(state, layer) + k) % num_experts for k in range(top_k)] for layer in range(layers)]

    def _next_token(self, sequence: _Sequence) -> int:
        if self._script is not None:
            return self._script(sequence.context)
        sampling = sequence.request.sampling
        depends = self._tokens_depend_on_version
        draw = _mix(sequence.state, self._version_of(sequence.request) if depends else -1)
        stops = sampling.stop_token_ids
        if stops and self._mean_tokens is not None and sequence.generated >= sampling.min_tokens:
            threshold = int((1 << 32) / self._mean_tokens)
            if draw >> 32 < threshold:
                return stops[draw % len(stops)]
        token = draw % self._vocab_size
        while token in stops:
            token = (token + 1) % self._vocab_size
        return token
