"""The policy of a checkpoint as a Hugging Face folder.

    python -m titan_rl.training.export '{"path": "checkpoints/Qwen3-0.6B"}' runs/latest/checkpoints/step-000040 policy

The first argument has the settings of the table [model], as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.checkpoint.state_dict import get_model_state_dict

from titan_rl.errors import CheckpointError
from titan_rl.training.parallel.parallel import local_slice
from titan_rl.training.parallel.world import World
from titan_rl.training.parts import make_policy
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.state.checksums import read_checksums, verify
from titan_rl.training.state.hf_export import export_hf
from titan_rl.training.state.state_tree import flatten
from titan_rl.training.state.tensor_file import SUFFIX, TensorFiles


def export_checkpoint(model: ModelConfig, checkpoint: Path, directory: Path) -> None:
    """Write a Hugging Face folder with a checkpoint's weights, whichever optimizer and number of ranks it is of.

    Args:
        model: what was trained.

    Raises:
        DamagedCheckpointError: its bytes are not those that were written.
        CheckpointError: it is of another model, or the folder could not be written.
        ModelError: the folder of the model lacks a file.
    """
    verify(checkpoint)
    policy = make_policy(model, TrainingConfig(), World())
    tensors, _ = flatten({"model": get_model_state_dict(policy.model)})
    files = TensorFiles([checkpoint / name for name in read_checksums(checkpoint) if name.endswith(SUFFIX)])
    try:
        files.read({name: local_slice(tensor) for name, tensor in tensors.items()})
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} is not of the model in {model.path}: {error}") from error
    export_hf(directory, policy.named_tensors(), source=Path(model.path), dtype=model.dtype)


if __name__ == "__main__":
    export_checkpoint(ModelConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
