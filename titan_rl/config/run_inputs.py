"""Inputs of a run: the models, files and code that it reads. A run records their identity when it begins, and compares
it whenever they are read again.

    inputs_of        records the inputs of a config, as `RunState.inputs` keeps them
    changed_models   compares the folders of models
    changed_data     compares the files of tasks
    changed_code     compares the code of tasks, and titan_rl itself
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, cast

from titan_rl.config.function_names import named_modules
from titan_rl.config.model_folder import adapters_of
from titan_rl.config.resume_changes import shown_name
from titan_rl.config.run import RunConfig
from titan_rl.config.task_tables import type_of
from titan_rl.config.tasks import TaskSource
from titan_rl.core.calls.recorded_code import LIBRARY, loaded_code
from titan_rl.core.errors import ConfigError
from titan_rl.core.model_identity import changed_parts, model_identity
from titan_rl.core.settings import Section, names_file

Inputs = Mapping[str, Any]
"""Identity of the inputs of a run, as JSON: {"models": {"model.path": {"folder": "...", "weights": "9b1e...", ...}},
"data": {"tasks.sums.path": {"path": "...", "digest": "07aa...", "lines": 120, ...}}, "code": {"sums": "c41d..."},
"titan_rl": {"version": "0.3.0", "commit": "5d0c...", "digest": "a1f7..."}}"""

DRAFTER = "generation.speculative.model"
MODEL_FILES = ("config.json", "config.toml", "adapter_config.json", "run_state.json")
"""Files by which a folder is one of a model, a run, an adapter or a checkpoint, and not one of data."""
HEAD_BYTES = 1 << 20
"""Bytes at the beginning of each file that the identity of a folder of data covers."""


def inputs_of(config: RunConfig) -> dict[str, Any]:
    """Compute the identity of everything that a run with this config reads.

    Raises:
        ModelError: The weights of a model are damaged.
        ConfigError: A file cannot be read.
    """
    files = [(key, path) for key, path, _ in _files_of(config) if not _is_model(path)]
    return {
        "models": {
            key: {"folder": folder, **model_identity(Path(folder))} for key, folder in model_folders(config).items()
        },
        "data": {key: data_identity(path) for key, path in files},
        "code": {name: _digest(source) for name, source in code_of(config).items()},
        "titan_rl": dict(library_identity()),
    }


def code_of(config: RunConfig) -> dict[str, bytes]:
    """Return the source of the user's code that a run has imported, by module."""
    return loaded_code({type_of(source.task).partition(":")[0] for source in config.sources} | named_modules(config))


def model_folders(config: RunConfig) -> dict[str, str]:
    """Return the folders of the models that the settings name, by setting."""
    found = {"model.path": config.model.path}
    found |= {f"{key}.start": adapter.start for key, adapter in adapters_of(config).items() if adapter.start}
    if config.generation.speculative.model is not None:
        found[DRAFTER] = config.generation.speculative.model
    for source in config.tasks:
        key = "training.teacher" if source.teacher is None else f"tasks.{source.name}.teacher"
        if os.path.isdir(teacher := config.teacher_of(source)):
            found[key] = teacher
    return found | {key: path for key, path, _ in _files_of(config) if _is_model(path)}


def settings_of_inputs(recorded: Inputs) -> frozenset[str]:
    """Return the settings whose files and folders have a recorded identity, so that they may be moved."""
    return frozenset((*recorded.get("models", ()), *recorded.get("data", ())))


def changed_models(config: RunConfig, recorded: Inputs) -> dict[str, list[str]]:
    """List the parts of each model that differ from the recorded ones, by setting. Models that only one side has are
    not compared.

    Raises:
        ModelError: The weights of a model are damaged.
    """
    models: Mapping[str, Mapping[str, str]] = recorded.get("models", {})
    changes = {
        key: changed_parts(Path(folder), models[key]) for key, folder in model_folders(config).items() if key in models
    }
    return {key: parts for key, parts in changes.items() if parts}


def changed_data(now: Inputs, recorded: Inputs, config: RunConfig) -> tuple[list[str], list[str]]:
    """Describe the files of tasks that differ from the recorded ones.

    Returns:
        Changes of files that a setting declares to be the task's data, with the type `FilePath`, and changes of other
        files that settings name, which may be the task's output.
    """
    declared = {key for key, _, is_declared in _files_of(config) if is_declared}
    data: Mapping[str, Any] = recorded.get("data", {})
    changes = {
        key: f"{shown_name(config, key)} = {each['path']!r}: {_data_change(each, data[key])}"
        for key, each in now["data"].items()
        if key in data and each["digest"] != data[key]["digest"]
    }
    return (
        [text for key, text in changes.items() if key in declared],
        [text for key, text in changes.items() if key not in declared],
    )


def changed_code(now: Inputs, recorded: Inputs) -> list[str]:
    """Describe the modules of the user that differ from the recorded ones, and another version of titan_rl."""
    code: Mapping[str, str] = recorded.get("code", {})
    edited = [name for name, digest in now["code"].items() if code.get(name, digest) != digest]
    files = [str(getattr(sys.modules.get(name), "__file__", name)) for name in edited]
    changes = [f"{', '.join(files)} changed since the run began; it continues with the new code"] if files else []
    before, after = recorded.get("titan_rl", {}), now["titan_rl"]
    if before and before["digest"] != after["digest"]:
        changes.append(
            f"the run was saved by titan_rl {_version(before)}, and continues with {_version(after)}"
            + (", whose code was edited" if _version(before) == _version(after) else "")
        )
    return changes


@cache
def library_identity() -> Mapping[str, str]:
    """Version, commit and digest of titan_rl; the commit is "" if it is unknown. Two checkouts of one version may
    differ."""
    version, commit = "", ""
    with contextlib.suppress(PackageNotFoundError, ValueError):
        installed = distribution("titan-rl")
        version = installed.version
        origin: dict[str, Any] = json.loads(installed.read_text("direct_url.json") or "{}")
        commit = origin.get("vcs_info", {}).get("commit_id", "")
    if (LIBRARY.parent / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(LIBRARY.parent), "rev-parse", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    digest = hashlib.sha256()
    for path in sorted(LIBRARY.rglob("*.py")):
        digest.update(f"{path.relative_to(LIBRARY)}\0".encode() + path.read_bytes())
    return {"version": version, "commit": commit, "digest": digest.hexdigest()[:12]}


def _version(library: Mapping[str, str]) -> str:
    return library["version"] + (f" (commit {library['commit'][:12]})" if library["commit"] else "")


def data_identity(given: str) -> dict[str, Any]:
    """Compute the identity of a file or folder of data. For a text it includes the number of its lines, a digest that
    ignores their order, and digests of its first 1, 2, 4, 8, ... lines.

    Raises:
        ConfigError: A file cannot be read.
    """
    path = Path(given)
    try:
        if path.is_dir():
            return {"path": given, "digest": _digest(*_heads(path))}
        with path.open("rb") as file:
            is_text = b"\0" not in file.read(HEAD_BYTES)
        return {"path": given, **(_lines_identity(path) if is_text else _bytes_identity(path))}
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror or error}") from None


def _heads(folder: Path) -> Iterator[bytes]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            yield f"{path.relative_to(folder)} {path.stat().st_size}".encode()
            yield file.read(HEAD_BYTES)


def _bytes_identity(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"digest": hashlib.file_digest(file, "sha256").hexdigest()[:32], "bytes": path.stat().st_size}


def _lines_identity(path: Path, most: int | None = None) -> dict[str, Any]:
    """Identity of a text, or of its first `most` lines."""
    whole, unordered, beginnings, number = hashlib.sha256(), 0, list[str](), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.rstrip(b"\r\n") + b"\n"
            whole.update(line)
            unordered += int.from_bytes(hashlib.blake2b(line, digest_size=8).digest())
            if not number & (number - 1):
                beginnings.append(whole.copy().hexdigest()[:8])
            if number == most:
                break
    digest = whole.hexdigest()[:32]
    return {"digest": digest, "lines": number, "unordered": unordered % 2**64, "beginnings": beginnings}


def _data_change(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    if "lines" not in now or "lines" not in before:
        sizes = (
            f": {now['bytes']:,} bytes now, {before['bytes']:,} before" if "bytes" in now and "bytes" in before else ""
        )
        return f"its content changed{sizes}"
    if (now["lines"], now["unordered"]) == (before["lines"], before["unordered"]):
        return f"its {now['lines']:,} lines are in another order"
    if now["lines"] > before["lines"]:
        beginning = _lines_identity(Path(now["path"]), before["lines"])
        if beginning["digest"] == before["digest"]:
            return f"{now['lines'] - before['lines']:,} lines were added after its {before['lines']:,}"
    pairs = enumerate(zip(now["beginnings"], before["beginnings"], strict=False))
    same = max((2**at for at, (one, other) in pairs if one == other), default=0)
    counts = f"it has {now['lines']:,} lines, and had {before['lines']:,}"
    return f"{counts}; at least the first {same:,} are the same" if same else f"{counts}; the first one differs"


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=16)
    for data in parts:
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def _is_model(path: str) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in MODEL_FILES)


def _files_of(config: RunConfig) -> list[tuple[str, str, bool]]:
    """Files and folders that settings of tasks name: the setting, the path, and whether the setting has the type
    `FilePath`."""
    owners = [(f"tasks.{source.name}", source.task) for source in config.tasks]
    suites = [(f"validation.suites.{suite.name}", suite.task) for suite in config.validation.suites]
    owners += [(key, source.task) for key, source in suites if isinstance(source, TaskSource)]
    return [found for key, task in owners for found in _paths_in(task, key)]


def _paths_in(value: object, key: str, *, is_declared: bool = False) -> Iterator[tuple[str, str, bool]]:
    if isinstance(value, str):
        if os.path.isfile(value) or (is_declared and os.path.isdir(value)):
            yield key, value, is_declared
    elif isinstance(value, Section):
        for field, info in type(value).model_fields.items():
            is_path = names_file(info)
            yield from _paths_in(getattr(value, field), f"{key}.{field}", is_declared=is_path)
    elif isinstance(value, Mapping):
        for name, inner in cast("Mapping[str, object]", value).items():
            yield from _paths_in(inner, f"{key}.{name}", is_declared=is_declared)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(cast("list[object]", value)):
            yield from _paths_in(inner, f"{key}[{number}]", is_declared=is_declared)
