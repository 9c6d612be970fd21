"""Transformer blocks compiled by torch, for rows of any number and length."""

from __future__ import annotations

import os
import shutil
from typing import Any, cast

import torch

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ConfigError
from titan_rl.training.attention.document_attention import DocumentAttention

# isort: split
from torchtitan.models.common.moe import MoE

UNCOMPILED = (DocumentAttention, MoE)
"""What has other shapes for every batch, by where its documents lie or which experts its tokens take, runs as it is
between the compiled parts of a block; compiled, it would be compiled anew for each of them."""


def compile_blocks(model: Any, device: torch.device) -> None:
    """Compile in place, so that parameters keep their names. torch compiles at the first batches: with and without
    gradients, and for one row and for several.

    torchtitan's `apply_compile` takes no block with an uncompiled part.

    Raises:
        ConfigError: this machine lacks the compiler that torch needs on a CPU.
    """
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise ConfigError(
            "training.compile = true needs a C++ compiler where there is no accelerator, and found none; install g++, "
            "name yours in the environment variable CXX, or set compile = false"
        )
    for module in model.modules():
        if isinstance(module, UNCOMPILED):
            module.forward = cast(Any, torch.compiler.disable(module.forward))
    for block in model.layers.children():
        block.compile(dynamic=True)
