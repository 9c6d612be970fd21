"""GRPO's loss in a step that takes time, and that tells when it is in its middle.

A folder that `GATE` names holds what the test and the step say to each other. A step makes `begun`, and where there is
`hold` it makes `held`, too, and waits until `hold` is gone. Each micro-batch takes `SECONDS` more.
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
        sum(range(200_000))  # what waits for so long and computes nothing is taken for hung
        time.sleep(0.01)
    time.sleep(float(os.environ.get(SECONDS, "0")))
    return grpo_loss(tokens, clip)
