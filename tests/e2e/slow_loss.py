"""GRPO's loss in a slow step that signals when it is in the middle.

The test and the step communicate through files in the folder named by `GATE`. A step creates `begun`. If `hold` exists,
it also creates `held` and waits until `hold` is removed. Each micro-batch takes `SECONDS` longer.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from titan_rl.training.algorithms.grpo import grpo_loss
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss

GATE = "TITAN_RL_TEST_GATE"
SECONDS = "TITAN_RL_TEST_LOSS_SECONDS"
LONGEST_HOLD_S = 120.0


def slow_grpo(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    gate = Path(os.environ[GATE])
    (gate / "begun").touch()
    deadline = time.monotonic() + LONGEST_HOLD_S
    while (gate / "hold").exists() and time.monotonic() < deadline:
        (gate / "held").touch()
        sum(range(200_000))  # a long wait without computation would count as a hang
        time.sleep(0.01)
    time.sleep(float(os.environ.get(SECONDS, "0")))
    return grpo_loss(tokens, clip)
