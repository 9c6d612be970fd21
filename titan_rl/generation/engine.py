"""Contract of an engine with the loop that drives it: one batch of requests, advanced a token at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.errors import UnsupportedSamplingError
from titan_rl.generation.request import EngineRequest
from titan_rl.types import EXTRA_SAMPLING, FinishReason, TopLogprobs


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine that is made of it can do what its `EngineKind` says, and is asked for no more.

    Attributes:
        model_path: Hugging Face folder with config.json and safetensors; no tokenizer is needed.
        dtype: of weights, activations and KV cache.
        max_context: most tokens of prompt and completion together.
        max_running: most requests advanced at a time; others wait.
        adapts: fewer are advanced while the KV cache is expected to be full, see `AdaptivePlaces`.
        kv_cache_gib: memory for the KV cache; by default `CPU_KV_GIB` on a CPU, and what is free on a GPU.
        gpu_neighbours: other engines on the same GPU, which get as much of what is free by default.
        seed: of requests that bring none.
        routed_experts: requests may ask for the experts that each token of a mixture of experts took.
        gpu_share: of the memory of its GPU that each process of it has; by default what weights, KV cache and work
            space come to, see `gpu_share_of`. vLLM does not start where so much is not free.
        prefix_cache: requests reuse the KV cache of others that begin with the same tokens.
        speculative: how tokens are guessed, of which several are checked in one step, by the names of vLLM's
            speculative_config; None guesses none.
        options: of the engine's own, as [generation.vllm] has them for vLLM.
        sleeps: it is asked to give its memory back for a time: a `SleepingEngine`.
        tensor_parallel_size: processes that share the model, each with an engine of its own, in lockstep.
        generator: which of the run's generators it belongs to.
    """

    model_path: str
    dtype: str = "float32"
    max_context: int = 512
    max_running: int = 64
    adapts: bool = False
    kv_cache_gib: float | None = None
    gpu_neighbours: int = 0
    seed: int = 0
    routed_experts: bool = False
    gpu_share: float | None = None
    prefix_cache: bool = True
    speculative: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sleeps: bool = False
    tensor_parallel_size: int = 1
    generator: int = 0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The tokens that one step added to one request. `finish_reason` or `failure` is set on the request's last
    delta."""

    request_id: str
    token_ids: Sequence[int]  # [num_new_tokens], may be empty
    logprobs: Sequence[float]  # [num_new_tokens]
    finish_reason: FinishReason | None = None
    routed_experts: Any = None  # [num_new_tokens, num_layers, top_k] if the request asks for them
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # e.g. cached_prompt_tokens, once
    failure: str | None = None  # why the engine gave the request up
    top_logprobs: TopLogprobs | None = None  # [num_new_tokens, ...] if the request asks for them
    allowed_logprobs: Sequence[float] | None = None  # [num_new_tokens] if the request has a constraint


def problem_of(delta: TokenDelta, request: EngineRequest) -> str | None:
    """The reason why a delta is invalid for its request, or None. An invalid delta fails that request alone."""
    if delta.failure is not None:
        return f"was given up by the engine: {delta.failure}"
    if not isinstance(delta.finish_reason, FinishReason | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"was ended by the engine with {delta.finish_reason!r}, which is no FinishReason"
    count = len(delta.token_ids)
    if len(delta.logprobs) != count:
        return f"got {count} tokens with {len(delta.logprobs)} logprobs"
    sampling = request.sampling
    for name, is_asked, rows in (
        ("routed experts", sampling.return_routed_experts, delta.routed_experts),
        ("top logprobs", bool(sampling.top_logprobs), delta.top_logprobs),
        ("the logprobs of what its constraint allows", sampling.constraint is not None, delta.allowed_logprobs),
    ):
        if is_asked and (num_rows := 0 if rows is None else len(rows)) != count:
            return f"asked for {name}, and {count} tokens came with {num_rows} rows of them"
    return None


def check_sampling(engine: object, request: EngineRequest) -> None:
    """
    Raises:
        UnsupportedSamplingError: the engine cannot sample as the request asks: see `Engine`.
    """
    honoured: Collection[str] = getattr(engine, "extra_sampling", ())
    for name, value in request.sampling.shaping.items():
        if name in EXTRA_SAMPLING and name not in honoured:
            is_constraint = name == "constraint"
            shown = "a constraint (a JSON schema or a forced tool)" if is_constraint else f"{name} = {value!r}"
            raise UnsupportedSamplingError(
                f"request {request.request_id!r} asks for {shown}, which {type(engine).__name__} does not honour; "
                'leave it out, or use an engine that does: generation.engine = "vllm"',
                name,
            )


@runtime_checkable
class Engine(Protocol):
    """A generation engine, owned and driven by one thread.

    Nothing here blocks longer than one step. An exception from anything but `add` means the engine is broken.

    An attribute `extra_sampling` names the fields of `EXTRA_SAMPLING` (`titan_rl.types`) that the engine honours. A
    request that sets another of them is refused by the engine loop; so all of them are, where there is no such
    attribute.
    The tests of `titan_rl.testing.engine_contract` find out whether an engine keeps to this.
    """

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: this request can never run (too long, bad parameters, duplicate id). Whatever else is raised
                is laid to the request, too: it is not queued, and others go on.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored. No further delta comes for them."""
        ...

    def step(self) -> list[TokenDelta]:
        """Advance every running request, by one token each, and by what was guessed and holds. Those that wait join
        while there is room.

        Returns:
            the step's deltas. A request has its first from the step that first runs it, without tokens if there are
            none yet: until that step it has waited for others.
        """
        ...

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        """Swap weights in place between two steps. Running requests keep their KV cache.

        Args:
            items: (Hugging Face parameter name, tensor) pairs, each parameter once.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs at temperature 1 of each sequence's tokens after the first, under the loaded weights.

        Requests stand still meanwhile, and are not waited for: however many run or wait, and however full the KV cache
        is, it takes the few steps that it takes alone.

        Returns:
            [num_sequences][len(sequence) - 1]

        Raises:
            RequestError: a sequence is too long, or has tokens that there are not.
        """
        ...

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Let no later request reuse KV computed so far.

        Args:
            recompute_running: running requests also recompute theirs, before their next token.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can lend its memory to somebody else for a time, a trainer on the same GPU."""

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back. Called while nothing runs; nothing but `wake` and `close`
        follows."""
        ...

    def wake(self) -> None:
        """Take as much memory again. What is in it is anything: `load_state_dict` follows before a request does."""
        ...


@runtime_checkable
class GaugedEngine(Engine, Protocol):
    """An engine that says how it is doing."""

    def gauges(self) -> Mapping[str, float]:
        """Figures by their names, as they are now. Called once the engine is made and after each step: it only looks.

        A name that ends in `_total` counts something, and never falls; any other is something that rises and falls.
        Those that the library's engines give are in docs/concepts/generation.md.

        Example: {"running_requests": 12.0, "kv_cache_usage": 0.4, "preemptions_total": 3.0}
        """
        ...


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A box of a Hugging Face tensor, as an engine holds it.

    An engine that has packed a tensor so that it cannot be read gives the `box_checksum` that it took of it right
    before it was packed, with the dtype and shape that the box had then.
    """

    name: str  # of the Hugging Face tensor
    parameter: str  # of the engine; a tensor that it keeps twice, as a tied head may be, is two parameters
    tensor: Any  # the box, in the layout of the Hugging Face tensor; None where there is a checksum
    start: tuple[int, ...]  # of the box's first element
    whole_shape: tuple[int, ...]
    checksum: int | None = None
    dtype: Any = None
    shape: tuple[int, ...] = ()


@runtime_checkable
class ReadableEngine(Engine, Protocol):
    """An engine whose weights can be read back, by which every pull is verified exactly."""

    def held_weights(self) -> Iterable[HeldTensor]:
        """All weights that this rank holds, as they are now, with fused tensors apart. Those that it cannot read are
        left out.

        Raises:
            VerificationError: the engine finds that it does not compute with what it was given.
        """
        ...
