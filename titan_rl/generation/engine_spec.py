"""What a generator asks of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
