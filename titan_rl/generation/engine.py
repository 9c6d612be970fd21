"""Contract of an engine with the loop that drives it: one batch of requests, advanced a token at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from titan_rl.core.errors import StateDictError, UnsupportedSamplingError
from titan_rl.generation.request import EngineRequest
from titan_rl.types import EXTRA_SAMPLING, FinishReason, PromptScores, TopLogprobs


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """LoRA adapter that an engine applies to requests. Its versions are loaded by `Engine.load_state_dict`.

    Attributes:
        rank: Rank of the change of each layer.
        alpha: The change is scaled by alpha / rank.
        targets: Last parts of the Hugging Face names of the changed layers.
        num_versions: Versions that the engine holds at a time. With 1, running requests continue with each new version.
            With more, a request finishes on the version it started with (`pins_versions`).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    num_versions: int = 1

    @property
    def scale(self) -> float:
        """Factor of the change."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Specification of an engine. It requires only what the `EngineKind` supports.

    Attributes:
        model_path: Hugging Face folder with config.json and safetensors; no tokenizer is needed.
        dtype: Dtype of weights, activations and KV cache.
        max_context: Maximum number of tokens of prompt and completion together.
        max_running: Maximum number of requests advanced at a time; others wait.
        adapts: Whether fewer requests are advanced while the KV cache is expected to be full, see `AdaptiveLimit`.
        kv_cache_gib: Memory for the KV cache. By default `CPU_KV_GIB` on a CPU, and the free memory on a GPU.
        gpu_neighbours: Number of other engines on the same GPU, which share the free memory equally by default.
        seed: Seed of requests without one.
        routed_experts: Whether requests may ask a mixture-of-experts model for the experts of each token.
        gpu_share: Share of a GPU's memory that each process gets. By default the sum of weights, KV cache and work
            space, see `gpu_share_of`. vLLM does not start if less is free.
        prefix_cache: Whether requests reuse the KV cache of others that begin with the same tokens.
        speculative: Settings of speculative decoding, by the names of vLLM's speculative_config; None for no
            speculation.
        options: The engine's own options, such as [generation.vllm].
        sleeps: Whether the engine must be able to release its memory for a time, as a `SleepingEngine`.
        tensor_parallel_size: Number of processes that share the model. Each has its own engine, and they step together.
        generator: Index of the generator in the run.
        adapters: Adapters of the model by name: one with the name "", or several for a `SharedEngine`. The pairs of
            `load_state_dict` are then an adapter's matrices, and the model is not loaded again. Empty loads whole
            models.
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
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict[str, AdapterSpec])


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens that one step added to one request. `finish_reason` or `failure` is set on the request's last delta."""

    request_id: str
    token_ids: Sequence[int]  # [num_new_tokens], may be empty
    logprobs: Sequence[float]  # [num_new_tokens]
    finish_reason: FinishReason | None = None
    routed_experts: Any = None  # [num_new_tokens, num_layers, top_k] if requested
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # e.g. cached_prompt_tokens, once
    failure: str | None = None  # reason why the engine abandoned the request
    top_logprobs: TopLogprobs | None = None  # [num_new_tokens, ...] if requested
    allowed_logprobs: Sequence[float] | None = None  # [num_new_tokens] if the request has a constraint
    prompt_scores: PromptScores | None = None  # once, if requested


def problem_of(delta: TokenDelta, request: EngineRequest) -> str | None:
    """Reason why a delta is invalid for its request, or None. An invalid delta fails only its request."""
    if delta.failure is not None:
        return f"was abandoned by the engine: {delta.failure}"
    if not isinstance(delta.finish_reason, FinishReason | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"was ended by the engine with {delta.finish_reason!r}, which is not a FinishReason"
    count = len(delta.token_ids)
    if len(delta.logprobs) != count:
        return f"got {count} tokens with {len(delta.logprobs)} logprobs"
    sampling = request.sampling
    for name, is_requested, rows in (
        ("routed experts", sampling.return_routed_experts, delta.routed_experts),
        ("top logprobs", bool(sampling.top_logprobs), delta.top_logprobs),
        ("allowed logprobs", sampling.constraint is not None, delta.allowed_logprobs),
    ):
        if is_requested and (num_rows := 0 if rows is None else len(rows)) != count:
            return f"asked for {name}, but got {num_rows} rows of them for {count} tokens"
    return None


def check_sampling(engine: object, request: EngineRequest) -> None:
    """Check that an engine supports a request's sampling parameters; see `Engine`.

    Raises:
        UnsupportedSamplingError: the engine does not honour one of them.
    """
    if request.sampling.prompt_logprobs is not None and not getattr(engine, "scores_prompts", False):
        raise UnsupportedSamplingError(
            f"request {request.request_id!r} asks for the logprobs of its prompt, which {type(engine).__name__} does "
            'not return; use an engine that does as the teacher: generation.engine = "vllm"',
            "prompt_logprobs",
        )
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

    If an attribute `pins_versions` is true, each request finishes on the weights it started with. Otherwise, running
    requests continue with the loaded weights.

    An attribute `extra_sampling` names the fields of `EXTRA_SAMPLING` (`titan_rl.types`) that the engine honours. The
    engine loop refuses requests that set any other of them; without the attribute, it refuses all of them. An attribute
    `scores_prompts = True` declares that the engine returns `TokenDelta.prompt_scores`.

    `titan_rl.testing.engine_contract` has tests of this contract.
    """

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: this request can never run (too long, bad parameters, duplicate id). Any other error is also
                attributed to the request: it is not queued, and others continue.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored. They get no further deltas."""
        ...

    def step(self) -> list[TokenDelta]:
        """Advance every running request by one token, and by its accepted speculative tokens. Waiting requests join
        while there is room.

        Returns:
            The step's deltas. The first step that runs a request returns a delta of it, perhaps without tokens; until
            then the request was queued.
        """
        ...

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        """Swap weights in place between two steps. Running requests keep their KV cache.

        Args:
            items: (Hugging Face parameter name, tensor) pairs; each parameter occurs once.
            version: Version of the weights.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs at temperature 1 of each sequence's tokens after the first, under the loaded weights.

        Requests are suspended meanwhile, so the number of steps depends neither on the running and waiting requests
        nor on the KV cache.

        Returns:
            [num_sequences][len(sequence) - 1]

        Raises:
            RequestError: a sequence is too long, or has tokens that are not in the vocabulary.
        """
        ...

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Prevent later requests from reusing the KV cache computed so far.

        Args:
            recompute_running: Whether running requests also recompute their KV cache before their next token.
        """
        ...

    def close(self) -> None: ...


class LoadedPolicy(Protocol):
    """One of several policies of an engine: the methods of `Engine` and `ReadableEngine` that concern its weights."""

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        """See `Engine.load_state_dict`. Requests of other policies are not affected."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.score`. Meanwhile requests of other policies advance in every step, and those of this policy may;
        their deltas are part of the next `Engine.step`."""
        ...

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """See `Engine.reset_prefix_cache`."""
        ...


@runtime_checkable
class SharedEngine(Engine, Protocol):
    """An engine with several adapters, each of which is a separate policy. A request names its adapter, and the
    requests of all adapters share the batch."""

    def policy(self, adapter: str) -> LoadedPolicy:
        """The policy of one adapter."""
        ...


def policy_of(engine: Engine, adapter: str) -> LoadedPolicy:
    """The policy of an adapter; for the name "" the engine itself.

    Raises:
        StateDictError: the engine does not hold several adapters.
    """
    if not adapter:
        return engine
    if not isinstance(engine, SharedEngine):
        raise StateDictError(f"{type(engine).__name__} does not hold several adapters, but was asked for {adapter!r}")
    return engine.policy(adapter)


@runtime_checkable
class PinningEngine(Engine, Protocol):
    """An engine that holds several versions. A request may name one (`EngineRequest.version`)."""

    pins_versions: bool

    def pin(self, version: int | None, adapter: str = "") -> None:
        """Keep a loaded version of an adapter until the next call of `pin`; None keeps none. Called right before
        `load_state_dict`. `add` raises `GenerationError` for a request that names a version which is not loaded."""
        ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can release its memory for a time, for a trainer on the same GPU."""

    def sleep(self) -> None:
        """Release the memory of weights and KV cache. Called while nothing runs; the next call is `wake` or `close`."""
        ...

    def wake(self) -> None:
        """Allocate the memory again. Its content is undefined until `load_state_dict`, which precedes any request."""
        ...


@runtime_checkable
class GaugedEngine(Engine, Protocol):
    """An engine that reports gauges."""

    def gauges(self) -> Mapping[str, float]:
        """Current gauges by name. Called when the engine was made and after each step; it has no side effects.

        A name that ends in `_total` is a counter, which never falls; any other gauge may rise and fall. The gauges of
        the library's engines are listed in docs/concepts/generation.md.

        Example: {"running_requests": 12.0, "kv_cache_usage": 0.4, "preemptions_total": 3.0}
        """
        ...


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A box of a Hugging Face tensor that an engine holds.

    If the engine has packed a tensor so that it cannot be read, it returns the `box_checksum`, or `box_sum`, from right
    before the packing, with the dtype and shape of the box at that time.
    """

    name: str  # name of the Hugging Face tensor
    parameter: str  # the engine's parameter; a tensor that it keeps twice, such as a tied head, has two
    tensor: Any  # the box, in the layout of the Hugging Face tensor; None if there is a checksum
    start: tuple[int, ...]  # position of the box's first element in the whole tensor
    global_shape: tuple[int, ...]
    checksum: int | Any = None  # a number, or a tensor: [], int64
    dtype: Any = None  # dtype of the box, if there is a checksum
    shape: tuple[int, ...] = ()  # shape of the box, if there is a checksum


@runtime_checkable
class ReadableEngine(Protocol):
    """An engine, or one of its policies, whose weights can be read back, so that every pull is verified exactly."""

    def held_weights(self) -> Iterable[HeldTensor]:
        """All weights that this rank holds at present, with fused tensors split. Unreadable weights are left out.

        Raises:
            VerificationError: the engine finds that it does not compute with the loaded weights.
        """
        ...
