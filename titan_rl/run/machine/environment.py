"""What a run borrows from the machine beside its run directory, and how what a killed run left is given back."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from titan_rl.run.machine.guard import keep_clean
from titan_rl.weights.shard_files.owned_folder import OwnedFolder, clean_dead_folders
from titan_rl.weights.shard_files.shard_folder import clean_dead_shards

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # engines and trainer share the cores; threads of their own would thrash
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a model is a folder; nothing is fetched while a run starts
}

SCRATCH = "titan_rl-run-"
LONGEST_TMPDIR = 28  # Monarch makes sockets below it, whose paths end at 107 characters


@contextlib.contextmanager
def run_environment(pythonpath: Sequence[str] = ()) -> Generator[None]:
    """Environment variables for this process and its children, where the user has not set them, and a folder for
    temporary files that goes with the run.

    Args:
        pythonpath: folders in which the children find modules, before those of the user's own PYTHONPATH.
    """
    clean_up_after_dead_runs(scratch_root())
    kept = process_scratch()
    ours = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if pythonpath:
        ours["PYTHONPATH"] = os.pathsep.join([*pythonpath, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="", dir=kept, ignore_cleanup_errors=True) as folder:
        variables = ours | {"TMPDIR": folder, "MONARCH_LOG_SUFFIX": kept.name}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        tempfile.tempdir = None  # so that it is read from the environment again
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            tempfile.tempdir = None


def process_scratch() -> Path:
    """The folder for what lasts as long as this process: Monarch listens where it first did, whichever run that was.
    It is removed when the process ends, however it does."""
    return _scratch_of(os.getpid())


@functools.cache
def _scratch_of(pid: int) -> Path:
    folder = OwnedFolder(SCRATCH, scratch_root())
    guard = keep_clean(folder.path.parent, folder.path.name)

    def remove() -> None:
        if os.getpid() == pid:  # not one that was forked from it
            _remove_monarch_logs(folder.path)
            folder.remove()
            if guard is not None:
                guard.kill()
                guard.wait()

    atexit.register(remove)
    return folder.path


@contextlib.contextmanager
def file_modes(*, share: bool) -> Generator[None]:
    """What this process and its children make within the block is for this user alone, or with `share` for whom the
    user's umask says."""
    before = os.umask(0o077)
    if share:
        os.umask(before)
    try:
        yield
    finally:
        os.umask(before)


def scratch_root() -> Path:
    root = Path(tempfile.gettempdir())
    return root if len(str(root)) <= LONGEST_TMPDIR else Path("/tmp")


def clean_up_after_dead_runs(root: Path) -> None:
    """Remove the scratch folders in `root`, the logs of Monarch and the weights in shared memory of runs whose process
    is gone."""
    for scratch in clean_dead_folders(SCRATCH, root):
        _remove_monarch_logs(scratch)
    clean_dead_shards()


def _remove_monarch_logs(scratch: Path) -> None:
    for folder in Path("/tmp").iterdir():  # there wherever TMPDIR points
        with contextlib.suppress(OSError):  # others remove folders of their own meanwhile
            for log in folder.glob(f"monarch_log_{scratch.name}*"):
                log.unlink(missing_ok=True)
