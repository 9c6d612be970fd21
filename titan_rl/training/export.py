"""Export of a policy as a Hugging Face folder that transformers and vLLM load.

`titan-rl export` runs this module in a separate process:

    python -m titan_rl.training.export MODEL runs/latest/checkpoints/step-000040 policy bfloat16 auto model

The arguments are the folder of the model that was trained, the checkpoint or a folder in PEFT's format, the folder to
write, the dtype to write, `model.renderer` of the run, and "model", or "adapter" for the adapter alone.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import CheckpointError
from titan_rl.rollout.renderer.registry import fit_template
from titan_rl.training.choices import DType, Implementation
from titan_rl.training.decoder_interface import PREFIX as MODULE
from titan_rl.training.models.peft_settings import CONFIG as PEFT_CONFIG
from titan_rl.training.models.peft_settings import PREFIX, peft_settings
from titan_rl.training.models.peft_settings import WEIGHTS as PEFT_WEIGHTS
from titan_rl.training.parallel import World, local_slice
from titan_rl.training.policy import Policy
from titan_rl.training.settings import MADE_BY_SFT, AdapterConfig, ModelConfig, TrainingConfig
from titan_rl.training.state.checkpoint import atomic_directory, read_checksums, verify
from titan_rl.training.state.train_state import SUFFIX, TRAINED, TensorFiles, adapter_of, flatten, write_tensors


def export_checkpoint(
    source: Path,
    checkpoint: Path,
    directory: Path,
    dtype: DType = "float32",
    renderer: str = "auto",
    *,
    as_adapter: bool = False,
) -> None:
    """Write a Hugging Face folder with a checkpoint's weights, for any optimizer and number of ranks. An adapter is
    merged into the weights of its base as the run has trained with them: the sum is rounded once, to `dtype`.

    Args:
        source: Folder of the model that was trained.
        renderer: `model.renderer` of the run. The chat template is fitted to it.
        as_adapter: Write the adapter alone instead, in PEFT's format.

    Raises:
        DamagedCheckpointError: The checkpoint's bytes are not those that were written.
        CheckpointError: The checkpoint is of another model, or the folder could not be written, or it reads back
            differently.
        ModelError: The model's folder lacks a file.
    """
    verify(checkpoint)
    files = TensorFiles([checkpoint / name for name in read_checksums(checkpoint) if name.endswith(SUFFIX)])
    masters: DType = "bfloat16" if files.has_dtype("model/", "BF16") else "float32"
    is_of_transformers = any(name.startswith(f"model/{MODULE}") for name in files.names)
    implementation: Implementation = "transformers" if is_of_transformers else "torchtitan"
    training = TrainingConfig(row_tokens=1, master_dtype=masters, adapter=adapter_of(checkpoint) or AdapterConfig())
    policy = Policy(  # computes nothing
        ModelConfig(path=str(source), max_context=1, dtype=dtype, implementation=implementation),
        training,
        World(),
        base_dtype=_base_dtype(source, _trained_in(checkpoint)),
    )
    tensors, _ = flatten({"model": get_model_state_dict(policy.model, options=TRAINED)})
    try:
        files.read({name: local_slice(tensor) for name, tensor in tensors.items()})
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} is not of the model in {source}: {error}") from error
    if as_adapter:
        if policy.adapter is None:
            raise CheckpointError(f"{checkpoint} has no adapter: its run trained all weights; export without --adapter")
        policy.adapter.write_peft(directory, base=str(source))
        named = ((f"{PREFIX}{name}", matrix) for name, matrix in policy.adapter.named_tensors())
        check_export(directory / PEFT_WEIGHTS, named)
        return
    _write_model(policy, source, directory, dtype, renderer)


def merge_peft(source: Path, adapter: Path, directory: Path, dtype: DType = "float32", renderer: str = "auto") -> None:
    """Write a Hugging Face folder with a model into which an adapter in PEFT's format is merged. The sum is rounded
    once, to `dtype`.

    Args:
        source: Folder of the base model.
        adapter: Adapter folder in PEFT's format.
        renderer: `model.renderer` of the run. The chat template is fitted to it.

    Raises:
        ModelError: A folder lacks a file, or the adapter does not fit this model or is of an unsupported kind.
        CheckpointError: The folder could not be written, or it reads back differently.
    """
    settings = peft_settings(adapter)
    policy = Policy(  # computes nothing
        ModelConfig(path=str(source), max_context=1, dtype=dtype, implementation="transformers"),
        TrainingConfig(row_tokens=1, adapter=settings.model_copy(update={"start": None})),
        World(),
        base_dtype=_base_dtype(source),
    )
    assert policy.adapter is not None
    policy.adapter.load_peft(adapter)
    _write_model(policy, source, directory, dtype, renderer)


def _trained_in(checkpoint: Path) -> DType:
    """`model.dtype` of the run that wrote a checkpoint; float32 if no run wrote it."""
    try:
        settings = parse_json((checkpoint / "run_state.json").read_text())["settings"]
    except (OSError, ValueError, KeyError):
        return "float32"
    return settings.get("model.dtype", "float32")


def _base_dtype(source: Path, trained_in: DType = "float32") -> DType:
    """Smallest dtype that represents exactly the weights of a folder with which a run has trained.

    Args:
        trained_in: `model.dtype` of the run.
    """
    if trained_in != "float32":
        return trained_in
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if any(file.get_slice(name).get_dtype() != "BF16" for name in file.keys()):  # noqa: SIM118  no mapping
                return "float32"
    return "bfloat16"


def _write_model(policy: Policy, source: Path, directory: Path, dtype: DType, renderer: str) -> None:
    template = fit_template(source, renderer).template

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return chain(policy.named_tensors(), policy.untrained_tensors())

    export_hf(directory, policy.layout(), tensors(), source=source, dtype=dtype, chat_template=template)
    check_export(directory / "model.safetensors", tensors())


def check_export(path: Path, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Read an exported safetensors file back and compare it with its tensors.

    Raises:
        CheckpointError: The file does not hold exactly these tensors, bit by bit.
    """
    with safe_open(path, framework="pt") as file:
        left = set(file.keys())
        for name, tensor in named_tensors:
            if name not in left or not torch.equal(file.get_tensor(name), tensor.detach().cpu()):
                raise CheckpointError(f"{path}: {name} differs from what was written; the disk may be damaged")
            left.remove(name)
    if left:
        raise CheckpointError(f"{path} has tensors of another model: {', '.join(sorted(left))}")


_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def export_hf(
    directory: Path,
    layout: Mapping[str, torch.Tensor],
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    source: Path,
    dtype: str,
    chat_template: str | None = None,
) -> None:
    """Write a Hugging Face folder, all or nothing: `named_tensors`, one at a time, with the config, tokenizer and chat
    template of `source`.

    Args:
        layout: Dtypes and shapes of the tensors; see `write_tensors`.
        named_tensors: Hugging Face names and tensors.
        source: Folder of the original model. All files without weights are copied, except `MADE_BY_SFT`, so that
            `titan-rl sft` does not replace the exported folder.
        dtype: Dtype to record in config.json, such as "float32", so that readers load the weights unchanged.
        chat_template: Chat template that replaces that of `source`.

    Raises:
        NoSpaceError: The disk is full.
        CheckpointError: The folder could not be written; `directory` is unchanged.
    """
    with atomic_directory(directory) as temporary:
        for file in source.iterdir():
            if file.is_file() and file.name != MADE_BY_SFT and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, temporary / file.name)
        config: dict[str, Any] = parse_json((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if chat_template is not None:
            _replace_template(temporary, chat_template)
        write_tensors(temporary / "model.safetensors", layout, named_tensors, {"format": "pt"})


def _replace_template(folder: Path, template: str) -> None:
    """Write the chat template, and remove any other from the tokenizer's config: older folders have it there, and some
    readers look there first."""
    (folder / "chat_template.jinja").write_text(template)
    if (path := folder / "tokenizer_config.json").is_file():
        config: dict[str, Any] = parse_json(path.read_text())
        if config.pop("chat_template", None) is not None:
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    _, trained, saved, written, dtype, renderer, form = sys.argv
    if (Path(saved) / PEFT_CONFIG).is_file():
        merge_peft(Path(trained), Path(saved), Path(written), cast(DType, dtype), renderer)
    else:
        as_adapter = form == "adapter"
        export_checkpoint(
            Path(trained), Path(saved), Path(written), cast(DType, dtype), renderer, as_adapter=as_adapter
        )
