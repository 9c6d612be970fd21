"""What can be known of a model folder without loading the model: its files, and the numbers in its config.json."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.errors import ConfigError, ModelError
from titan_rl.training.settings import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Any one of them holds a vocabulary."""

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Where a chat template may be, beside tokenizer_config.json."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What the config of a mixture of experts calls the number of them."""

BYTES = {"float32": 4, "bfloat16": 2}


def find_model_folder(path: str, places: Sequence[Path]) -> Path | None:
    """The absolute folder that `path` names in the first place that has it, None where none has."""
    folders = (place / Path(path).expanduser() for place in places)
    return next((folder.resolve() for folder in folders if folder.is_dir()), None)


def told_places(places: Sequence[Path]) -> str:
    """For a message, the current folder being the first. Example: `here or in /home/ada/sums`."""
    others = dict.fromkeys(str(place) for place in places[1:] if place.resolve() != Path.cwd())
    return " or in ".join(["here", *others])


def check_model_folder(model: ModelConfig, generation: GenerationConfig, places: Sequence[Path]) -> None:
    """Check that the policy's folder can be loaded, and that generators with these settings can run it.

    Args:
        places: where it is looked for.

    Raises:
        ModelError: a file is missing or unreadable.
        ConfigError: there is no such folder, or none of what guesses tokens, or a setting does not fit the model.
    """
    path = model.path
    folder = find_model_folder(path, places)
    if folder is None:
        raise ConfigError(
            f"model.path = {path!r} is not a folder {told_places(places)}. Run titan-rl sft first, which "
            "makes it of the task's demonstrations, where it has some; titan-rl sft --resume RUN goes on with one that "
            "was stopped. Or name "
            "the folder of a model that is there, such as after hf download ORGANIZATION/NAME --local-dir FOLDER"
        )
    guesses = generation.speculative.model
    if guesses is not None and not Path(guesses).is_dir():
        raise ConfigError(
            f"generation.speculative.model = {guesses!r} is not a folder; name that of the model which guesses, such "
            'as after hf download ORGANIZATION/NAME --local-dir FOLDER, or set generation.speculative.method = "ngram"'
        )
    architecture = _read_json(folder, "config.json")
    _check_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"model.path = {path!r} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    _check_vocabulary(folder, architecture)
    _check_fit(model, generation, architecture)


def count_parameters(folder: Path) -> int:
    """Of the model in a folder, by the headers of its safetensors files; 0 where there are none that can be read."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(ModelError):  # loading the model says what is wrong with it
            count += sum(math.prod(shape) for shape, _ in _read_header(path).values())
    return count


def _read_header(path: Path) -> dict[str, tuple[list[int], int]]:
    """Of a safetensors file: the shape of each tensor, and where its bytes end in the file.

    Raises:
        ModelError: it cannot be read, is no such file, or is cut off.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if not 8 < start <= size:
                raise ValueError("its first 8 bytes give no length of a header")
            entries = json.loads(file.read(start - 8))
        entries.pop("__metadata__", None)
        header = {name: (entry["shape"], start + entry["data_offsets"][1]) for name, entry in entries.items()}
        end = max((end for _, end in header.values()), default=start)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{path} is no safetensors file, or is cut off: {error}; fetch it again") from None
    if size != end:
        raise ModelError(f"{path} has {size} bytes, and {end} by its header: it is damaged; fetch it again")
    return header


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places: dict[str, str] = _read_json(folder, index.name).get("weight_map", {})
        shards = sorted(set(places.values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, which {index.name} names")
        headers = {name: _read_header(folder / name) for name in shards}
        if absent := next((tensor for tensor, shard in places.items() if tensor not in headers[shard]), None):
            raise ModelError(f"{folder / places[absent]} lacks {absent}, which {index.name} names")
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights: no *.safetensors file is there")
    for path in files:
        _read_header(path)


def _check_vocabulary(folder: Path, architecture: dict[str, Any]) -> None:
    """A tokenizer may have fewer ids than the model, whose embedding is often padded, but not more."""
    if not (folder / "tokenizer.json").is_file() or "vocab_size" not in architecture:
        return
    tokenizer = _read_json(folder, "tokenizer.json")
    vocabulary: Any = tokenizer.get("model", {}).get("vocab", ())
    ids: list[int] = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    ids += [token["id"] for token in tokenizer.get("added_tokens", ())]
    if ids and max(ids) >= architecture["vocab_size"]:
        raise ModelError(
            f"{folder} has a tokenizer with token id {max(ids)}, and a model of {architecture['vocab_size']} tokens "
            "(vocab_size in config.json); they belong to different models"
        )


def check_chat_template(model: ModelConfig) -> None:
    """Check that the renderer has the template that it needs.

    Raises:
        ModelError: the folder has none.
    """
    if model.renderer not in ("auto", "chat_template"):
        return
    folder = Path(model.path)
    if any((folder / name).exists() for name in TEMPLATE_FILES):
        return
    file = "tokenizer_config.json"
    if not (folder / file).is_file() or not _read_json(folder, file).get("chat_template"):
        raise ModelError(
            f"model.path = {model.path!r} has no chat template, and model.renderer = {model.renderer!r} needs one; add "
            "a chat_template.jinja to it, such as that of the model that was tuned for conversations"
        )


def check_training_fit(config: RunConfig) -> None:
    """Check that the trainer's ranks can share the model, whose folder has been checked.

    Raises:
        ConfigError: names the setting, its value and the fix.
    """
    architecture = _read_json(Path(config.model.path), "config.json")
    kv_heads = architecture.get("num_key_value_heads") or architecture.get("num_attention_heads")
    ranks = config.training.tensor_parallel
    if kv_heads is not None and kv_heads % ranks:
        raise ConfigError(
            f"training.tensor_parallel = {ranks} does not divide the model's {kv_heads} heads of keys and values; "
            "choose one that does"
        )


def _check_fit(model: ModelConfig, generation: GenerationConfig, architecture: dict[str, Any]) -> None:
    context = model.max_context
    positions = architecture.get("max_position_embeddings")
    if positions is not None and context > positions:
        raise ConfigError(f"model.max_context = {context} is more than the model's {positions} positions")
    if generation.return_routed_experts and not any(name in architecture for name in EXPERT_COUNTS):
        raise ConfigError(
            "generation.return_routed_experts = true, and the model is no mixture of experts; set it to false"
        )
    heads, ranks = architecture.get("num_attention_heads"), generation.tensor_parallel_size
    if heads is not None and heads % ranks:
        raise ConfigError(
            f"generation.tensor_parallel_size = {ranks} does not divide the model's {heads} attention heads; "
            "choose one that does"
        )
    token_bytes = _kv_bytes(architecture, model.dtype)
    if token_bytes is not None and generation.kv_cache_gib * 2**30 < token_bytes * context:
        need = token_bytes * context / 2**30
        raise ConfigError(
            f"generation.kv_cache_gib = {generation.kv_cache_gib} holds less than one context of "
            f"model.max_context = {context} tokens, which needs {need:.3g}"
        )


def kv_bytes_per_token(model: ModelConfig) -> int | None:
    """What one token takes of a KV cache. None where the model's folder is not there, or does not say."""
    try:
        architecture = _read_json(Path(model.path), "config.json")
    except ModelError:
        return None
    return _kv_bytes(architecture, model.dtype)


def _kv_bytes(architecture: dict[str, Any], dtype: str) -> int | None:
    """Keys and values of every layer and head."""
    heads, hidden = architecture.get("num_attention_heads"), architecture.get("hidden_size")
    layers = architecture.get("num_hidden_layers")
    if heads is None or layers is None or hidden is None:
        return None
    kv_heads = architecture.get("num_key_value_heads") or heads
    return 2 * layers * kv_heads * (architecture.get("head_dim") or hidden // heads) * BYTES[dtype]


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} is no model folder: it has no {name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{folder / name} is not a JSON object")
    return cast("dict[str, Any]", content)
