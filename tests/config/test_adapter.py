"""The table [training.adapter]: its defaults, the specs for engines, and incompatible settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from peft_files import BASE, write_adapter

from titan_rl.config.build import learning_rate_note
from titan_rl.config.load import load_config
from titan_rl.config.model_folder import adapter_base_note
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError, ModelError
from titan_rl.generation.engine import AdapterSpec
from titan_rl.run.checks.requirements import checkpoint_bytes
from titan_rl.run.sft.train import supervised
from titan_rl.training.settings import TARGETS, UNSUPPORTED_TARGETS

CPU = "examples/alphabet_sort/cpu.toml"


def load(*overrides: tuple[str, str], rank: int = 8) -> RunConfig:
    return load_config(CPU, [("training.adapter.rank", str(rank)), *overrides], check_files=False)


def test_default_learning_rate_of_adapters_is_ten_times_higher() -> None:
    assert load(rank=0).training.peak_lr == 3e-4
    assert load().training.peak_lr == pytest.approx(3e-3)
    assert load(("training.lr", "1e-4")).training.peak_lr == 1e-4


def test_notes_a_learning_rate_other_than_the_adapter_default() -> None:
    assert learning_rate_note(load(("training.lr", "1e-4"), rank=0).training) is None
    assert learning_rate_note(load().training) is None
    note = learning_rate_note(load(("training.lr", "1e-4")).training)
    assert note is not None
    assert "training.lr = 0.0001 with training.adapter.rank = 8" in note
    assert "by default 0.003" in note


@pytest.mark.parametrize("target", UNSUPPORTED_TARGETS)
def test_unsupported_target_error_names_the_reason(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"targets has '{target}', which is not supported: .*; leave it out"):
        load(("training.adapter.targets", f'["{target}"]'))
    with pytest.raises(ConfigError, match="targets has 'query'; it must name layers among q_proj, k_proj"):
        load(("training.adapter.targets", '["query"]'))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ([("scheduling.on_batch_ready", "sleep")], "an engine that sleeps discards the base model"),
        ([("generation.speculative.method", "ngram")], "drafts would be generated or verified without the adapter"),
        ([("training.adapter.rank", "1024")], "rank = 1024 is more than the 512 that vLLM supports"),
        ([("training.kl_coef", "0.1"), ("training.offload", '["reference"]')], "has no weights of its own"),
        ([("training.kl_coef", "0.1"), ("training.reference_interval", "9")], "leave reference_interval out"),
        ([("generation.vllm", "{max_loras = 2}")], "max_loras is set by titan_rl"),
        ([("generation.adapter_swap", "pinned"), ("scheduling.oversample", "0.5")], "scheduling.oversample = 0.5"),
        ([("generation.adapter_swap", "pinned"), ("generation.pull_mode", "drain")], "leave pull_mode out"),
        (
            [("training.adapter.rank", "0"), ("generation.adapter_swap", "pinned")],
            'adapter_swap = "pinned" has no effect',
        ),
    ],
)
def test_settings_incompatible_with_an_adapter_are_rejected(overrides: list[tuple[str, str]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(*overrides)


def test_engine_without_adapter_support_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_engine.py").write_text("def make(spec): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"training.adapter.rank = 8, and .* does not apply adapters; set it to 0"):
        load(("generation.engine", "plain_engine:make"))


def test_pinned_swap_holds_staleness_plus_two_versions() -> None:
    pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
    from titan_rl.cluster.generator_actor import adapter_specs

    assert adapter_specs(load(rank=0)) == {}
    assert adapter_specs(load()) == {"": AdapterSpec(8, 32.0, TARGETS, num_versions=1)}
    pinned = load(("generation.adapter_swap", "pinned"), ("scheduling.max_staleness", "3"))
    assert adapter_specs(pinned) == {"": AdapterSpec(8, 32.0, TARGETS, num_versions=5)}


def test_pinned_swap_validates_beside_training_with_one_more_version() -> None:
    from titan_rl.cluster.generator_actor import adapter_specs

    pinned, validates = ("generation.adapter_swap", "pinned"), ("validation.interval", "5")
    for config in (load(pinned), load(validates), load(pinned, validates, ("validation.beside_training", "false"))):
        assert not config.validates_beside_training
    config = load(pinned, validates, ("scheduling.max_staleness", "3"))
    assert config.validates_beside_training
    assert adapter_specs(config)[""] == AdapterSpec(8, 32.0, TARGETS, num_versions=6)
    held = load(validates, ("validation.beside_training", "true"))
    assert held.validates_beside_training
    assert adapter_specs(held)[""] == AdapterSpec(8, 32.0, TARGETS, num_versions=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("generation.num_generators", "1")], "set num_generators to at least 2"),
        ([("generation.num_generators_range", "[2, 4]")], "set num_generators to at least 3"),
        ([("scheduling.on_batch_ready", "keep")], 'set on_batch_ready = "continue"'),
        ([("validation.interval", "0")], "no validation runs between steps; set interval, or leave it out"),
    ],
)
def test_validation_beside_training_errors_name_the_fix(overrides: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(("validation.interval", "5"), ("validation.beside_training", "true"), *overrides)
    assert message in str(raised.value)


def test_start_folder_is_resolved_next_to_the_file(tmp_path: Path) -> None:
    shutil.copy(CPU, tmp_path / "mine.toml")
    (tmp_path / "adapter").mkdir()
    overrides = [("training.adapter.rank", "1"), ("pythonpath", f'["{Path.cwd()}"]')]
    text = (tmp_path / "mine.toml").read_text().replace("[training]\n", '[training]\nadapter.start = "adapter"\n')
    (tmp_path / "mine.toml").write_text(text)
    config = load_config(tmp_path / "mine.toml", overrides, check_files=False)
    assert config.training.adapter.start == str(tmp_path / "adapter")


def test_start_folder_is_checked_on_load(tmp_path: Path) -> None:
    def load_with(start: Path) -> RunConfig:
        settings = [("training.adapter.rank", "2"), ("training.adapter.start", str(start))]
        return load_config(CPU, settings)

    with pytest.raises(ConfigError, match=r"training.adapter.start = '.*nowhere' is not a folder here"):
        load_with(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no adapter_config.json; name a folder that titan-rl export --adapter"):
        load_with(tmp_path)
    for base, is_noted in (("Qwen/Qwen3-0.6B", False), (str(BASE), False), (str(tmp_path), True)):
        folder = write_adapter(tmp_path / f"adapter-{is_noted}-{len(base)}", base_model_name_or_path=base)
        config = load_with(folder)
        note = adapter_base_note(config.model, config.training.adapter)
        assert (note is not None) == is_noted
        assert note is None or f"was trained on {tmp_path}, whose weights are not those of model.path" in note


@pytest.mark.parametrize(
    ("model", "base", "is_noted"),
    [
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B", False),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base", True),
        ("qwen3_1.7b", "Qwen/Qwen3-0.6B", True),
        ("models--Qwen--Qwen3-0.6B/snapshots/1a2b", "Qwen/Qwen3-0.6B", False),
        ("models--Qwen--Qwen3-0.6B/snapshots/1a2b", "Qwen/Qwen3-0.6B-Base", True),
        ("policy", "Qwen/Qwen3-0.6B-Base", False),  # the name tells nothing
    ],
)
def test_adapter_of_another_published_model_is_noted(tmp_path: Path, model: str, base: str, is_noted: bool) -> None:
    shutil.copytree(BASE, tmp_path / model)
    folder = write_adapter(tmp_path / "adapter", base_model_name_or_path=base)
    settings = {"model.path": tmp_path / model, "training.adapter.rank": 2, "training.adapter.start": folder}
    config = load_config(CPU, [(key, str(value)) for key, value in settings.items()])
    note = adapter_base_note(config.model, config.training.adapter)
    assert (note is not None) == is_noted
    assert note is None or f"was trained on {base}, and model.path = '{tmp_path / model}' has another name" in note


def test_checkpoint_size_is_that_of_the_adapter() -> None:
    layer = (128 + 128) + 2 * (128 + 64) + (128 + 128) + 3 * (128 + 384)
    assert checkpoint_bytes(load(rank=1)) == 4 * layer * 12


def test_sft_uses_an_adapter_only_with_a_given_model() -> None:
    config = load(("sft.start", "examples/alphabet_sort/base"))
    assert supervised(config, config.model, 10).training.adapter.is_on
    assert not supervised(load(), config.model, 10).training.adapter.is_on
