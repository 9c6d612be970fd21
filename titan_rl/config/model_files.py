"""Files of a Hugging Face folder, which are read without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError
from titan_rl.core.model_identity import read_header


def check_weights(folder: Path) -> None:
    """Check that all weights exist.

    Raises:
        ModelError: A file is missing, is cut off, or is not a safetensors file.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shard_of: dict[str, str] = read_json(folder, index.name).get("weight_map", {})
        shards = sorted(set(shard_of.values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, which {index.name} names")
        headers = {name: read_header(folder / name) for name in shards}
        if absent := next((tensor for tensor, shard in shard_of.items() if tensor not in headers[shard]), None):
            raise ModelError(f"{folder / shard_of[absent]} lacks {absent}, which {index.name} names")
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights: there is no *.safetensors file")
    for path in files:
        read_header(path)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the safetensors files of a folder, by name.

    Raises:
        ModelError: A file is damaged; see `read_header`.
    """
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    return {name: tuple(shape) for header in headers for name, (shape, _) in header.items()}


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of a model folder.

    Raises:
        ModelError: The file does not exist, or is not a JSON object.
    """
    try:
        content = parse_json((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} is not a model folder: it has no {name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{folder / name} is not a JSON object")
    return cast("dict[str, Any]", content)
