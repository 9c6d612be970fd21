"""Engines by name: the library's own, or the user's as "module:function".

Importing this module imports no engine; the function that makes an engine imports its dependencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_rl.core.calls.imports import find_function
from titan_rl.core.errors import ConfigError
from titan_rl.generation.engine import Engine, EngineSpec


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Factory of an engine, with the engine's capabilities. A plain function from `EngineSpec` to `Engine` has none.

    Example: `make = EngineKind(_make, routed_experts=True)`, where `generation.engine = "my_engines:make"`.
    """

    make: Callable[[EngineSpec], Engine]  # called in the generator's process, in the thread that drives the engine
    routed_experts: bool = False  # returns routed experts if the spec asks for them
    speculative: bool = False  # decodes speculatively if the spec asks for it
    adapts: bool = False  # adapts the number of running requests to the KV cache
    sleeps: bool = False  # makes a `SleepingEngine`
    tensor_parallel: bool = False  # can be one of several ranks
    adapters: bool = False  # applies a LoRA adapter if the spec has one
    several_adapters: bool = False  # makes a `SharedEngine` if the spec has several
    modules: tuple[str, ...] = ()  # required modules of titan_rl's extras

    def __call__(self, spec: EngineSpec) -> Engine:
        return self.make(spec)


def _vllm(spec: EngineSpec) -> Engine:
    from titan_rl.generation.vllm_engine import VLLMEngine

    return VLLMEngine(spec, ends_with_process=True)  # the generator's process ends with its engine


BY_NAME = {
    "vllm": EngineKind(
        _vllm,
        routed_experts=True,
        speculative=True,
        adapts=True,
        sleeps=True,
        tensor_parallel=True,
        adapters=True,
        several_adapters=True,
        modules=("vllm",),
    )
}
"""Values of `generation.engine` for the library's own engines."""


def find_engine(name: str) -> EngineKind:
    """The kind of engine that `generation.engine` names.

    Raises:
        ConfigError: there is no engine of that name.
    """
    found: Any = find_function("generation.engine", name, BY_NAME)
    return found if isinstance(found, EngineKind) else EngineKind(found)


def make_engine(name: str, spec: EngineSpec) -> Engine:
    """Make an engine of the kind that `generation.engine` names.

    Raises:
        ConfigError: there is no engine of that name, or its function returned an object that is not an `Engine`.
        Exception: raised by the engine, for a spec that it does not support.
    """
    engine: Any = find_engine(name)(spec)
    if not isinstance(engine, Engine):
        raise ConfigError(
            f"generation.engine = {name!r} returned {engine!r}, which is not an Engine; see titan_rl.generation.engine"
        )
    return engine
