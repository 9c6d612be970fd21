"""What a run borrows of each of its hosts, and how what a killed run left is given back. Standard library only."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from titan_rl.cluster.liveness.worker_signs import FOLDER
from titan_rl.weights.shard_files.owned_folder import OwnedFolder, clean_dead_folders
from titan_rl.weights.shard_files.shard_folder import clean_dead_shards

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # engines and trainer share the cores; threads of their own would thrash
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a model is a folder; nothing is fetched while a run starts
}
"""Variables of a run's processes, where the user has not set them."""

SCRATCH = "titan_rl-run-"
WORKER = "titan_rl-host-"
LONGEST_TMPDIR = 28  # Monarch makes sockets below it, whose paths end at 107 characters


def scratch_root() -> Path:
    """Where whoever clears up looks. What a worker has started has it beside the worker's folder."""
    if (folder := os.environ.get(FOLDER)) is not None:
        return Path(folder).parent
    root = Path(tempfile.gettempdir())
    return root if len(str(root)) <= LONGEST_TMPDIR else Path("/tmp")


def make_scratch() -> OwnedFolder:
    """A folder for what lasts as long as this process."""
    return OwnedFolder(SCRATCH, scratch_root())


def make_worker_folder() -> OwnedFolder:
    """As `make_scratch`, of a worker."""
    return OwnedFolder(WORKER, scratch_root())


def clean_up_after_dead_runs(root: Path) -> None:
    """Remove the scratch folders in `root`, the logs of Monarch and the weights in shared memory of runs whose process
    is gone, and the folders of workers that are."""
    for folder in (*clean_dead_folders(WORKER, root), *clean_dead_folders(SCRATCH, root)):
        remove_monarch_logs(folder.name)
    clean_dead_shards()


def remove_monarch_logs(suffix: str) -> None:
    """Those of processes whose MONARCH_LOG_SUFFIX begins so."""
    for folder in Path("/tmp").iterdir():  # there wherever TMPDIR points
        with contextlib.suppress(OSError):  # others remove folders of their own meanwhile
            for log in folder.glob(f"monarch_log_{suffix}*"):
                log.unlink(missing_ok=True)
