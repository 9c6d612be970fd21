"""The policy of a checkpoint as a Hugging Face folder: what `titan-rl export` runs in a process of its own.

    python -m titan_rl.training.export checkpoints/Qwen3-0.6B runs/latest/checkpoints/step-000040 policy bfloat16 auto

The first argument is the folder of the model that was trained, the last ones are the dtype that is written and
`model.renderer` of the run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from titan_rl.core.errors import CheckpointError
from titan_rl.rollout.renderer.registry import fit_template
from titan_rl.training.choices import DType
from titan_rl.training.parallel.parallel import local_slice
from titan_rl.training.parallel.world import World
from titan_rl.training.policy.policy import Policy
from titan_rl.training.state.checksums import read_checksums, verify
from titan_rl.training.state.hf_export import export_hf
from titan_rl.training.state.state_tree import flatten
from titan_rl.training.state.tensor_file import SUFFIX, TensorFiles


def export_checkpoint(
    source: Path, checkpoint: Path, directory: Path, dtype: DType = "float32", renderer: str = "auto"
) -> None:
    """Write a Hugging Face folder with a checkpoint's weights, whichever optimizer and number of ranks it is of.

    Args:
        source: the folder of the model that was trained.
        renderer: by which it was trained, which the chat template is made to fit.

    Raises:
        DamagedCheckpointError: its bytes are not those that were written.
        CheckpointError: it is of another model, or the folder could not be written, or does not hold what was written.
        ModelError: the folder of the model lacks a file.
    """
    verify(checkpoint)
    files = TensorFiles([checkpoint / name for name in read_checksums(checkpoint) if name.endswith(SUFFIX)])
    masters: DType = "bfloat16" if files.has_dtype("model/", "BF16") else "float32"
    policy = Policy(source, World(), max_context=1, row_tokens=1, dtype=dtype, master_dtype=masters)  # computes nothing
    tensors, _ = flatten({"model": get_model_state_dict(policy.model)})
    try:
        files.read({name: local_slice(tensor) for name, tensor in tensors.items()})
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} is not of the model in {source}: {error}") from error
    template = fit_template(source, renderer).template
    named = policy.named_tensors()
    export_hf(directory, policy.layout(), named, source=source, dtype=dtype, chat_template=template)
    check_export(directory, policy.named_tensors())


def check_export(directory: Path, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Read an exported folder again.

    Raises:
        CheckpointError: it does not hold these tensors, bit by bit, and no others.
    """
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        left = set(file.keys())
        for name, tensor in named_tensors:
            if name not in left or not torch.equal(file.get_tensor(name), tensor.detach().cpu()):
                raise CheckpointError(f"{directory}: {name} is not what was written; the disk may be at fault")
            left.remove(name)
    if left:
        raise CheckpointError(f"{directory} has tensors of another model: {', '.join(sorted(left))}")


if __name__ == "__main__":
    _, trained, saved, written, dtype, renderer = sys.argv
    export_checkpoint(Path(trained), Path(saved), Path(written), cast(DType, dtype), renderer)
