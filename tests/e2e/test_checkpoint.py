"""Training state and exported weights on a real disk."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import in_depth
from e2e.warm import run_world
from tiny_policy import make_tiny_qwen3, make_trainer, on_policy_samples, sequences, transformers_logprobs, weights
from transformers import AutoModelForCausalLM

from titan_rl.core.errors import CheckpointError, DamagedCheckpointError
from titan_rl.training.export import check_export, export_checkpoint
from titan_rl.training.optimizer.registry import NamedParameters, OptimizerSpec
from titan_rl.training.state import train_state
from titan_rl.training.trainer import TrainerCore


@pytest.fixture(scope="module", params=["untied", pytest.param("tied", marks=in_depth)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


def two_rates(parameters: NamedParameters, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Norms learn at a tenth of the rate of the others, embeddings not at all."""
    groups: dict[float, list[torch.nn.Parameter]] = {0.0: [], 0.1: [], 1.0: []}
    for name, parameter in parameters:
        groups[0.0 if "tok_embeddings" in name else 0.1 if "norm" in name else 1.0].append(parameter)
    return torch.optim.RMSprop(
        [{"params": members, "lr": spec.lr * rate} for rate, members in groups.items()], lr=spec.lr
    )


def named_nadam(parameters: NamedParameters, spec: OptimizerSpec) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=spec.lr, betas=spec.betas)


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "adam", "sgd", "muon", f"{__name__}:two_rates", f"{__name__}:named_nadam"],
)
def test_resumed_trainer_continues_bitwise_identically(folder: Path, tmp_path: Path, optimizer: str):
    schedule = {"steps": 6, "lr_decay": "cosine", "warmup_steps": 2, "optimizer": optimizer}
    trainer = make_trainer(folder, **schedule)
    samples = on_policy_samples(trainer, 24, 33, 8)
    for _ in range(3):
        trainer.step(samples)
    trainer.save(tmp_path / "step-000003")
    random_state = torch.get_rng_state()
    expected = [trainer.step(samples) for _ in range(3)]

    resumed = make_trainer(folder, **schedule)
    resumed.load(tmp_path / "step-000003")
    assert resumed.version == 3
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [resumed.step(samples) for _ in range(3)] == expected
    reference = weights(trainer)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in resumed.named_tensors())
    assert os.listdir(tmp_path) == ["step-000003"]


def test_checkpoint_captures_state_when_saving_begins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(folder)
    samples = on_policy_samples(trainer, 24, 33)
    trainer.step(samples)
    write, stepped = train_state.write_slices, threading.Event()

    def late(*args: Any, **kwargs: Any) -> Any:
        assert stepped.wait(300)
        return write(*args, **kwargs)

    monkeypatch.setattr(train_state, "write_slices", late)
    trainer.begin_save(tmp_path / "step-000001", {"note.txt": "first"})
    with monkeypatch.context() as patch:
        patch.setattr(train_state, "STALL_S", 0.01)
        with pytest.raises(CheckpointError, match=r"made no progress for 0\.01 s"):
            trainer.finish_save()
    expected = trainer.step(samples)
    stepped.set()
    trainer.begin_save(tmp_path / "step-000002")  # waits for the first
    assert (tmp_path / "step-000001" / "note.txt").read_text() == "first"
    trainer.finish_save()

    resumed = make_trainer(folder)
    resumed.load(tmp_path / "step-000001")
    assert resumed.step(samples) == expected
    resumed.load(tmp_path / "step-000002")
    reference = weights(trainer)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in resumed.named_tensors())


def test_saving_before_the_first_step_does_not_change_steps(folder: Path, tmp_path: Path):
    trainer, saved, loaded = (make_trainer(folder) for _ in range(3))
    samples = on_policy_samples(trainer, 24, 33)
    saved.save(tmp_path / "step-000000")
    loaded.load(tmp_path / "step-000000")
    expected = trainer.step(samples)
    assert saved.step(samples) == expected
    assert loaded.step(samples) == expected
    reference = weights(trainer)
    for other in (saved, loaded):
        assert all(torch.equal(tensor, reference[name]) for name, tensor in other.named_tensors())


def test_rejects_missing_incomplete_or_foreign_checkpoints(folder: Path, tmp_path: Path):
    trainer = make_trainer(folder)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        trainer.load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        trainer.load(tmp_path / "empty")
    other = make_trainer(make_tiny_qwen3(tmp_path / "other", vocab_size=64))
    other.save(tmp_path / "step-000000")
    with pytest.raises(CheckpointError, match="could not be read"):
        trainer.load(tmp_path / "step-000000")


def test_rejects_checkpoint_of_another_optimizer(folder: Path, tmp_path: Path):
    trainer = make_trainer(folder)
    trainer.step(on_policy_samples(trainer, 24))
    trainer.save(tmp_path / "step-000001")
    with pytest.raises(CheckpointError, match="could not be read"):
        make_trainer(folder, optimizer="muon").load(tmp_path / "step-000001")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def cut(path: Path, at: int) -> None:
    os.truncate(path, path.stat().st_size + at)


def lose(path: Path, _at: int) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainerCore, Path]:
    """A trainer and a checkpoint of it."""
    trainer = make_trainer(make_tiny_qwen3(tmp_path_factory.mktemp("model")))
    trainer.step(on_policy_samples(trainer, 24))
    path = tmp_path_factory.mktemp("checkpoints") / "step-000001"
    trainer.begin_save(path, {"note.json": '{"step": 1}'})
    trainer.finish_save()
    return trainer, path


@pytest.mark.parametrize(
    ("damage", "file", "at"),
    [
        (flip, "rank-0.safetensors", 300),  # a name in its header
        (flip, "rank-0.safetensors", -200_000),  # the sign or the exponent of a number
        (flip, "state.json", 40),
        (flip, "note.json", 9),
        (flip, "checksums.json", 30),
        (cut, "rank-0.safetensors", -1),
        (cut, "checksums.json", -20),
        (lose, "state.json", 0),
        (lose, "checksums.json", 0),
    ],
)
def test_damaged_file_is_detected_before_anything_is_loaded(
    saved: tuple[TrainerCore, Path], tmp_path: Path, damage: Callable[[Path, int], None], file: str, at: int
):
    trainer, path = saved
    reference = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    copy = tmp_path / path.name
    shutil.copytree(path, copy)
    damage(copy / file, at)
    with pytest.raises(DamagedCheckpointError, match=str(copy)):
        trainer.load(copy)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in trainer.named_tensors())
    trainer.load(path)


class Attack:
    """Creates a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_loading_does_not_execute_pickled_code(saved: tuple[TrainerCore, Path], tmp_path: Path):
    trainer, path = saved
    copy, marker = tmp_path / path.name, tmp_path / "executed"
    shutil.copytree(path, copy)
    (copy / ".metadata").write_bytes(pickle.dumps(Attack(marker)))
    for file in copy.glob("*.safetensors"):
        file.with_suffix(".distcp").write_bytes(pickle.dumps(Attack(marker)))
    trainer.load(copy)
    assert not marker.exists()
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def save_on_a_full_disk(folder: str, target: str, num_bytes: int) -> None:
    """Check that saving and exporting fail if files are limited to `num_bytes`. Runs in a separate process."""
    trainer = make_trainer(Path(folder))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    for write in (trainer.save, trainer.export_hf):
        with pytest.raises(CheckpointError, match="could not be written"):
            write(target)


def test_full_disk_leaves_the_previous_checkpoint_valid(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    folder, target = make_tiny_qwen3(tmp_path_factory.mktemp("model")), tmp_path / "step-000000"
    make_trainer(folder).save(target)
    run_world(save_on_a_full_disk, 1, folder=str(folder), target=str(target), num_bytes=100_000)
    assert os.listdir(tmp_path) == ["step-000000"]
    make_trainer(folder).load(target)


@pytest.mark.parametrize("folder", ["untied", "tied"], indirect=True)
def test_exported_folder_matches_logprobs_in_transformers(folder: Path, tmp_path: Path):
    trainer = make_trainer(folder)
    trainer.step(on_policy_samples(trainer, 24, 33, 8))
    trainer.export_hf(tmp_path / "export")
    load: Any = AutoModelForCausalLM.from_pretrained
    reference, loading = load(tmp_path / "export", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert reference.dtype == torch.float32
    (sequence,) = sequences(40)
    scores = torch.tensor(trainer.score([sequence])[0])
    torch.testing.assert_close(scores, transformers_logprobs(reference, sequence), rtol=0, atol=1e-5)
    again = make_trainer(tmp_path / "export")
    assert again.score([sequence]) == trainer.score([sequence])
    assert (tmp_path / "export" / "chat_template.jinja").is_file()


@pytest.mark.parametrize("folder", ["untied", "tied"], indirect=True)
def test_checkpoint_export_contains_only_the_model(folder: Path, tmp_path: Path):
    trainer = make_trainer(folder, optimizer="muon")
    trainer.step(on_policy_samples(trainer, 24, 33, 8))
    trainer.save(tmp_path / "step-000001")
    export_checkpoint(folder, tmp_path / "step-000001", tmp_path / "policy")
    (sequence,) = sequences(40)
    other = make_trainer(tmp_path / "policy")
    assert other.score([sequence]) == trainer.score([sequence])
    check_export(tmp_path / "policy" / "model.safetensors", other.named_tensors())
    trainer.step(on_policy_samples(trainer, 24, 33, 8))
    with pytest.raises(CheckpointError, match="differs from what was written"):
        check_export(tmp_path / "policy" / "model.safetensors", trainer.named_tensors())
    (tmp_path / "step-000001" / "state.json").write_text("{}")
    with pytest.raises(DamagedCheckpointError):
        export_checkpoint(folder, tmp_path / "step-000001", tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("folder", [pytest.param("untied", marks=in_depth), "tied"], indirect=True)
def test_exported_folder_matches_logprobs_in_vllm(folder: Path, tmp_path: Path):
    from titan_rl.generation.engine import EngineSpec
    from titan_rl.generation.vllm_engine import VLLMEngine

    trainer = make_trainer(folder)
    trainer.step(on_policy_samples(trainer, 24, 33, 8))
    trainer.export_hf(tmp_path / "export")
    engine = VLLMEngine(EngineSpec(str(tmp_path / "export"), max_context=128, kv_cache_gib=0.1))
    try:
        sample = sequences(5, 40, 111)
        for scores, expected in zip(engine.score(sample), trainer.score(sample), strict=True):
            assert scores == pytest.approx(expected, abs=1e-5)
    finally:
        engine.close()
