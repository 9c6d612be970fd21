"""`titan-rl fit`: whether a run fits into the memory of its GPUs, and which settings would make it fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from titan_rl.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "gsm8k" / "qwen3_0_6b.toml")
SMALL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "vocab_size": 32000,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config.json, and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def fit(folder: Path, *words: str) -> int:
    return main(["fit", EXAMPLE, "--model.path", str(folder), *words])


def fit_as_json(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    fit(folder, "--json", *words)
    return json.loads(capsys.readouterr().out)


def test_fitting_run_shows_the_memory_parts_of_each_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(folder, "--gpus", "3", "--memory", "80", "--generation.kv_cache_gib", "none") == 0
    printed = capsys.readouterr()
    assert "GPU 0" in printed.out
    assert "each of GPUs 1 to 2" in printed.out
    for part in ("master weights", "gradients", "optimizer states", "activations", "logits and work space"):
        assert f"trainer  {part}" in printed.out
    assert "engine   KV cache" in printed.out
    assert "fits: 72.0 GiB of 80.0 on each of GPUs 1 to 2" in printed.err, "an engine fills nine tenths"


def test_memory_parts_add_up_to_the_total(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fit_as_json(folder, capsys, "--gpus", "1", "--memory", "80")
    (gpu,) = found["gpus"]
    assert gpu["total"] == sum(gpu["trainer"].values()) + sum(gpu["engines"].values())
    assert found["fits"]
    assert found["savings"] == []


def test_suggested_settings_make_the_run_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--gpus", "2", "--memory", "4.5", "--generation.kv_cache_gib", "1", "--generation.num_generators", "1")
    long = ("--training.row_tokens", "4096", "--training.rows_per_micro_batch", "16")
    found = fit_as_json(folder, capsys, *small, *long)
    assert not found["fits"]
    assert found["fits_with_change"]
    assert any("training.activation_checkpointing" in each["setting"] for each in found["savings"])
    assert all(each["bytes"] > 0 for each in found["savings"])
    pairs = [each.split(" = ") for each in found["change"]]
    options = [word for name, value in pairs for word in (f"--{name}", value.strip('"'))]
    assert fit(folder, *small, *long, *options) == 0
    assert fit(folder, *small, *long) == 1
    assert "does not fit" in capsys.readouterr().err


def test_gpu_too_small_for_any_setting_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(folder, "--gpus", "1", "--memory", "0.5") == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("no settings make it fit")
    assert printed[-1].endswith("use more or larger GPUs")


def test_suggestions_cover_both_engines_and_trainer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps({**SMALL, **wide, "head_dim": 128, "num_hidden_layers": 8}))
    words = ("--gpus", "16", "--memory", "7.5", "--training.data_parallel", "8", "--training.row_tokens", "4096",
             "--training.rows_per_micro_batch", "2", "--generation.num_generators", "2",
             "--generation.kv_cache_gib", "1")  # fmt: skip
    found = fit_as_json(folder, capsys, *words)
    assert not found["fits"]
    assert all(each["total"] > found["limit"] for each in found["gpus"] if each["total"])
    assert found["fits_with_change"], found["change"]
    pairs = [each.split(" = ") for each in found["change"]]
    assert len({name for name, _ in pairs}) == len(pairs), "no setting is named twice"
    options = [word for name, value in pairs for word in (f"--{name}", value.strip('"'))]
    assert fit(folder, *words, *options) == 0


def test_omits_the_settings_list_when_none_saves_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "2", "--memory", "2", "--generation.kv_cache_gib", "0.25", "--generation.num_generators", "1")
    assert fit(folder, *words, "--training.rows_per_micro_batch", "1", "--training.row_tokens", "1024") == 1
    printed = capsys.readouterr().out
    assert "each of these settings" not in printed
    assert "no single setting saves memory on GPU 1" in printed


@pytest.mark.slow
def test_trainer_does_not_take_the_engines_gpus_if_its_own_are_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "scripts" / "model_configs" / "qwen3_8b.json", tmp_path / "config.json")
    words = ("--gpus", "8", "--memory", "80", "--model.max_context", "16384", "--training.row_tokens", "16384",
             "--generation.kv_cache_gib", "none", "--generation.num_generators", "4")  # fmt: skip
    found = fit_as_json(tmp_path, capsys, *words)
    assert found["fits_with_change"]
    assert "training.data_parallel = 4" in found["change"]
    options = [word for each in found["change"] for word in f"--{each}".replace('"', "").split(" = ")]
    fitting = fit_as_json(tmp_path, capsys, *words, *options)
    assert {bool(each["engines"]) for each in fitting["gpus"] if each["trainer"]} == {False}


def test_total_within_the_error_of_the_computation_may_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--gpus", "3", "--generation.kv_cache_gib", "0.25", "--training.row_tokens", "4096",
             "--training.rows_per_micro_batch", "32")  # fmt: skip
    gpu = fit_as_json(folder, capsys, *words, "--memory", "80")["gpus"][0]
    assert gpu["engines"] == {}
    total = gpu["total"] / 2**30
    assert gpu["at_most"] == pytest.approx(1.09 * gpu["total"])
    assert fit(folder, *words, "--memory", f"{total * 1.1:.4f}") == 0
    assert " fits: " in capsys.readouterr().err
    assert fit(folder, *words, "--memory", f"{total * 1.05:.4f}") == 1
    printed = capsys.readouterr()
    assert f"titan-rl: may not fit: {total:.1f} GiB of {total * 1.05:.1f} on GPU 0, and up to 9% more" in printed.err
    assert "each of these settings saves memory on GPU 0" in printed.out
    assert fit(folder, *words, "--memory", f"{total * 0.95:.4f}") == 1
    assert " does not fit: " in capsys.readouterr().err


def test_room_of_the_engines_is_given_in_contexts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = 2 * 2 * 4 * 64 * 2  # keys and values, layers, heads, entries, bytes
    words = ("--gpus", "3", "--memory", "80", "--generation.kv_cache_gib", "1")
    assert fit(folder, *words) == 0
    assert f"engine   KV cache of {2**30 // (token * 1024)} full contexts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    ["[]", "null", *(json.dumps({**SMALL, "model_type": "qwen2", **wrong}) for wrong in (
        {"hidden_size": "64"}, {"num_key_value_heads": 0}, {"num_hidden_layers": -1}, {"hidden_act": "unheard"},
        {"layer_types": ["full_attention"]}, {"model_type": "t5"},
    ))],
)  # fmt: skip
def test_damaged_config_json_is_reported_in_one_sentence(
    folder: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(content)
    assert fit(folder, "--gpus", "1", "--memory", "80") == 2
    printed = [line for line in capsys.readouterr().err.strip().splitlines() if line.startswith("titan-rl: ")]
    assert len(printed) == 1
    assert len(printed[0]) < 500


def test_sleeping_engines_lower_the_total_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "1", "--memory", "80")
    apart = fit_as_json(folder, capsys, *words)["gpus"][0]
    shared = fit_as_json(folder, capsys, *words, "--scheduling.on_batch_ready", "sleep")["gpus"][0]
    assert shared["total"] < apart["total"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "0", "--memory", "80"), "--gpus 0: a run on GPUs needs at least one"),
        (("--gpus", "1", "--memory", "0"), "--memory 0: give the memory of a GPU in GiB, such as 80"),
        (("--gpus", "1", "--memory", "nan"), "--memory nan: give the memory of a GPU"),
        (("--gpus", "1", "--memory", "80", "--training.data_parallel", "2"), "set it to 1 or less"),
        (("--gpus", "1", "--memory", "80", "--model.path", "/nowhere"), "/nowhere has no config.json"),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(
    folder: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(folder, *words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_unknown_model_family_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps({**SMALL, "model_type": "unheard"}))
    assert fit(folder, "--gpus", "1", "--memory", "80") == 2
    assert "unheard" in capsys.readouterr().err


ADAPTERS = """
[[adapters]]
name = "small"
tasks = ["rows"]
training.adapter.rank = 1

[[adapters]]
name = "large"
tasks = ["rows"]
training.adapter.rank = 256
"""


def test_adapters_share_frozen_weights_but_not_optimizer_states(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (several := folder / "several.toml").write_text(ADAPTERS)
    sizes = ("--gpus", "1", "--memory", "80")

    def trainer(*words: str) -> dict[str, int]:
        return fit_as_json(folder, capsys, *sizes, *words)["gpus"][0]["trainer"]

    small, large = (trainer("--training.adapter.rank", rank) for rank in ("1", "256"))
    assert main(["fit", EXAMPLE, str(several), "--model.path", str(folder), *sizes, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["gpus"][0]["trainer"]
    assert both["optimizer states"] == small["optimizer states"] + large["optimizer states"]
    assert large["master weights"] < both["master weights"] < 1.01 * large["master weights"]
    assert both["gradients"] == large["gradients"], "only the adapter that computes has gradients"
    assert both["activations"] == large["activations"]


def test_published_versions_of_adapters_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (several := folder / "several.toml").write_text(ADAPTERS)
    sizes = ("--gpus", "1", "--memory", "80", "--json")
    of_rank_1 = 2 * sum((256 + 512, 256 + 256, 256 + 256, 512 + 256, 256 + 512, 256 + 512, 512 + 256))  # 2 layers
    one = fit_as_json(folder, capsys, *sizes, "--training.adapter.rank", "8")
    assert one["host"]["published versions"] == 2 * 8 * of_rank_1 * 2, "two versions in bfloat16"
    assert main(["fit", EXAMPLE, str(several), "--model.path", str(folder), *sizes]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["host"]["published versions"] == 2 * (1 + 256) * of_rank_1 * 2


def test_engine_adapter_slots_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (several := folder / "several.toml").write_text(ADAPTERS)
    sizes = ("--gpus", "1", "--memory", "80", "--generation.num_generators", "1", "--scheduling.max_staleness", "2")
    of_rank_1 = 2 * sum((256 + 512, 256 + 256, 256 + 256, 512 + 256, 256 + 512, 256 + 512, 512 + 256))  # 2 layers
    one = fit_as_json(folder, capsys, *sizes, "--training.adapter.rank", "12")["gpus"][0]["engines"]
    assert one["engine adapters"] == 16 * of_rank_1 * 2, "vLLM's slots have a rank of 1, 8, 16, ..."
    pinned = ("--generation.adapter_swap", "pinned")
    assert main(["fit", EXAMPLE, str(several), "--model.path", str(folder), *sizes, *pinned, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["gpus"][0]["engines"]
    assert both["engine adapters"] == 2 * (2 + 2) * 256 * of_rank_1 * 2, "each slot has the largest rank"
    assert "engine adapters" not in fit_as_json(folder, capsys, *sizes)["gpus"][0]["engines"]


def test_suggests_only_settings_allowed_with_several_adapters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (several := folder / "several.toml").write_text(ADAPTERS)
    assert main(["fit", EXAMPLE, str(several), "--model.path", str(folder), "--gpus", "4", "--memory", "2"]) == 1
    printed = capsys.readouterr()
    assert "parallel = " not in printed.out + printed.err
