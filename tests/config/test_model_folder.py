from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from user_project import write_tensors

from titan_rl.config.load import load_config
from titan_rl.core.errors import ConfigError, ModelError


def test_folder_is_resolved_in_the_cwd_then_next_to_the_file(project: Path):
    recipes = project / "recipes"
    recipes.mkdir()
    shutil.copy("config.toml", recipes)
    assert load_config("recipes/config.toml").model.path == str(project / "policy")

    shutil.copytree("policy", recipes / "policy")
    assert load_config("recipes/config.toml").model.path == str(project / "policy")

    shutil.rmtree("policy")
    assert load_config("recipes/config.toml").model.path == str(recipes / "policy")


def test_missing_folder_error_explains_how_to_get_one(project: Path):
    message = r"model.path = 'weights/mine' is not a folder here\. .*titan-rl sft --resume RUN.* hf download"
    with pytest.raises(ConfigError, match=message):
        load_config("config.toml", [("model.path", "weights/mine")])


def test_missing_draft_model_is_rejected(project: Path):
    speculative = [("generation.speculative.method", "draft_model"), ("generation.speculative.model", "small")]
    with pytest.raises(ConfigError, match=r"generation.speculative.model = 'small' is not a folder; name"):
        load_config("config.toml", speculative)
    Path("small").mkdir()
    with pytest.raises(ModelError, match=r"small is not a model folder: it has no config.json"):
        load_config("config.toml", speculative)


@pytest.mark.parametrize(
    ("method", "vocab_size", "tensor", "message"),
    [
        ("draft_model", 600, "lm_head", None),
        (
            "draft_model",
            900,
            "lm_head",
            "small' has vocab_size = 900 in its config.json, and the policy 600: .* family",
        ),
        ("eagle", 600, "fc.weight", None),
        ("eagle3", 900, "model.fc.weight", None),  # heads may cover only the most frequent tokens
        ("eagle", 600, "lm_head", 'no tensor fc.weight, which eagle heads have; .*method = "draft_model" if'),
    ],
)
def test_draft_model_must_match_the_policy(
    project: Path, method: str, vocab_size: int, tensor: str, message: str | None
):
    edit_config(vocab_size=600)
    shutil.copytree("policy", "small")
    edit_config("small", vocab_size=vocab_size)
    write_tensors(Path("small/model.safetensors"), tensor)
    speculative = [("generation.speculative.method", method), ("generation.speculative.model", "small")]
    if message is None:
        load_config("config.toml", speculative)
    else:
        with pytest.raises(ConfigError, match=message):
            load_config("config.toml", speculative)


def test_mtp_needs_heads_in_the_policy_config(project: Path):
    heads = [("generation.speculative.method", "mtp")]
    with pytest.raises(ConfigError, match=r'method = "mtp" drafts with heads .* none of num_nextn_predict_layers, '):
        load_config("config.toml", heads)
    edit_config(num_nextn_predict_layers=1)
    load_config("config.toml", heads)


def test_gpu_share_too_small_for_the_weights_is_rejected(project: Path):
    header = {"weight": {"dtype": "F32", "shape": [2**33], "data_offsets": [0, 2**35]}}
    text = json.dumps(header).encode()
    with Path("policy/model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2**35)  # sparse: occupies no disk space

    def load(*overrides: tuple[str, str]) -> None:
        load_config("config.toml", [("generation.kv_cache_gib", "4"), *overrides])

    load(("generation.gpu_share", "0.2"))
    load(("generation.gpu_share", "0.1"), ("generation.tensor_parallel_size", "2"))
    with pytest.raises(ConfigError, match=r"gpu_share = 0.1 is 28.8 GiB of .* 32 GiB of weights .* to 0.12 or"):
        load(("generation.gpu_share", "0.1"))


def edit_config(folder: str = "policy", **values: object) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_missing_files_are_accepted_without_check_files(project: Path):
    config = load_config("config.toml", [("model.path", "weights/mine")], check_files=False)

    assert config.model.path == "weights/mine"


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_missing_file_is_named(project: Path, removed: str, message: str):
    Path("policy", removed).unlink()

    with pytest.raises(ModelError, match=message):
        load_config("config.toml")


POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_git_lfs_pointer_error_names_the_command_that_fetches_the_file(project: Path, name: str):
    Path("policy", name).write_text(POINTER)
    with pytest.raises(ModelError) as raised:
        load_config("config.toml")
    assert f"policy/{name} " in str(raised.value)
    assert "is a pointer of Git LFS, not the file itself; run git lfs pull in" in str(raised.value)


def test_git_lfs_pointer_that_nothing_reads_is_accepted(project: Path):
    Path("policy", "pytorch_model.bin").write_text(POINTER)
    load_config("config.toml")


def test_missing_shard_is_named(project: Path):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    Path("policy/model.safetensors.index.json").write_text(json.dumps(index))
    write_tensors(Path("policy/one.safetensors"), "a")

    with pytest.raises(ModelError, match=r"lacks two.safetensors"):
        load_config("config.toml")
    write_tensors(Path("policy/two.safetensors"), "c")
    with pytest.raises(ModelError, match=r"two.safetensors lacks b, which model.safetensors.index.json names"):
        load_config("config.toml")
    write_tensors(Path("policy/two.safetensors"), "b")
    load_config("config.toml")


def test_truncated_weights_error_names_file_and_sizes(project: Path):
    path = Path("policy/model.safetensors")
    write_tensors(path, "a", "b")
    whole = path.read_bytes()
    load_config("config.toml")
    for content, message in (
        (
            whole[:-1],
            rf"has {len(whole) - 1} bytes, but its header describes {len(whole)}: it is damaged; fetch it again",
        ),
        (whole + b"x", rf"has {len(whole) + 1} bytes, but its header describes {len(whole)}"),
        (whole[:20], "is not a safetensors file, or is cut off: its first 8 bytes are not the length"),
        (b"", "is not a safetensors file, or is cut off: "),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file, or is cut off: "),
        (whole[:8] + whole[9:], "is not a safetensors file, or is cut off: "),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=f"policy/model.safetensors {message}"):
            load_config("config.toml")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_unreadable_config_is_named(project: Path, content: str):
    Path("policy/config.json").write_text(content)

    with pytest.raises(ModelError, match=r"policy/config.json"):
        load_config("config.toml")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 0), ("num_attention_heads", 0), ("hidden_size", "64"), ("max_position_embeddings", "512")],
)
def test_model_size_that_is_not_positive_is_named(project: Path, name: str, value: object):
    config = json.loads(Path("policy/config.json").read_text()) | {name: value}
    Path("policy/config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match=rf"config.json has {name} = {value!r}; it must be an integer of at least 1"):
        load_config("config.toml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.max_context", "600", "model.max_context = 600 is more than the model's 512 positions"),
        # 2 (keys, values) x 2 layers x 2 heads x 16 numbers x 4 bytes x 512 tokens = 256 KiB
        ("generation.kv_cache_gib", "0.0002", "kv_cache_gib = 0.0002 holds less than one context .* needs 0.000244"),
    ],
)
def test_context_settings_beyond_the_model_are_rejected(project: Path, key: str, value: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config("config.toml", [(key, value)])


def test_context_beyond_short_longrope_positions_is_rejected(project: Path):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    config = json.loads(Path("policy/config.json").read_text()) | {"rope_parameters": rope}
    Path("policy/config.json").write_text(json.dumps(config))

    load_config("config.toml", [("model.max_context", "128")])
    with pytest.raises(ConfigError, match=r"max_context = 129 is more than the 128 positions of short sequences"):
        load_config("config.toml", [("model.max_context", "129")])


def test_kv_cache_of_exactly_one_context_is_accepted(project: Path):
    load_config("config.toml", [("generation.kv_cache_gib", str(2**18 / 2**30))])


@pytest.mark.parametrize(
    ("vocabulary", "added", "fits"),
    [({"a": 0, "b": 99}, [], True), ({"a": 0}, [{"id": 100}], False), ([["a", 0.0]] * 101, [], False)],
    ids=["fewer ids than the model", "an added token too many", "a list of tokens"],
)
def test_tokenizer_of_another_model_is_rejected(project: Path, vocabulary: object, added: list[object], fits: bool):
    config = json.loads(Path("policy/config.json").read_text()) | {"vocab_size": 100}
    Path("policy/config.json").write_text(json.dumps(config))
    Path("policy/tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    if fits:
        load_config("config.toml")
        return
    with pytest.raises(ModelError, match=r"tokenizer with token id 100, and the model has 100 tokens"):
        load_config("config.toml")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("generation.tensor_parallel_size", "3", "generation.tensor_parallel_size = 3 does not divide"),
        ("training.tensor_parallel", "3", "training.tensor_parallel = 3 does not divide"),
        ("generation.return_routed_experts", "true", "is not a mixture of experts"),
    ],
)
def test_settings_unsupported_by_the_model_are_rejected(project: Path, setting: str, value: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config("config.toml", [(setting, value)])
