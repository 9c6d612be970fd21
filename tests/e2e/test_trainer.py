"""The trainer on a real torchtitan model, compared with transformers and with other settings of itself."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import make_tiny_qwen3, make_trainer, on_policy_samples, sequences, transformers_logprobs, weights
from transformers import AutoModelForCausalLM

from titan_rl.core.errors import CheckpointError, ModelError, TrainingError, UntrainableError
from titan_rl.training.attention.flex_attention import BlockLayout
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


def test_scores_match_transformers(folder: Path):
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sample = sequences(2, 5, 40, 111)
    for sequence, scores in zip(sample, make_trainer(folder).score(sample), strict=True):
        torch.testing.assert_close(torch.tensor(scores), transformers_logprobs(reference, sequence), rtol=0, atol=1e-5)
    assert make_trainer(folder).score([[], [3, 4], [3]])[::2] == [[], []]
    assert make_trainer(folder).score([[]]) == [[]]


def test_published_names_and_values_match_the_folder(folder: Path):
    published, original = weights(make_trainer(folder)), load_file(folder / "model.safetensors")
    assert published.keys() == original.keys()
    assert all(torch.equal(published[name], original[name]) for name in original)


def test_packed_rows_match_separate_passes(untied: Path):
    """The loss of a packed step equals the one computed from transformers' logprobs, one sequence at a time."""
    trainer = make_trainer(untied, row_tokens=64)
    lengths, temperature = (30, 20, 14, 40, 9), 0.7
    samples = on_policy_samples(trainer, *lengths, temperature=temperature)
    reference = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    samples = [
        replace(sample, behaviour_logprobs=[0.0, *transformers_logprobs(reference, sample.token_ids, 0.7).tolist()])
        for sample in samples
    ]
    metrics = trainer.step(samples).metrics
    assert metrics["on_policy_logprob_diff_max"] < 1e-5
    assert metrics["clip_fraction"] == 0
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    trained = [(sample.num_trained_tokens, sample.advantages[-1]) for sample in samples]
    assert metrics["num_tokens"] == sum(count for count, _ in trained)
    assert metrics["loss"] == pytest.approx(-sum(n * a for n, a in trained) / sum(n for n, _ in trained), abs=1e-6)


def test_each_token_is_scored_at_its_own_temperature(untied: Path):
    """Includes a sample whose turns differ in temperature, and samples that share a prompt."""
    trainer = make_trainer(untied, row_tokens=128, share_prompts=True)
    (base,) = on_policy_samples(trainer, 24)
    reference = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    at = {t: transformers_logprobs(reference, base.token_ids, t).tolist() for t in (0.5, 1.0, 1.7)}
    mixed = [0.0] * 12 + [0.5] * 6 + [1.7] * 6

    def sampled_at(temperature: float | list[float]) -> TrainingSample:
        by_token = temperature if isinstance(temperature, list) else [temperature] * 24
        logprobs = [at[by_token[t]][t - 1] if base.loss_mask[t] else 0.0 for t in range(24)]
        return replace(base, behaviour_logprobs=logprobs, temperature=temperature)

    metrics = trainer.step([sampled_at(temperature) for temperature in (0.5, mixed, 1.0, 1.7)]).metrics
    assert metrics["on_policy_logprob_diff_max"] < 1e-5
    assert metrics["num_tokens"] == 4 * 12


def test_micro_batch_size_does_not_change_the_step(untied: Path):
    results: list[tuple[float, dict[str, torch.Tensor]]] = []
    for row_tokens, rows in ((256, 8), (64, 8), (64, 1)):
        trainer = make_trainer(untied, row_tokens=row_tokens, rows_per_micro_batch=rows, lr=1e-4)
        metrics = trainer.step(on_policy_samples(trainer, 50, 20, 33, 41, 64, 12)).metrics
        results.append((metrics["grad_norm"], weights(trainer)))
    for grad_norm, tensors in results[1:]:
        assert grad_norm == pytest.approx(results[0][0], rel=1e-5)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=2e-6)


def test_threaded_micro_batches_are_bitwise_identical(folder: Path):
    made: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []
    for num_threads in (1, 3):
        trainer = make_trainer(folder, num_threads=num_threads, row_tokens=64, rows_per_micro_batch=1, kl_coef=0.1)
        samples = on_policy_samples(trainer, 50, 20, 33, 41, 64, 12)
        made.append(([trainer.step(samples).metrics for _ in range(2)][-1], weights(trainer)))
    (one_by_one, expected), (at_once, found) = made
    assert at_once == one_by_one
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Failing:
    """An objective that raises."""

    def __init__(self, objective: Any) -> None:
        self._objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, *args: Any, **given: Any) -> Any:
        raise IndexError("nothing is computed")


def test_micro_batch_error_leaves_the_trainer_unchanged(untied: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(untied, num_threads=3, row_tokens=64, rows_per_micro_batch=1)
    samples, before = on_policy_samples(trainer, 50, 41, 64), weights(trainer)
    objective = trainer._gradient_pass._objective
    monkeypatch.setattr(trainer._gradient_pass, "_objective", Failing(objective))
    with pytest.raises(IndexError, match="nothing is computed"):
        trainer.step(samples)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    monkeypatch.setattr(trainer._gradient_pass, "_objective", objective)
    assert trainer.step(samples).version == 1


def test_sharing_prompts_does_not_change_the_step(untied: Path):
    """Two groups of siblings with a prompt of 30 tokens each, and one separate sample."""
    results: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []
    for share_prompts in (False, True):
        trainer = make_trainer(untied, share_prompts=share_prompts, row_tokens=128, lr=1e-4)
        samples: list[TrainingSample] = []
        for group, prompt in enumerate(sequences(30, 30)):
            for sibling, answer in enumerate(sequences(5, 12, 1, 9)):
                ids = [*prompt, *answer]
                logprobs = [0.0, *trainer.score([ids])[0]]
                trained = [False] * 30 + [True] * len(answer)
                samples.append(
                    TrainingSample(
                        group_id=f"g{group}",
                        rollout_id=f"g{group}/{sibling}",
                        token_ids=ids,
                        loss_mask=trained,
                        behaviour_logprobs=[p if own else 0.0 for p, own in zip(logprobs, trained, strict=True)],
                        advantages=[(-1.0) ** sibling if own else 0.0 for own in trained],
                        versions=[0 if own else -1 for own in trained],
                        temperature=1.0,
                    )
                )
        samples += on_policy_samples(trainer, 40)
        metrics = trainer.step(samples).metrics
        assert metrics["on_policy_logprob_diff_max"] < 1e-5
        results.append((metrics, weights(trainer)))
    (alone, expected), (shared, found) = results
    assert shared["num_tokens"] == alone["num_tokens"]
    assert shared["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flex_attention_makes_the_same_step(untied: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch):
    """Siblings that share a prompt, and one separate sample, in several micro-batches."""
    num_attended = 0

    def attend(layout: BlockLayout, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_attended
        num_attended += 1
        return unpatched(layout, *args, **kwargs)

    unpatched = BlockLayout.attend
    monkeypatch.setattr(BlockLayout, "attend", attend)
    results: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []
    scores: list[torch.Tensor] = []
    for attention in ("document", "flex"):
        training = TrainingConfig(steps=10, lr=1e-4, attention=attention, row_tokens=128, rows_per_micro_batch=1)
        trainer = TrainerCore(ModelConfig(path=str(untied), dtype=dtype), training, seed=0)
        samples = [
            TrainingSample(
                group_id="g",
                rollout_id=f"g/{sibling}",
                token_ids=[*prompt, *answer],
                loss_mask=[False] * 30 + [True] * len(answer),
                behaviour_logprobs=[-3.0] * (30 + len(answer)),
                advantages=[(-1.0) ** sibling] * (30 + len(answer)),
                versions=[0] * (30 + len(answer)),
                temperature=1.0,
            )
            for prompt in sequences(30)
            for sibling, answer in enumerate(sequences(5, 12, 1, 9))
        ]
        samples += [replace(sample, group_id="h") for sample in on_policy_samples(trainer, 80)]
        assert (num_attended > 0) == (attention == "flex")  # already used for scoring
        results.append((trainer.step(samples).metrics, weights(trainer)))
        scores.append(torch.tensor(trainer.score(sequences(20, 40))[1]))
    (document, expected), (flex, found) = results
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=10 * tolerance)
    assert flex["num_tokens"] == document["num_tokens"]
    assert flex["loss"] == pytest.approx(document["loss"], abs=tolerance)
    assert flex["grad_norm"] == pytest.approx(document["grad_norm"], rel=tolerance)
    if dtype == "float32":
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=5e-6)


def test_rewarded_completions_become_likely(untied: Path):
    trainer = make_trainer(untied, steps=30, lr=3e-3)
    (sample,) = on_policy_samples(trainer, 24)
    before = trainer.score([sample.token_ids])[0][12:]
    for step in range(30):
        scores = [0.0, *trainer.score([sample.token_ids])[0]]
        sample = replace(sample, behaviour_logprobs=scores)
        assert trainer.step([sample]).version == step + 1 == trainer.version
    after = trainer.score([sample.token_ids])[0][12:]
    assert sum(before) / len(before) < -3
    assert sum(after) / len(after) > -0.5


def test_nonfinite_behaviour_logprob_removes_only_its_token(untied: Path):
    trainer, other = make_trainer(untied), make_trainer(untied)
    (sample,) = on_policy_samples(trainer, 24)
    broken = replace(sample, behaviour_logprobs=[*sample.behaviour_logprobs[:-1], math.nan])
    masked = replace(sample, loss_mask=[*sample.loss_mask[:-1], False])
    metrics = trainer.step([broken]).metrics
    assert metrics["num_nonfinite_tokens"] == 1
    assert metrics["num_tokens"] == other.step([masked]).metrics["num_tokens"]
    expected = weights(other)
    for name, tensor in weights(trainer).items():
        # AdamW's first step normalizes gradients and amplifies their rounding; a wrong one moves a weight by `lr`.
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": [math.nan] * 24}, "loss nan"),
        ({"behaviour_logprobs": [math.nan] * 24}, "token to train on"),
        ({"loss_mask": [False] * 24}, "token to train on"),
        ({"token_ids": [128] * 24}, "token id 128"),
    ],
)
def test_failed_step_changes_nothing(untied: Path, change: dict[str, Any], message: str):
    trainer = make_trainer(untied)
    samples = on_policy_samples(trainer, 24)
    before = weights(trainer)
    with pytest.raises(TrainingError, match=message):
        trainer.step([replace(samples[0], **change)])
    assert trainer.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.named_tensors())
    assert trainer.step(samples).version == 1


def test_rejects_saving_a_partially_applied_step(untied: Path, tmp_path: Path):
    trainer = make_trainer(untied, minibatches=2)
    trainer.save(tmp_path / "step-000000")
    before = weights(trainer)
    first, second = on_policy_samples(trainer, 24, 24)
    untrainable = replace(second, group_id="other", behaviour_logprobs=[math.nan] * 24)
    with pytest.raises(TrainingError, match="none of 1 samples has a token to train on"):
        trainer.step([first, untrainable])
    assert trainer.version == 0
    assert not all(torch.equal(before[name], tensor) for name, tensor in trainer.named_tensors())
    with pytest.raises(CheckpointError, match="step 1 failed after some of its minibatches"):
        trainer.save(tmp_path / "step-000000")
    trainer.load(tmp_path / "step-000000")
    assert trainer.step([first, replace(second, group_id="other")]).version == 1
    trainer.save(tmp_path / "step-000001")


POISON: dict[str, dict[str, Any]] = {
    "loss": {"advantages": [math.nan] * 24},
    "gradient": {"advantages": [0.0] * 12 + [3e38, -3e38] * 6},
    "no trained token": {"loss_mask": [False] * 24},
    "token outside the vocabulary": {"token_ids": [128] * 24},
}


@pytest.mark.parametrize("poison", POISON)
def test_skipped_step_bumps_version_and_names_its_rollouts(untied: Path, poison: str):
    trainer, other = make_trainer(untied), make_trainer(untied)
    samples = on_policy_samples(trainer, 24)
    poisonous = replace(samples[0], rollout_id="g/poison", **POISON[poison])
    before = weights(trainer)
    result = trainer.step([poisonous], skip=True)
    assert (result.version, result.metrics["num_tokens"], "loss" in result.metrics) == (1, 0, False)
    assert [part.rollout_ids for part in result.skipped] == [("g/poison",)]
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.named_tensors())
    trainer.step(samples)
    other.step(samples)
    assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in trainer.named_tensors())


def test_only_the_untrainable_minibatch_is_skipped(untied: Path, tmp_path: Path):
    trainer = make_trainer(untied, minibatches=2, rows_per_micro_batch=1, row_tokens=32)
    first, *second = on_policy_samples(trainer, 24, 24, 24)
    second = [replace(sample, group_id="other") for sample in second]
    second[1] = replace(second[1], advantages=[math.nan] * 24)
    result = trainer.step([first, *second], skip=True)
    (part,) = result.skipped
    assert (part.rollout_ids, part.at_fault) == (("g/1", "g/2"), ("g/2",))
    assert result.metrics["num_tokens"] == first.num_trained_tokens
    assert math.isfinite(result.metrics["loss"])
    trainer.save(tmp_path / "step-000001")  # the weights form a valid version
    with pytest.raises(UntrainableError, match=r"loss nan.*; rollouts: g/2$") as caught:
        trainer.step(second)
    assert pickle.loads(pickle.dumps(caught.value)).at_fault == ("g/2",)


def test_oversized_sample_is_dropped_and_counted(untied: Path):
    trainer = make_trainer(untied, row_tokens=32)
    samples = on_policy_samples(trainer, 24, 40)
    metrics = trainer.step(samples).metrics
    assert (metrics["num_samples"], metrics["num_dropped_samples"]) == (1, 1)
    with pytest.raises(TrainingError, match=r"training\.row_tokens"):
        trainer.step(samples[1:])
    with pytest.raises(TrainingError):
        trainer.step([])


def test_bfloat16_model_publishes_bfloat16_and_trains_in_float32(untied: Path):
    trainer = TrainerCore(ModelConfig(path=str(untied), dtype="bfloat16"), TrainingConfig(steps=1, lr=1e-5), seed=0)
    assert {tensor.dtype for _, tensor in trainer.named_tensors()} == {torch.bfloat16}
    samples = on_policy_samples(trainer, 24, 30)
    assert trainer.step(samples).metrics["on_policy_logprob_diff_max"] < 0.1


def broken_folder(source: Path, folder: Path, config: dict[str, Any], drop: str = "", grow: str = "") -> Path:
    folder.mkdir()
    values = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: v for key, v in values.items() if v is not None}))
    tensors = load_file(source / "model.safetensors")
    if drop:
        del tensors[drop]
    if grow:
        tensors[grow] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config": {"model_type": "rwkv"}},
            "model_type 'rwkv' is refused: its blocks pass a state from token to token",
        ),
        ({"config": {"hidden_size": None}}, "lacks 'hidden_size'"),
        ({"config": {"max_position_embeddings": 64}}, "max_position_embeddings 64"),
        ({"config": {"intermediate_size": 96}}, r"mlp\.\w+_proj\.weight' in .* has shape"),
        ({"config": {}, "drop": "model.norm.weight"}, r"lack 'model\.norm\.weight'"),
        ({"config": {}, "grow": "model.extra.weight"}, r"'model\.extra\.weight', which config\.json does not"),
        ({"config": {}, "grow": "lm_head.weight"}, r"'lm_head\.weight' in .* has shape \(3, 3\)"),
    ],
)
def test_inconsistent_model_folder_error_names_the_problem(
    untied: Path, tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(ModelError, match=message):
        make_trainer(broken_folder(untied, tmp_path / "model", **changes))


def test_rejects_folder_with_missing_or_damaged_files(untied: Path, tmp_path: Path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        make_trainer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        make_trainer(tmp_path)
    (tmp_path / "config.json").write_bytes((untied / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        make_trainer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((untied / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ModelError, match="cannot be read"):
        make_trainer(tmp_path)
