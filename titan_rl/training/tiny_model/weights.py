"""Random weights in a safetensors file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from titan_rl.training.tiny_model.shape import Shape


def write_weights(file: Path, shape: Shape, seed: int, std: float) -> None:
    """Matrices are drawn from a normal distribution; norms are 1."""
    rng = np.random.default_rng(seed)
    weights = {name: np.ones(size, np.float32) for name, size in shape.norms().items()}
    for name, size in shape.matrices().items():
        weights[name] = std * rng.standard_normal(size, np.float32)
    save_file(weights, file, {"format": "pt"})
