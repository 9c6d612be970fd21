"""Identity of a model folder: digests of its parts, by which a later reader finds that it holds another model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError
from titan_rl.core.files import lfs_problem

CONFIG_FILES = ("config.json", "generation_config.json", "adapter_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
TOKENIZER_CONFIG = "tokenizer_config.json"  # belongs to the tokenizer, except for its "chat_template"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*")

BLOCK_BYTES = 1 << 12
MOST_BLOCKS = 16  # blocks of one tensor
ALL_BLOCKS = 1 << 13  # approximate number of blocks of a model, with at least one of each tensor


def model_identity(folder: Path) -> dict[str, str]:
    """Compute digests of the parts of a folder: "weights", "config", "tokenizer" and "chat_template".

    The digest of the weights covers every tensor's name and shape, and blocks of 4 KiB spread over its bytes, but not
    the division into files. Training changes numbers everywhere, so this detects it without reading all bytes. Small
    tensors are read completely. If only a few numbers in a large tensor were edited, that may go unnoticed.

    The weights of a run are its newest checkpoint and its exported policy; a checkpoint's have checksums already.

    Returns:
        Digests in hexadecimal, by part; empty if the folder does not exist.

    Raises:
        ModelError: A file of weights is damaged.
        OSError: A file cannot be read.
    """
    if not folder.is_dir():
        return {}
    template = dict(_contents(folder, TEMPLATE_FILES))
    tokenizer = dict(_contents(folder, TOKENIZER_FILES))
    for name, data in _contents(folder, (TOKENIZER_CONFIG,)):
        try:
            settings = json.loads(data)
            template[name] = json.dumps(settings.pop("chat_template", None)).encode()
            tokenizer[name] = json.dumps(settings, sort_keys=True).encode()
        except (ValueError, AttributeError):  # loading the tokenizer reports what is wrong
            tokenizer[name] = data
    return {
        "weights": _digest(_weights(folder) | _checkpoints(folder)),
        "config": _digest(dict(_contents(folder, CONFIG_FILES))),
        "tokenizer": _digest(tokenizer),
        "chat_template": _digest(template),
    }


def changed_parts(folder: Path, identity: Mapping[str, str]) -> list[str]:
    """List the parts of a folder that have changed, in words; empty if there is nothing to compare.

    Args:
        identity: Earlier result of `model_identity`.

    Raises:
        ModelError, OSError: The folder cannot be read; see `model_identity`.
    """
    now = model_identity(folder) if identity else {}
    return [part.replace("_", " ") for part, digest in now.items() if identity.get(part, digest) != digest]


def recorded_identity(folder: Path, run: Path) -> dict[str, str]:
    """Return the identity that a run recorded of a model's folder when it began; empty if it knows no such folder."""
    try:
        models: dict[str, dict[str, str]] = json.loads((run / "run_state.json").read_text())["inputs"]["models"]
        return next((each for each in models.values() if each.get("folder") == str(folder)), {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no run, or one of an older version
        return {}


def check_opened_models(folders: Sequence[str], run: Path) -> None:
    """Compare models that the user's code opens with those that it opened first in a run. The first identity of each is
    recorded in `models.json` in the run's folder.

    Args:
        run: Folder of the run. Nothing is compared if it is not one.

    Raises:
        ModelError: A folder has another model than before.
    """
    if not folders or not (run / "run_state.json").is_file():
        return
    path = run / "models.json"
    known: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.is_file() else {}
    for folder in folders:
        began_with = known.setdefault(folder, model_identity(Path(folder)))
        if changed := changed_parts(Path(folder), began_with):
            raise ModelError(
                f"{folder} is not the model that the run began with: {', '.join(changed)} changed; put that model "
                "back, or start a new run"
            )
    fresh = path.with_name(f".models-{os.getpid()}")
    fresh.write_text(json.dumps(known))
    fresh.replace(path)


def _contents(folder: Path, patterns: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file()):
        yield path.name, path.read_bytes()


def _weights(folder: Path) -> dict[str, bytes]:
    headers = {path: read_header(path) for path in sorted(folder.glob("*.safetensors"))}
    num_tensors = sum(map(len, headers.values()))
    most = max(1, min(MOST_BLOCKS, ALL_BLOCKS // max(1, num_tensors)))
    sampled: dict[str, bytes] = {}
    for path, header in headers.items():
        with path.open("rb", buffering=0) as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            for name, (shape, end) in sorted(header.items(), key=lambda entry: entry[1][1]):
                blocks = [f"{shape} {end - start}".encode()]
                for at in _starts(end - start, most):
                    file.seek(start + at)
                    blocks.append(file.read(min(BLOCK_BYTES, end - start - at)))
                sampled[name] = b"".join(blocks)
                start = end
    return sampled


def _checkpoints(folder: Path) -> dict[str, bytes]:
    """Checksums of a checkpoint, or of the newest checkpoint and the exported policy of a run, by path."""
    newest = max(folder.glob("checkpoints/step-*/checksums.json"), default=None)
    found = [path for path in (folder / "checksums.json", newest) if path is not None and path.is_file()]
    exported = _weights(folder / "export").items() if newest is not None else ()
    return {f"export/{name}": data for name, data in exported} | {
        str(path.relative_to(folder)): path.read_bytes() for path in found
    }


def _starts(size: int, most: int) -> list[int]:
    """Return the offsets of blocks that are spread over a tensor, including its first and last bytes; all blocks of a
    small tensor."""
    if size <= most * BLOCK_BYTES:
        return list(range(0, size, BLOCK_BYTES))
    last = size - BLOCK_BYTES
    return [last * number // max(1, most - 1) for number in range(most)]


def _digest(parts: Mapping[str, bytes]) -> str:
    """Return a digest of 16 bytes, in hexadecimal."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(parts):
        for data in (name.encode(), parts[name]):
            found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def read_header(path: Path) -> dict[str, tuple[list[int], int]]:
    """Read the header of a safetensors file: by tensor name, the shape and the offset at which the tensor's bytes end
    in the file.

    Raises:
        ModelError: The file cannot be read, is not a safetensors file, or is cut off.
    """
    try:
        if problem := lfs_problem(path):
            raise ModelError(f"{path} is not a safetensors file, or is cut off: it {problem}")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if not 8 < start <= size:
                raise ValueError("its first 8 bytes are not the length of a header")
            entries = parse_json(file.read(start - 8))
        entries.pop("__metadata__", None)
        header = {name: (entry["shape"], start + entry["data_offsets"][1]) for name, entry in entries.items()}
        end = max((end for _, end in header.values()), default=start)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{path} is not a safetensors file, or is cut off: {error}; fetch it again") from None
    if size != end:
        raise ModelError(f"{path} has {size} bytes, but its header describes {end}: it is damaged; fetch it again")
    return header
