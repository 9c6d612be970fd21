"""Checks of the folders of models and adapters without loading them: files, numbers in config.json, a draft model."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.config.model_files import check_weights, read_json, tensor_shapes
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig, SpeculativeConfig
from titan_rl.core.errors import ConfigError, ModelError
from titan_rl.core.files import lfs_problem
from titan_rl.core.model_identity import (
    CONFIG_FILES,
    TEMPLATE_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    model_identity,
    read_header,
)
from titan_rl.generation.gpu_share import adapted_width, planned_kv_gib
from titan_rl.training.models.families import (
    EXPERT_COUNTS,
    check_numbers,
    choose_implementation,
    is_longrope,
    longest_context,
)
from titan_rl.training.models.peft_settings import WEIGHTS, check_same_settings, hf_name, read_adapter_config
from titan_rl.training.settings import MADE_BY_SFT, TARGETS, AdapterConfig, ModelConfig

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files that contain a vocabulary; one of them is enough."""

BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30

START_S = 180.0
READ_BYTES_PER_S = 100e6
"""Rate at which a process is expected to load weights, in addition to the `START_S` seconds: that of a slow network
disk."""

LARGEST_GPU_GIB = 288
"""Memory of the largest GPU on the market. Smaller GPUs are checked on the machine that has them."""


def find_model_folder(path: str, folders: Sequence[Path]) -> Path | None:
    """Find the folder `path` in the first of several folders that has it. Return an absolute path, or None if no place
    has it."""
    found = (folder / os.path.expanduser(path) for folder in folders)
    return next((each.resolve() for each in found if each.is_dir()), None)


def describe_folders(folders: Sequence[Path]) -> str:
    """Describe the searched folders, the first of which must be the current one: `here or in /home/ada/sums`."""
    others = dict.fromkeys(str(folder) for folder in folders[1:] if folder.resolve() != Path.cwd())
    return " or in ".join(["here", *others])


def check_model_folder(model: ModelConfig, generation: GenerationConfig, folders: Sequence[Path]) -> None:
    """Check that the policy's folder can be loaded, and that generators with these settings can run the model.

    Args:
        folders: Folders in which the model's folder is searched.

    Raises:
        ModelError: A file is missing or unreadable, or config.json contradicts itself.
        ConfigError: The model's folder or a draft model's folder does not exist, or a setting does not fit the model.
    """
    path = model.path
    folder = find_model_folder(path, folders)
    if folder is None:
        raise ConfigError(
            f"model.path = {path!r} is not a folder {describe_folders(folders)}. Run titan-rl sft first, which "
            "trains it on the task's demonstrations, if there are any; titan-rl sft --resume RUN continues a run that "
            "was stopped. Or name the folder of an existing model, such as one fetched with hf download "
            "ORGANIZATION/NAME --local-dir FOLDER"
        )
    _check_fetched(folder)
    architecture = read_json(folder, "config.json")
    check_numbers(architecture)
    check_weights(folder)
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise ModelError(f"model.path = {path!r} has no tokenizer: none of {', '.join(VOCABULARY_FILES)} exists")
    _check_vocabulary(folder, architecture)
    check_speculative(generation.speculative, architecture)
    _check_fit(model, generation, architecture)
    _check_share(folder, model, generation)


def _check_fetched(folder: Path) -> None:
    """Check that no file of a model, apart from its weights, is a pointer of Git LFS."""
    for name in (*CONFIG_FILES, *TOKENIZER_FILES, TOKENIZER_CONFIG, *TEMPLATE_FILES):
        for path in folder.glob(name):
            if path.is_file() and (problem := lfs_problem(path)):
                raise ModelError(f"{path} {problem}")


def count_parameters(folder: Path) -> int:
    """Count a model's parameters by the headers of its safetensors files; 0 if a file is not readable."""
    try:
        return sum(map(math.prod, tensor_shapes(folder).values()))
    except ModelError:  # loading the model reports what is wrong with it
        return 0


def count_adapter(folder: Path, adapter: AdapterConfig) -> int:
    """Count the parameters of an adapter for a model: rank x (in + out) for each target; 0 if a file is not
    readable."""
    try:
        return adapter.rank * adapted_width(tensor_shapes(folder), adapter.targets or TARGETS)
    except ModelError:
        return 0


def check_adapter_start(config: RunConfig, folders: Sequence[Path]) -> None:
    """Check the folder of each `training.adapter.start`: its files, its settings, and its layers against the model,
    whose folder has been checked.

    Raises:
        ConfigError: The folder does not exist.
        ModelError: The folder has no adapter, a damaged one, or one for another model or with another rank, alpha or
            other layers.
    """
    for key, adapter in adapters_of(config).items():
        if adapter.start is None:
            continue
        where = f"{key}.start = {adapter.start!r}"
        if (folder := find_model_folder(adapter.start, folders)) is None:
            raise ConfigError(
                f"{where} is not a folder {describe_folders(folders)}; name a folder that titan-rl export --adapter or "
                "PEFT has written"
            )
        check_same_settings(read_adapter_config(folder, where), adapter, where)
        check_adapter_weights(folder, Path(config.model.path), adapter.rank, where, adapter)


def check_adapter_weights(folder: Path, model: Path, rank: int, where: str, trained: AdapterConfig | None) -> None:
    """Check the names and shapes of an adapter's matrices against the layers of a model.

    Args:
        model: Hugging Face folder of the base model, which has been checked.
        rank: Rank of the adapter.
        where: Beginning of error messages, such as the setting that names the folder.
        trained: Settings with which the adapter is trained further; it must then have exactly the layers that they
            name. None if it is not trained.

    Raises:
        ModelError: The file with the matrices is missing or damaged, or its matrices do not fit the model.
    """
    try:
        header = read_header(folder / WEIGHTS)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    found = {hf_name(name): tuple(shape) for name, (shape, _) in header.items()}
    base = tensor_shapes(model)
    for name, shape in found.items():
        layer, _, half = name.rpartition(".lora_")
        weight = base.get(f"{layer}.weight", ())
        if half not in ("A.weight", "B.weight") or len(weight) != 2:
            raise ModelError(f"{where} has {name}, and {model} has no such layer; is it an adapter of another model?")
        expected = (rank, weight[1]) if half == "A.weight" else (weight[0], rank)
        if shape != expected:
            raise ModelError(
                f"{where}: {name} has shape {shape}, and a layer of {model} needs {expected}; is it an adapter of "
                "another model?"
            )
    layers = Counter(name.rpartition(".lora_")[0] for name in found)
    if torn := next((layer for layer, count in layers.items() if count == 1), None):
        raise ModelError(f"{where} has only one of the two matrices of {torn}; export the adapter again")
    if trained is not None:
        _check_layers(set(layers), base, trained, where)


def _check_layers(layers: set[str], base: Mapping[str, Any], trained: AdapterConfig, where: str) -> None:
    targets = trained.targets or TARGETS
    if strange := sorted(layer for layer in layers if layer.rpartition(".")[2] not in targets):
        raise ModelError(
            f"{where} has {strange[0]} and {len(strange) - 1} more, which training.adapter.targets does not name; set "
            "targets to the layers of the folder"
        )
    needed = {name.removesuffix(".weight") for name in base if name.endswith(".weight") and "expert" not in name}
    missing = sorted(layer for layer in needed - layers if layer.rpartition(".")[2] in targets)
    if missing:
        raise ModelError(
            f"{where} lacks {missing[0]} and {len(missing) - 1} more; set training.adapter.targets to the layers of "
            "the folder, or export the adapter again"
        )


def adapters_of(config: RunConfig) -> dict[str, AdapterConfig]:
    """Return the settings of a run's adapters, by the names of their tables; empty if all weights are trained."""
    adapters = {f"adapters.{name}.training.adapter": each.training.adapter for name, each in config.experiments.items()}
    adapters = adapters or {"training.adapter": config.training.adapter}
    return {key: adapter for key, adapter in adapters.items() if adapter.is_on}


def adapter_base_note(model: ModelConfig, adapter: AdapterConfig) -> str | None:
    """Return a note if the adapter to start from was trained on another model: one with other weights, if it is on this
    machine, or one whose published name differs from that of the model's folder."""
    if adapter.start is None:
        return None
    with contextlib.suppress(ModelError, OSError):
        given = read_json(Path(adapter.start), "adapter_config.json").get("base_model_name_or_path")
        if not isinstance(given, str):
            return None
        base = model_identity(Path(given))
        if not base and _has_other_name(Path(model.path), given):
            return (
                f"training.adapter.start = {adapter.start!r} was trained on {given}, and model.path = {model.path!r} "
                "has another name; set it to that model"
            )
        if base and base["weights"] != model_identity(Path(model.path))["weights"]:
            return (
                f"training.adapter.start = {adapter.start!r} was trained on {given}, whose weights are not those of "
                f"model.path = {model.path!r}"
            )
    return None


def tiny_model_note(config: RunConfig) -> str | None:
    """Return a note if `titan-rl sft` made the policy with another tiny model than the settings describe; None if it
    did not, or if they describe none."""
    folder = Path(config.model.path)
    if config.sft.start or not (folder / MADE_BY_SFT).is_file():
        return None
    with contextlib.suppress(ModelError, KeyError, TypeError):
        made = read_json(folder, MADE_BY_SFT)["settings"]["tiny_model"]
        for name in config.sft.tiny_model.model_fields_set:
            if made[name] != (given := getattr(config.sft.tiny_model, name)):
                return (
                    f"model.path = {config.model.path!r} was made with sft.tiny_model.{name} = {made[name]!r}, and it "
                    f"is {given!r} now; run titan-rl sft again, or restore the setting"
                )
    return None


def _has_other_name(folder: Path, published: str) -> bool:
    """Whether a folder has the name of another model of a published model's family. A folder of the Hugging Face cache
    is below `models--ORGANIZATION--NAME`."""
    name = published.rpartition("/")[2].lower()
    family = re.split(r"[-_.]", name)[0]
    parts = [part.rpartition("--")[2].lower() for part in folder.parts[-3:]]
    return name not in parts and any(part.startswith(family) for part in parts)


def _check_vocabulary(folder: Path, architecture: dict[str, Any]) -> None:
    """Check that the tokenizer has no more ids than the model. It may have fewer, because embeddings are often
    padded."""
    if not (folder / "tokenizer.json").is_file() or "vocab_size" not in architecture:
        return
    tokenizer = read_json(folder, "tokenizer.json")
    vocabulary: Any = tokenizer.get("model", {}).get("vocab", ())
    ids: list[int] = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    ids += [token["id"] for token in tokenizer.get("added_tokens", ())]
    if ids and max(ids) >= architecture["vocab_size"]:
        raise ModelError(
            f"{folder} has a tokenizer with token id {max(ids)}, and the model has {architecture['vocab_size']} "
            "tokens (vocab_size in config.json); they belong to different models"
        )


def check_chat_template(model: ModelConfig) -> None:
    """Check that the model's folder has the chat template that the renderer needs.

    Raises:
        ModelError: The folder has no chat template.
    """
    if model.renderer not in ("auto", "chat_template"):
        return
    folder = Path(model.path)
    if any(any(folder.glob(pattern)) for pattern in TEMPLATE_FILES):
        return
    if not (folder / TOKENIZER_CONFIG).is_file() or not read_json(folder, TOKENIZER_CONFIG).get("chat_template"):
        raise ModelError(
            f"model.path = {model.path!r} has no chat template, and model.renderer = {model.renderer!r} needs one; add "
            "a chat_template.jinja to it, such as that of the chat-tuned variant of the model"
        )


def check_training_fit(config: RunConfig) -> None:
    """Check that the trainer's ranks can share the model, whose folder has been checked.

    Raises:
        ConfigError: The ranks cannot share the model. The message names the setting, its value and the fix.
        ModelError: No implementation can train the model.
    """
    architecture = read_json(Path(config.model.path), "config.json")
    kv_heads = architecture.get("num_key_value_heads") or architecture.get("num_attention_heads")
    ranks = config.training.tensor_parallel
    if kv_heads is not None and kv_heads % ranks:
        raise ConfigError(
            f"training.tensor_parallel = {ranks} does not divide the model's {kv_heads} key-value heads; choose one "
            "that does"
        )
    if "model_type" in architecture:
        adapters = adapters_of(config)
        chosen = choose_implementation(
            architecture,
            config.model.implementation,
            tensor_parallel=ranks,
            expert_parallel=config.training.expert_parallel,
            context_parallel=config.training.context_parallel,
            has_adapter=bool(adapters),
        )
        for key, adapter in adapters.items():
            if chosen.name == "torchtitan" and len({"k_proj", "v_proj"} & {*adapter.targets}) == 1:
                raise ConfigError(
                    f"{key}.targets has one of k_proj and v_proj, which torchtitan builds from one config; name both "
                    "or neither"
                )


def _check_fit(model: ModelConfig, generation: GenerationConfig, architecture: dict[str, Any]) -> None:
    context = model.max_context
    positions = longest_context(architecture)
    if positions is not None and context > positions:
        if is_longrope(architecture):
            raise ConfigError(
                f"model.max_context = {context} is more than the {positions} positions of short sequences: config.json "
                "has rope type 'longrope', which encodes longer sequences differently; set it to at most that"
            )
        raise ConfigError(
            f"model.max_context = {context} is more than the model's {positions} positions; set it to at most that, or "
            "have config.json scale them: docs/how_to/long_rows.md"
        )
    if generation.return_routed_experts and not any(name in architecture for name in EXPERT_COUNTS):
        raise ConfigError(
            "generation.return_routed_experts = true, and the model is not a mixture of experts; set it to false"
        )
    heads, ranks = architecture.get("num_attention_heads"), generation.tensor_parallel_size
    if heads is not None and heads % ranks:
        raise ConfigError(
            f"generation.tensor_parallel_size = {ranks} does not divide the model's {heads} attention heads; "
            "choose one that does"
        )
    token_bytes, kv_gib = _kv_bytes(architecture, model.dtype), planned_kv_gib(generation.kv_cache_gib)
    if token_bytes is not None and kv_gib is not None and kv_gib * 2**30 < token_bytes * context:
        need = token_bytes * context / 2**30
        raise ConfigError(
            f"generation.kv_cache_gib = {kv_gib} holds less than one context of "
            f"model.max_context = {context} tokens, which needs {need:.3g}"
        )


def start_limit_s(model: ModelConfig, generation: GenerationConfig) -> float:
    """Time that a process of a run may take to start, in seconds: `generation.start_timeout_s` or, by default, a time
    that grows with the size of the weights.

    Example: for 30B parameters in bfloat16, which are 60 GB, it is 180 s + 600 s.
    """
    if generation.start_timeout_s is not None:
        return generation.start_timeout_s
    weights = sum(path.stat().st_size for path in Path(model.path).glob("*.safetensors"))
    return START_S + weights / READ_BYTES_PER_S


def _check_share(folder: Path, model: ModelConfig, generation: GenerationConfig) -> None:
    """Check `generation.gpu_share` against the largest GPU.

    Raises:
        ConfigError: Not even the largest GPU has room for the weights and the KV cache in this share.
    """
    share, size = generation.gpu_share, generation.tensor_parallel_size
    if share is None:
        return
    weights = count_parameters(folder) * BYTES[model.dtype] / size / GIB
    kv_gib = generation.kv_cache_gib or 0.0
    needed, most = weights + kv_gib, LARGEST_GPU_GIB
    if share * most < needed:
        raise ConfigError(
            f"generation.gpu_share = {share:g} is {share * most:.3g} GiB of a GPU of {most}, and {weights:.3g} GiB of "
            f"weights with generation.kv_cache_gib = {kv_gib:g} need more; leave it out to have it "
            "computed" + (f", or set it to {needed / most:.2g} or more" if needed < most else "")
        )


def kv_bytes_per_token(model: ModelConfig) -> int | None:
    """Bytes of one token in the KV cache; None if the model's folder is missing, or its config.json lacks the
    numbers."""
    try:
        architecture = read_json(Path(model.path), "config.json")
    except ModelError:
        return None
    return _kv_bytes(architecture, model.dtype)


def _kv_bytes(architecture: dict[str, Any], dtype: str) -> int | None:
    """Bytes of the keys and values of one token in all layers and heads."""
    heads, hidden = architecture.get("num_attention_heads"), architecture.get("hidden_size")
    layers = architecture.get("num_hidden_layers")
    if heads is None or layers is None or hidden is None:
        return None
    kv_heads = architecture.get("num_key_value_heads") or heads
    return 2 * layers * kv_heads * (architecture.get("head_dim") or hidden // heads) * BYTES[dtype]


MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_config")
"""Keys in config.json with the number of multi-token prediction heads."""


def check_speculative(speculative: SpeculativeConfig, architecture: Mapping[str, Any]) -> None:
    """Check the model or the heads that draft tokens.

    Args:
        architecture: Content of the policy's config.json.

    Raises:
        ModelError: A file of the draft model is missing or unreadable.
        ConfigError: The draft model's folder does not exist, or the model cannot draft tokens of the policy.
    """
    if speculative.method == "mtp" and not any(architecture.get(name) for name in MTP_COUNTS):
        raise ConfigError(
            'generation.speculative.method = "mtp" drafts with heads of the policy, and its config.json has none of '
            f'{", ".join(MTP_COUNTS)}; set it to "ngram", or to "draft_model" or "eagle" with a model'
        )
    if speculative.model is None:
        return
    folder, shown = Path(speculative.model), f"generation.speculative.model = {speculative.model!r}"
    if not folder.is_dir():
        raise ConfigError(
            f"{shown} is not a folder; name the folder of the draft model, such as one fetched with hf download "
            'ORGANIZATION/NAME --local-dir FOLDER, or set generation.speculative.method = "ngram"'
        )
    drafter = read_json(folder, "config.json")
    if speculative.method == "draft_model":
        check_weights(folder)
        _check_drafter_vocabulary(shown, drafter, architecture)
    else:
        _check_heads(shown, folder, speculative.method)


def _check_drafter_vocabulary(shown: str, drafter: Mapping[str, Any], architecture: Mapping[str, Any]) -> None:
    own, policy = drafter.get("vocab_size"), architecture.get("vocab_size")
    if own != policy:
        raise ConfigError(
            f"{shown} has vocab_size = {own} in its config.json, and the policy {policy}: vLLM accepts drafts from the "
            "policy's own vocabulary only; name a smaller model of the same family"
        )


def _check_heads(shown: str, folder: Path, method: str) -> None:
    """Check that the folder contains heads: vLLM expects their matrix fc, which joins a token with the policy's state.
    A complete model does not have it."""
    names = tensor_shapes(folder)
    if names and not any(f".{name}".endswith(".fc.weight") for name in names):
        raise ConfigError(
            f"{shown} has no tensor fc.weight, which {method} heads have; name a folder of such heads, or set "
            'generation.speculative.method = "draft_model" if it is a complete model'
        )
