"""Folders and files of a run and a worker on a host: scratch folders, the run token, and copies of code and model."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_rl.core.errors import ConfigError
from titan_rl.weights.shard_files import OwnedFolder, clean_dead_folders, clean_dead_shards

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # engines and trainer share the cores; more threads would compete for them
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a model is a folder; nothing is fetched while a run starts
}
"""Environment variables of a run's processes, unless the user has set them."""

SCRATCH = "titan_rl-run-"
WORKER = "titan_rl-host-"
YOUNG_S = 3600.0  # cleaners remove what is some days old
LONGEST_TMPDIR = 28  # Monarch makes sockets below it, and the path of a socket has at most 107 characters


def scratch_root() -> Path:
    """Folder that contains all scratch folders and is searched for those of dead runs. For processes of a worker it is
    the parent of the worker's folder."""
    if (folder := os.environ.get(FOLDER)) is not None:
        return Path(folder).parent
    root = Path(tempfile.gettempdir())
    return root if len(str(root)) <= LONGEST_TMPDIR else Path("/tmp")


def make_scratch(prefix: str = SCRATCH) -> OwnedFolder:
    """Create a scratch folder for the lifetime of this process.

    Cleaners of temporary files leave it alone: systemd-tmpfiles, because the folder is locked, and others, which go by
    age, because a thread keeps it young.
    """
    folder = OwnedFolder(prefix, scratch_root())
    threading.Thread(target=_keep_young, args=(folder.path,), name="keep young", daemon=True).start()
    return folder


def make_worker_folder() -> OwnedFolder:
    """Create the scratch folder of a worker; see `make_scratch`."""
    return make_scratch(WORKER)


def _keep_young(folder: Path) -> None:
    while folder.exists():
        time.sleep(YOUNG_S)
        make_young(folder)


def make_young(folder: Path) -> None:
    """Set the times of all files, sockets and folders in a folder to now."""
    for parent, _, files in os.walk(folder):
        for name in (".", *files):
            with contextlib.suppress(OSError):  # removed meanwhile
                os.utime(os.path.join(parent, name), follow_symlinks=False)


def clean_up_after_dead_runs(root: Path) -> None:
    """Remove what dead runs and workers left: scratch folders in `root`, Monarch's logs, and weights in shared
    memory."""
    for folder in (*clean_dead_folders(WORKER, root), *clean_dead_folders(SCRATCH, root)):
        remove_monarch_logs(folder.name)
    clean_dead_shards()


def remove_monarch_logs(suffix: str) -> None:
    """Remove the logs of Monarch processes whose MONARCH_LOG_SUFFIX begins with `suffix`."""
    for folder in Path("/tmp").iterdir():  # Monarch writes its logs there regardless of TMPDIR
        with contextlib.suppress(OSError):  # other processes may remove folders at the same time
            for log in folder.glob(f"monarch_log_{suffix}*"):
                log.unlink(missing_ok=True)


FOLDER = "TITAN_RL_WORKER"
"""Environment variable with the folder of a worker, for the processes that it starts."""
_LEAVING = "leaving"


def announce_leaving(folder: Path, reason: str) -> None:
    """Announce that the host is about to shut down. Called by the worker."""
    fresh = folder / f".{_LEAVING}"
    fresh.write_text(reason)
    fresh.replace(folder / _LEAVING)


def leaving_file() -> Path | None:
    """Path of the file in which the worker writes the reason when the host is about to shut down. None outside of a
    worker."""
    folder = os.environ.get(FOLDER)
    return None if folder is None else Path(folder) / _LEAVING


NAME = ".hosts"


class RunToken:
    """Token file in a run's folder, by which hosts recognize that they see the same folder.

    Attributes:
        text: Content of the file, which no other run has.
    """

    def __init__(self, run_dir: Path) -> None:
        self.text = secrets.token_hex(8)
        self._path = run_dir / NAME
        self._num_looking = 0

    @contextmanager
    def shown(self) -> Generator[None]:
        """Context manager that keeps the file in place until the last concurrent block ends.

        Raises:
            OSError: The file cannot be written.
        """
        if not self._num_looking:
            self._path.write_text(self.text)
        self._num_looking += 1
        try:
            yield
        finally:
            self._num_looking -= 1
            if not self._num_looking:
                self._path.unlink(missing_ok=True)


def token_in(run_dir: Path) -> str | None:
    """Content of the token file in a run's folder; None if there is no file."""
    try:
        return (run_dir / NAME).read_text()
    except OSError:
        return None


CHUNK = 4 << 20
MOST_CODE = 256 << 20  # bytes of one folder of modules
GIT_S = 30.0  # if git takes longer, as on a network file system, files are found without it
LEFT_OUT = ("__pycache__", "node_modules", "runs")

Chunk = tuple[str, bytes]
"""(file below the folder, bytes that follow the previous chunk of the file)."""


def chunks_of(folder: Path, files: list[Path]) -> Iterator[Chunk]:
    """Read the contents of files piece by piece. An empty file has one piece."""
    for path in files:
        name = str(path.relative_to(folder))
        with path.open("rb") as file:
            yield name, file.read(CHUNK)
            while data := file.read(CHUNK):
                yield name, data


def model_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def code_files(folder: Path) -> list[Path]:
    """Files of a folder that git tracks or would add; without git, all files except hidden ones, environments and runs.

    Raises:
        ConfigError: The folder is too large for code.
    """
    files = _known_to_git(folder)
    if files is None:
        files = list(_walk(folder))
    size = sum(path.stat().st_size for path in files)
    if size > MOST_CODE:
        raise ConfigError(
            f"hosts.sync: {folder} in `pythonpath` has {size >> 20} MiB, but code may have at most {MOST_CODE >> 20}; "
            "set `pythonpath` to folders that contain only modules"
        )
    return sorted(files)


def _known_to_git(folder: Path) -> list[Path] | None:
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=GIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = [folder / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return [path for path in found if path.is_file()]


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        parent = Path(root)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in LEFT_OUT and not (parent / name / "pyvenv.cfg").exists()
        ]
        yield from (parent / name for name in names if not name.startswith(".") and (parent / name).is_file())
