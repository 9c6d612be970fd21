"""The formulas of scripts/gpu_memory.py against what a trainer holds on a CPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3, on_policy_samples
from e2e.warm import run_world
from torch.distributed.tensor import DTensor

from titan_rl.training.attention.attention import Document, layout_documents
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("gpu_memory", ROOT / "scripts/gpu_memory.py")
assert SPEC is not None
assert SPEC.loader is not None
memory = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_memory"] = memory
SPEC.loader.exec_module(memory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True, num_layers=4)


@pytest.mark.parametrize(
    "given",
    [{}, {"optimizer_dtype": "bfloat16"}, {"optimizer_dtype": "int8", "master_dtype": "bfloat16"}],
    ids=["float32", "bfloat16 moments", "int8 moments, bfloat16 weights"],
)
def test_weights_and_moments_take_what_the_formula_says(folder: Path, given: dict[str, Any]) -> None:
    training = TrainingConfig(**given)
    trainer = TrainerCore(ModelConfig(path=str(folder), dtype="bfloat16"), training, seed=0)
    trainer.step(on_policy_samples(trainer, 40))
    sizes = memory.Sizes.read(folder)
    expected = memory.state_bytes(sizes, training)
    parameters = list(trainer._model.parameters())  # pyright: ignore[reportPrivateUsage]
    assert sum(parameter.numel() for parameter in parameters) == sizes.parameters
    assert sum(parameter.nbytes for parameter in parameters) == expected["weights"]
    parts = trainer._optimizers.parts  # pyright: ignore[reportPrivateUsage]
    states = [tensor for part in parts for state in part.state.values() for tensor in state.values()]
    # Rows of a tiny model are short, so that the scales of 8-bit moments, 8 bytes a row, count for more.
    assert sum(tensor.nbytes for tensor in states) == pytest.approx(expected["moments"], rel=0.15)


def bytes_of_a_rank(folder: Path, **given: Any) -> tuple[int, int, int]:
    """Weights and moments of this rank after a step, and the most weights that its layers had gathered at a time."""
    training = TrainingConfig(steps=2, row_tokens=64, rows_per_micro_batch=2, **given)
    trainer = TrainerCore(ModelConfig(path=str(folder), dtype="bfloat16"), training, seed=0)
    model: Any = trainer._model  # pyright: ignore[reportPrivateUsage]
    most = 0

    def measure(*_: Any) -> None:
        nonlocal most
        whole = {each.data_ptr(): each.nbytes for each in model.layers.parameters() if not isinstance(each, DTensor)}
        most = max(most, sum(whole.values()))

    for layer in model.layers.values():
        layer.attention.register_forward_hook(measure)
    trainer.step(on_policy_samples(trainer, 40, 30))
    states = [each for part in trainer._optimizers.parts for each in part.state.values()]  # pyright: ignore[reportPrivateUsage]
    moments = sum(state[name].to_local().nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    return sum(parameter.to_local().nbytes for parameter in model.parameters()), moments, most


@pytest.mark.parametrize("offload", [False, True])
def test_a_rank_holds_its_share_and_gathers_what_the_formula_says(folder: Path, offload: bool) -> None:
    given: dict[str, Any] = {"data_parallel": 2, "offload": ("parameters",) if offload else ()}
    sizes, training = memory.Sizes.read(folder), TrainingConfig(**given)
    expected = memory.state_bytes(sizes, TrainingConfig(data_parallel=2))
    for weights, moments, gathered in run_world(bytes_of_a_rank, 2, folder=folder, **given):
        assert weights == pytest.approx(expected["weights"], rel=0.01)
        assert moments == pytest.approx(expected["moments"], rel=0.01)
        assert sizes.layer * 2 <= gathered <= memory.gathered_bytes(sizes, 2) - 2 * sizes.embeddings
    if offload:
        assert sum(memory.state_bytes(sizes, training).values()) == 0, "all of it is in the host's memory"


def kept(policy: Policy, tokens: int) -> int:
    """Bytes that the layers keep for the backward pass, beside the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no address serves twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None]
        policy.model(ids, positions, layout_documents([Document(tokens)]))
    return sum(found.values())


@pytest.mark.parametrize("tokens", [256, 768])
def test_the_layers_keep_what_the_formula_says(folder: Path, tokens: int) -> None:
    policy = Policy(folder, World(), max_context=1024, row_tokens=1024)
    expected = memory.kept_bytes(memory.Sizes.read(folder), TrainingConfig(), tokens, 4)
    assert kept(policy, tokens) == pytest.approx(expected, rel=0.05)


def test_every_example_for_a_gpu_and_every_setting_has_a_line() -> None:
    command = [sys.executable, str(ROOT / "scripts/gpu_memory.py")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.count("0.60B parameters") == len(memory.EXAMPLES)
    assert ran.stdout.count(", all ") == len(memory.EXAMPLES) * len(memory.VARIANTS)
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*/qwen3*.toml")}
    assert there == set(memory.EXAMPLES)
