"""Supervised steps match those of plain transformers and torch, and of TRL, on the same conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from transformers import Qwen3ForCausalLM

from titan_rl import ChatTemplateRenderer, Demonstration
from titan_rl.rollout.renderer.tokenizer import load_tokenizer, load_transformers_tokenizer
from titan_rl.training.data.sft_tokens import DemonstrationTokens, encode
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.tiny_model import make_tiny_model
from titan_rl.training.trainer import TrainerCore

LR = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft") / "model"
    make_tiny_model(folder, texts=[], level="byte", parameters=150_000, max_context=256)
    return folder


@pytest.fixture(scope="module")
def conversations(folder: Path) -> list[DemonstrationTokens]:
    """Conversations of one to four turns, which differ in length and in the share of trained tokens."""
    renderer = ChatTemplateRenderer(load_tokenizer(folder))
    found = []
    for number in range(6):
        messages = []
        for turn in range(1, 2 + number % 4):
            messages.append({"role": "user", "content": f"{turn} + {number}?"})
            messages.append({"role": "assistant", "content": "1" * (turn + number)})
        found.append(encode(renderer, Demonstration(messages)))
    return found


def weights(named: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def ours(folder: Path, conversations: list[DemonstrationTokens], steps: int) -> tuple[list[float], float, Any]:
    """The loss of each step, the norm of the first gradient, and the weights after the last."""
    training = TrainingConfig(steps=steps, lr=LR, betas=(0.9, 0.999), loss="nll", row_tokens=512, max_grad_norm=1.0)
    trainer = TrainerCore(ModelConfig(path=str(folder), max_context=256), training, seed=0)
    samples = [tokens.sample(str(number)) for number, tokens in enumerate(conversations)]
    measured = [trainer.measure(samples)]
    norm = 0.0
    for step in range(steps):
        metrics = trainer.step(samples).metrics
        assert metrics["loss"] == pytest.approx(measured[-1], abs=1e-6)
        norm = norm if step else metrics["grad_norm"]
        measured.append(trainer.measure(samples))
    return measured, norm, weights(trainer.named_tensors())


def test_sft_step_matches_transformers_and_torch(folder: Path, conversations: list[DemonstrationTokens]) -> None:
    losses, norm, learned = ours(folder, conversations, steps=2)
    model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(3):
        summed, count = torch.zeros(()), 0
        for tokens in conversations:
            ids, mask = torch.tensor(list(tokens.token_ids)), torch.tensor(list(tokens.loss_mask))
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            summed, count = summed - logprobs[mask[1:]].sum(), count + int(mask.sum())
        loss = summed / count
        assert losses[step] == pytest.approx(loss.item(), abs=1e-5)
        if step == 2:
            break
        optimizer.zero_grad()
        loss.backward()
        theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == 0:
            assert norm == pytest.approx(theirs.item(), rel=1e-4)
        optimizer.step()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(learned[name], tensor.detach(), atol=1e-5, rtol=0)


def test_sft_step_matches_trl_sft_trainer(
    folder: Path, conversations: list[DemonstrationTokens], tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl", reason="needs the dev extra")
    datasets = pytest.importorskip("datasets")
    losses, _, learned = ours(folder, conversations, steps=1)
    seen: list[float] = []

    class Watched(trl.SFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            seen.append(loss.item())
            return loss

    settings = trl.SFTConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(conversations),
        max_steps=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [
        {"input_ids": list(tokens.token_ids), "assistant_masks": [int(learn) for learn in tokens.loss_mask]}
        for tokens in conversations
    ]
    trainer = Watched(
        model=Qwen3ForCausalLM.from_pretrained(folder),
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=load_transformers_tokenizer(folder),
    )
    trainer.train()
    assert seen == [pytest.approx(losses[0], abs=1e-5)]
    for name, tensor in trainer.model.named_parameters():
        torch.testing.assert_close(learned[name], tensor.detach(), atol=1e-5, rtol=0)
