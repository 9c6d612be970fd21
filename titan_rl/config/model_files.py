"""The files of a Hugging Face folder, read without what they are loaded by."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError


def check_weights(folder: Path) -> None:
    """Check that the weights are all there.

    Raises:
        ModelError: a file is missing, cut off, or no safetensors file.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places: dict[str, str] = read_json(folder, index.name).get("weight_map", {})
        shards = sorted(set(places.values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, which {index.name} names")
        headers = {name: read_header(folder / name) for name in shards}
        if absent := next((tensor for tensor, shard in places.items() if tensor not in headers[shard]), None):
            raise ModelError(f"{folder / places[absent]} lacks {absent}, which {index.name} names")
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights: no *.safetensors file is there")
    for path in files:
        read_header(path)


def read_header(path: Path) -> dict[str, tuple[list[int], int]]:
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
            entries = parse_json(file.read(start - 8))
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


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """
    Raises:
        ModelError: there is no such file, or it is no JSON object.
    """
    try:
        content = parse_json((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} is no model folder: it has no {name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{folder / name} is not a JSON object")
    return cast("dict[str, Any]", content)
