"""Monarch's sockets: the address where this process listens, and private paths instead of abstract sockets; and what
Monarch writes to the terminal when it starts and when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import mmap
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from titan_rl.core.errors import ConfigError
from titan_rl.core.plain_data import terminal_text

LIBRARY = "/monarch/_rust_bindings."
NAME_LENGTH = 16  # of Monarch's 24 random characters; a path has at most 107, and 16 are unique enough
_LISTENING = "00010000"  # flags of a listening socket in /proc/net/unix

_Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, use_errno=True)


_callbacks = list[Callable[..., int]]()  # kept for the lifetime of the process, because native code calls them


def bind_below(folder: Path) -> bool:
    """Have Monarch in this process bind sockets to paths in a folder instead of abstract ones.

    Monarch 0.7 has no setting for this, so the entry of `bind` in its library's table of imported functions is
    replaced. Monarch tells its children the socket name that the system reports, which is then the path. Sockets that
    are already bound are unchanged. The first folder stays in use, and must exist for the lifetime of the process.

    Returns:
        Whether Monarch's sockets are bound there. False on systems other than Linux, and if the library has no such
            entry.
    """
    if _callbacks:
        return True
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    original = ctypes.cast(libc.bind, ctypes.c_void_p).value or 0
    real = _Bind(original)
    family = int(socket.AF_UNIX).to_bytes(2, sys.byteorder)
    prefix = os.fsencode(folder) + b"/"

    def bind(fd: int, address: int, length: int) -> int:
        name = ctypes.string_at(address, length)
        if name[:2] != family or name[2:3] != b"\0" or length < 3 + NAME_LENGTH:
            return real(fd, address, length)
        path = family + prefix + name[3 : 3 + NAME_LENGTH] + b"\0"
        if len(path) > 110:  # the size of a sockaddr_un
            ctypes.set_errno(errno.ENAMETOOLONG)
            return -1
        kept = ctypes.create_string_buffer(path, len(path))
        return real(fd, ctypes.addressof(kept), len(path))

    callback = _Bind(bind)
    replacement = ctypes.cast(callback, ctypes.c_void_p).value or 0
    slots = list(_words(original))
    if not slots or not all(_put(libc, slot, replacement, writable) for slot, writable in slots):
        return False
    _callbacks.append(callback)

    def restore() -> None:  # before Python ends, because Monarch's threads must not call it afterwards
        for slot, writable in slots:
            _put(libc, slot, original, writable)

    atexit.register(restore)
    return True


def has_abstract_sockets() -> bool:
    """Whether this process listens on an abstract socket."""
    own: set[str] = set()
    try:
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                own.add(os.readlink(f"/proc/self/fd/{fd}"))
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    except OSError:  # not Linux; other systems have no abstract sockets
        return False
    return any(
        len(row) > 7 and row[3] == _LISTENING and row[7].startswith("@") and f"socket:[{row[6]}]" in own for row in rows
    )


def _words(value: int) -> Iterator[tuple[int, bool]]:
    """Find a word in the library's tables of addresses. Yields each position, and whether it is writable."""
    word = value.to_bytes(8, sys.byteorder)
    beyond_code = False
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, modes, *_ = line.split()
        if LIBRARY not in line:
            continue
        beyond_code = beyond_code or "x" in modes  # constants come before it, tables after it
        if not beyond_code or "x" in modes or "r" not in modes:
            continue
        start, end = (int(number, 16) for number in extent.split("-"))
        content = ctypes.string_at(start, end - start)
        at = content.find(word)
        while at >= 0:
            if at % 8 == 0:
                yield start + at, "w" in modes
            at = content.find(word, at + 1)


def _put(libc: ctypes.CDLL, slot: int, value: int, writable: bool) -> bool:
    """Write to a position found by `_words`, making its page writable for the moment. Returns whether that worked."""
    page, size = ctypes.c_void_p(slot - slot % mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE)
    if not writable and libc.mprotect(page, size, mmap.PROT_READ | mmap.PROT_WRITE):
        return False
    ctypes.c_void_p.from_address(slot).value = value
    if not writable:
        libc.mprotect(page, size, mmap.PROT_READ)
    return True


_own = list[Path]()
"""Sockets on which this process listens, through which the processes that it starts reach it."""


def removed_sockets() -> str:
    """Explain that sockets of this process were removed, so that it can start no process; "" if they are there."""
    if all(path.exists() for path in _own):
        return ""
    return (
        f"sockets in {_own[0].parent} were removed, as cleaners of temporary files do, and no process can be started "
        "without them; exclude the folder from cleaning, and resume the run"
    )


LOG_NOTICE = b"Monarch internal logs are being written to "
UNAWAITED = r"coroutine '(ProcMesh|HostMesh|ActorMesh)\b.* was never awaited"
"""Warning about Monarch's calls that are in progress when the process ends."""


def listen_below(folder: Path) -> None:
    """Have Monarch in this process listen on sockets in a folder, whose mode decides who may connect. By default every
    user of the machine may connect. Must be called before Monarch is first used; later calls change nothing, because
    Monarch cannot be restarted. So the folder must exist for the lifetime of the process.
    """
    from monarch.actor import enable_transport

    with contextlib.suppress(RuntimeError):  # Monarch is in use already
        enable_transport(f"ipc://{folder}/monarch")
    _start(folder)


def listen_on(address: str, folder: Path) -> None:
    """Have Monarch in this process listen at an address that other machines reach, on a port that the system chooses.

    Args:
        address: Address of an interface of this machine.
        folder: Folder for the sockets between processes of this machine; see `listen_below`.

    Raises:
        ConfigError: This machine has no such address, or this process has already used Monarch, which listens
            elsewhere.
    """
    from monarch.actor import enable_transport

    transport = f"tcp://{f'[{address}]' if ':' in address else address}:0"
    try:
        enable_transport(transport)
    except RuntimeError:
        raise ConfigError(
            "hosts: Monarch already listens for runs on this machine only, and cannot be restarted; start a run with "
            "other hosts in a separate process"
        ) from None
    _start(folder)


@contextlib.contextmanager
def without_log_notice() -> Generator[None]:
    """Context manager that suppresses Monarch's line about its log, which Monarch writes to standard error when it
    starts. Other output to standard error appears at the end of the block."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held, contextlib.ExitStack() as resources:
        terminal = os.dup(2)
        resources.callback(os.close, terminal)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            held.seek(0)
            for line in held:
                if not line.startswith(LOG_NOTICE):
                    os.write(2, terminal_text(line.decode(errors="replace")).encode())


def _start(folder: Path) -> None:
    from monarch.actor import context

    bind_below(folder)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)  # Monarch makes a folder there for the sockets of the processes that it starts
    try:
        with without_log_notice():
            context()
        _own.extend([] if _own else filter(Path.is_socket, folder.iterdir()))
        warnings.filterwarnings("ignore", UNAWAITED, RuntimeWarning)
        atexit.unregister(_shut_down)
        atexit.register(_shut_down)
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _shut_down() -> None:
    """Shut Monarch down at the end of the process, before Monarch does so itself. Monarch waits for a second, too, but
    then prints a traceback, for example if processes were still starting."""
    from monarch.actor import shutdown_context

    with contextlib.suppress(Exception):
        shutdown_context(host_timeout=0.3).get(timeout=1.0)
