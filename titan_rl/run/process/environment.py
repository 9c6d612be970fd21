"""Environment of a command's processes: variables, temporary folders, file modes and log file."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import resource
import signal
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from titan_rl.cluster.hosts.folders import (
    ENVIRONMENT,
    clean_up_after_dead_runs,
    make_scratch,
    remove_monarch_logs,
    scratch_root,
)
from titan_rl.cluster.processes.sockets import has_abstract_sockets
from titan_rl.core.errors import ConfigError
from titan_rl.run.process.guard import STOPS, keep_clean

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextlib.contextmanager
def logging_to(path: Path) -> Generator[None]:
    """Write all log messages to a file during the block, and none to the terminal. Handlers of a program that
    has its own logging are restored afterwards."""
    root = logging.getLogger()
    handlers, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    root.handlers.clear()  # `basicConfig(force=True)` would close them
    logging.basicConfig(filename=path, level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log each request to a judge or teacher
    logging.raiseExceptions = False  # on a full disk, each line of the log would print an error on the screen
    try:
        yield
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
            with contextlib.suppress(OSError):  # lines that a full disk has not accepted
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.raiseExceptions = raises


@contextlib.contextmanager
def run_environment(pythonpath: Sequence[str] = ()) -> Generator[None]:
    """Set environment variables for this process and its children, unless the user has set them, and create a folder
    for temporary files that is removed at the end of the block.

    Args:
        pythonpath: Folders in which the children search for modules, before those of the user's own PYTHONPATH.
    """
    clean_up_after_dead_runs(scratch_root())
    kept = process_scratch()
    additions = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if pythonpath:
        additions["PYTHONPATH"] = os.pathsep.join([*pythonpath, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="", dir=kept, ignore_cleanup_errors=True) as folder:
        variables = additions | {"TMPDIR": folder, "MONARCH_LOG_SUFFIX": kept.name}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        tempfile.tempdir = None  # Python reads it from the environment again
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            tempfile.tempdir = None


LEAST_FILES = 256
"""Open files that a process of a run needs at least."""


def allow_open_files() -> None:
    """Raise the limit of open files of this process, and of those that it starts, as far as the system allows.

    Raises:
        ConfigError: It stays below `LEAST_FILES`.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < LEAST_FILES:
        raise ConfigError(f"a process may open {most} files here, and needs {LEAST_FILES}; raise ulimit -Hn, as root")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


PRIVATE = "Monarch's sockets are private to this user"
EXPOSED = "every user of this machine can run code as you during a run, through Monarch's abstract socket"
OWN_NAMESPACE = "run it in its own network namespace or container: docs/concepts/security.md"


def is_exposed() -> bool:
    """Return whether this process listens on abstract sockets that other users may reach."""
    return shares_network() and has_abstract_sockets()


def shares_network() -> bool:
    """Return whether this process is in the network namespace of the machine's first process; True if that is
    unknown."""
    try:
        return os.readlink("/proc/self/ns/net") == os.readlink("/proc/1/ns/net")
    except OSError:
        return True


def process_scratch() -> Path:
    """Temporary folder of this process. Monarch keeps listening in it even if the run that started Monarch has ended.
    It is removed however the process ends."""
    return _scratch_of(os.getpid())


@functools.cache
def _scratch_of(pid: int) -> Path:
    # A signal that arrives before the folder is registered would leave it behind.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    folder = make_scratch()
    guard = keep_clean(folder.path.parent, folder.path.name)

    def remove() -> None:
        if os.getpid() == pid:  # not a process that was forked from it
            remove_monarch_logs(folder.path.name)
            folder.remove()
            if guard is not None:
                guard.kill()
                guard.wait()

    atexit.register(remove)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    return folder.path


@contextlib.contextmanager
def file_modes(*, share: bool) -> Generator[None]:
    """Keep files that this process and its children create private during the block, or, with `share`, use the user's
    umask."""
    before = os.umask(0o077)
    if share:
        os.umask(before)
    try:
        yield
    finally:
        os.umask(before)
