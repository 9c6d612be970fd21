"""A user-defined engine: vLLM's engine with a step counter."""

from __future__ import annotations

from collections.abc import Mapping

from titan_rl import Engine, TokenDelta
from titan_rl.generation.engine import EngineSpec


def make(spec: EngineSpec) -> Engine:
    from titan_rl.generation.vllm_engine import VLLMEngine  # heavy, and this module is also imported by the controller

    class CountingEngine(VLLMEngine):
        num_steps = 0

        def step(self) -> list[TokenDelta]:
            self.num_steps += 1
            return super().step()

        def gauges(self) -> Mapping[str, float]:
            return {**super().gauges(), "own_steps_total": self.num_steps}

    return CountingEngine(spec)
