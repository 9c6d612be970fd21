"""Slow vLLM, as a user-defined engine, that signals when it generates.

Each step with unfinished requests makes the file `generates-HOST` in the gate folder of `e2e.slow_loss`.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from e2e.slow_loss import GATE

from titan_rl import Engine, TokenDelta
from titan_rl.generation.engine import EngineSpec

STEP_S = 0.05


def make(spec: EngineSpec) -> Engine:
    from titan_rl.generation.vllm_engine import VLLMEngine

    class SlowEngine(VLLMEngine):
        def step(self) -> list[TokenDelta]:
            deltas = super().step()
            if any(delta.token_ids and delta.finish_reason is None for delta in deltas):  # a probe ends in its step
                (Path(os.environ[GATE]) / f"generates-{socket.gethostname()}").touch()
                time.sleep(STEP_S)
            return deltas

    return SlowEngine(spec)
