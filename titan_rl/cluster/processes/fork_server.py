"""Fork servers: processes that have imported torch or vLLM, from which trainers and generators are forked.

Importing vLLM takes half of the time until a generator can serve, and a run starts several generators and a trainer
that import the same modules, as do their replacements. With fork servers each module is imported once, while the
controller still sets up the run, and the forked processes share the memory of what was imported. Commands that a run
starts, such as the server of a teacher, use the servers of the run.

    fork_servers        in the controller: starts the servers
    bootstrap_command   in the controller: waits for a server, and makes the command with which Monarch starts a process
    launch              program that Monarch starts: asks a server for a process, and ends as that process ends
    ForkServer          in a server: forks a process for each launcher

The server of the last kind imports torch and then forks the others, so that all import the rest at the same time; they
end with it. A server runs no threads and computes nothing, so a forked process is like a new one. If a server dies, so
do its processes, and their replacements are started without it.

This file also runs as a standalone program, so it imports the rest of titan_rl only when it needs it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

    from titan_rl.config.run import RunConfig
    from titan_rl.config.serve import ServeConfig

logger = logging.getLogger(__name__)

_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)
"""Folder with the sockets of the servers of the current run, which have the names of their kinds."""

COMMON = ("torch", "transformers", "torch._inductor.compile_fx", "titan_rl.config.run")
MODULES = {
    "trainer": ("titan_rl.training.adapter_trainers", "titan_rl.training.publishing"),
    "generator": ("titan_rl.generation.loop.engine_loop", "titan_rl.generation.vllm_modules"),
}
"""Modules that the server of each kind imports after those of `COMMON`."""

SERVERS = "TITAN_RL_FORK_SERVERS"
"""Environment variable with the Python installation of a run's servers, a colon, and the folder of their sockets."""

BOOTSTRAP = "monarch._src.actor.bootstrap_main"  # Monarch's main module of a process
REQUEST_S = 10.0  # time for a launcher to send its request
FORK_S = 10.0  # time for a server to fork. After it, and after READY_S, a process is started without a server
LOOK_S = 0.1
ORPHAN_S = 1.0  # interval at which a launcher checks that the command that started it is there
READY_S = 120.0  # time for a server to import its modules
ERRORS = "errors.log"  # standard error of the servers
STARTING = ".starting"  # ends the name of a server's socket until it has imported its modules
FORKED = b"f"


def forked_kinds(config: RunConfig | ServeConfig, *, trains: bool, generates: bool) -> list[str]:
    """Kinds of the processes that a command forks from servers: those on this machine with modules that take seconds to
    import. With a GPU there are none, because a process whose libraries have initialized the driver cannot be forked,
    and on several hosts there are none.

    Args:
        trains, generates: Whether the command starts a trainer, and whether it starts generators.
    """
    from titan_rl.generation.gpu_share import has_gpu_driver

    hosts = config.hosts
    if not hasattr(os, "pidfd_open") or hosts.addresses or hosts.provider is not None or has_gpu_driver():
        return []
    return ["trainer"] * trains + ["generator"] * (generates and config.generation.engine == "vllm")


@contextlib.contextmanager
def fork_servers(kinds: Sequence[str]) -> Generator[None]:
    """Context manager: start a fork server of each of these kinds. They end with the block, and so do their processes,
    which have the file modes of this process."""
    if not kinds:
        yield
        return
    if (inherited := _inherited(kinds)) is not None:
        token = _folder.set(inherited)
        try:
            yield
        finally:
            _folder.reset(token)
        return
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="", ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as own:
        listeners: dict[str, socket.socket] = {}
        for kind in kinds:
            listeners[kind] = own.enter_context(socket.socket(socket.AF_UNIX))
            listeners[kind].bind(f"{folder}/{kind}{STARTING}")
            listeners[kind].listen(128)
        errors = own.enter_context((Path(folder) / ERRORS).open("wb"))
        # -P keeps Python from searching for modules in this file's folder. The new session protects it from Ctrl-C.
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), folder]
            + [f"{kind}={listener.fileno()}" for kind, listener in listeners.items()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # numpy would start threads, and a server must have none
            pass_fds=[listener.fileno() for listener in listeners.values()],
            start_new_session=True,
        )
        own.close()  # launchers are refused when the server is gone
        token = _folder.set(Path(folder))
        os.environ[SERVERS] = f"{sys.prefix}:{folder}"
        try:
            yield
        finally:
            os.environ.pop(SERVERS, None)
            if server.poll() is not None:
                output = (Path(folder) / ERRORS).read_text(errors="replace").strip().rpartition("\n")[2]
                logger.warning("a fork server ended before the run, with code %d: %s", server.returncode, output)
            server.kill()
            server.wait()
            _folder.reset(token)


def _inherited(kinds: Sequence[str]) -> Path | None:
    """Folder of the servers of the run that started this command, if they can fork these kinds."""
    prefix, _, folder = os.environ.get(SERVERS, "").rpartition(":")
    if prefix != sys.prefix:
        return None
    has_all = all(_listens(Path(folder) / kind) or _listens(Path(folder) / f"{kind}{STARTING}") for kind in kinds)
    return Path(folder) if has_all else None


def servers_of_run() -> Path | None:
    """Folder of the fork servers of the run that this context belongs to; None if it has none."""
    return _folder.get()


async def bootstrap_command(servers: Path | None, kind: str | None, environment: Mapping[str, str]) -> BootstrapCommand:
    """Command with which Monarch starts a process on this machine: forked from the server of its kind, if there is one.
    Waits for the server first, because Monarch loses a process that takes half a minute to begin.

    Args:
        servers: Folder of the fork servers.
        environment: Variables of the process, in addition to those of this one.
    """
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
    from monarch.actor import default_bootstrap_cmd

    if servers is None or kind is None or not await wait_until_ready(servers, kind):
        return default_bootstrap_cmd().with_env(dict(environment))
    path = servers / kind
    return BootstrapCommand(sys.executable, None, ["-I", "-S", __file__, "launch", str(path)], dict(environment))


async def wait_until_ready(servers: Path, kind: str) -> bool:
    """Wait until a server has imported its modules. False if there is none, it has died, or `READY_S` are over."""
    import asyncio

    deadline = time.monotonic() + READY_S
    while not (servers / kind).is_socket():
        if not _listens(servers / f"{kind}{STARTING}") and not (servers / kind).is_socket():
            return False
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(os.fspath(path))
        except BlockingIOError:  # others wait already
            return True
        except OSError:
            return False
    return True


def launch(path: str) -> None:
    """Have a server fork a process with the environment, folder and standard streams of this one, and end as it ends.
    If there is no server, become the process."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C is for the controller
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(FORK_S)
    answer = b""
    with contextlib.suppress(OSError):
        connection.connect(path)
        request = json.dumps({"environment": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(request)
        answer = connection.recv(1)
    if os.getppid() != parent:
        os._exit(1)  # the controller has ended, and the server with it
    if answer != FORKED:
        connection.close()  # a server that was late ends what it forks
        os.execv(sys.executable, [sys.executable, "-m", BOOTSTRAP])
    connection.settimeout(ORPHAN_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process handles it. The server kills it if this program dies.
    status = -signal.SIGKILL
    while True:
        try:
            status = int(connection.recv(16))  # empty if the server has died, and the process with it
        except TimeoutError:
            if os.getppid() != parent:
                os._exit(1)  # the server ends the process
            continue
        except (OSError, ValueError):
            pass
        break
    if status < 0:
        with contextlib.suppress(OSError):  # the effect of SIGKILL cannot be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


@dataclass(slots=True)
class _Forked:
    """Process that was forked for a launcher."""

    pid: int
    descriptor: int  # readable once the process has ended
    launcher: socket.socket


@dataclass(slots=True)
class Request:
    """Request of a launcher: what its process takes over from it."""

    environment: Mapping[str, str]
    folder: str
    streams: Sequence[int]


class ForkServer:
    """Server that forks a process for each launcher that connects.

    Args:
        listener: Socket to which launchers connect.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._by_process: dict[int, _Forked] = {}
        self._by_launcher: dict[int, _Forked] = {}

    def serve(self) -> Request:
        """Serve forever. Returns only in a forked process, with the request for it."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._listener.fileno():
                    if (request := self._fork()) is not None:
                        return request
                elif (forked := self._by_process.get(descriptor)) is not None:
                    self._ended(forked)
                elif (forked := self._by_launcher.get(descriptor)) is not None:
                    os.kill(forked.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
                    self._poll.unregister(descriptor)

    def _fork(self) -> Request | None:
        """Fork a process for the next launcher. Returns its request in the process, and None in the server."""
        launcher, _ = self._listener.accept()
        streams: list[int] = []
        is_forked = False
        try:
            request = _receive(launcher, streams)
            _require_single_thread()
            pid = os.fork()
            if not pid:
                is_forked = True
                self._leave(launcher)
                return request
            self._watch(pid, launcher)
        except (OSError, ValueError, TypeError, KeyError):
            launcher.close()  # it has ended, is no launcher, or starts its process without this server
        finally:
            if not is_forked:
                for stream in streams:
                    os.close(stream)
        return None

    def _watch(self, pid: int, launcher: socket.socket) -> None:
        try:
            forked = _Forked(pid, os.pidfd_open(pid), launcher)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._by_process[forked.descriptor] = self._by_launcher[launcher.fileno()] = forked
        self._poll.register(forked.descriptor, select.POLLIN)
        self._poll.register(launcher, select.POLLIN)
        with contextlib.suppress(OSError):  # the poll finds the end of the launcher
            launcher.sendall(FORKED)

    def _leave(self, launcher: socket.socket) -> None:
        """Close the descriptors of the server in a forked process."""
        self._listener.close()
        launcher.close()
        for other in self._by_process.values():
            os.close(other.descriptor)
            other.launcher.close()

    def _ended(self, forked: _Forked) -> None:
        _, status = os.waitpid(forked.pid, 0)
        del self._by_process[forked.descriptor], self._by_launcher[forked.launcher.fileno()]
        self._poll.unregister(forked.descriptor)
        with contextlib.suppress(KeyError):
            self._poll.unregister(forked.launcher)
        os.close(forked.descriptor)
        with contextlib.suppress(OSError):
            forked.launcher.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        forked.launcher.close()


def _receive(launcher: socket.socket, streams: list[int]) -> Request:
    """Receive a launcher's request, and add the descriptors in it to `streams`.

    Raises:
        OSError: The launcher has ended, or sends nothing.
        ValueError, TypeError, KeyError: It sends something else.
    """
    launcher.settimeout(REQUEST_S)
    begin, received, _, _ = socket.recv_fds(launcher, 8, 3)
    streams += received
    content = bytearray()
    while len(content) < int.from_bytes(begin, "big"):
        if not (part := launcher.recv(1 << 16)):
            raise ConnectionResetError
        content += part
    launcher.settimeout(None)
    found = json.loads(content)
    return Request(found["environment"], found["folder"], streams)


def _require_single_thread() -> None:
    """Check that this process has no other thread, which might hold a lock that a forked process would never get.

    Raises:
        OSError: It has.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise BlockingIOError("a process with threads cannot be forked")


def _become(request: Request) -> None:
    """Turn this forked process into what its launcher would have become."""
    import runpy

    for target, stream in enumerate(request.streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.path[0] = request.folder
    sys.argv = [BOOTSTRAP]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # the module `random` does so itself
    runpy.run_module(BOOTSTRAP, run_name="__main__", alter_sys=True)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main(parent: int, folder: Path, listeners: dict[str, int]) -> None:
    """Run the servers that were started by the process `parent`.

    Args:
        folder: Folder of their sockets.
        listeners: Descriptors of their sockets by kind.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all processes of a job
    _end_with(parent)
    sys.path.insert(0, os.getcwd())  # as Python does with -m
    gc.disable()  # modules keep what they make
    for module in COMMON:
        importlib.import_module(module)
    _require_single_thread()
    sockets = {kind: socket.socket(fileno=descriptor) for kind, descriptor in listeners.items()}
    *others, kind = sockets
    for other in others:
        own = os.getpid()
        if not os.fork():
            _end_with(own)
            kind = other
            break
    for other, listener in sockets.items():
        if other != kind:
            listener.close()
    for module in MODULES[kind]:
        importlib.import_module(module)
    gc.freeze()  # a collection in a forked process would copy the memory that it looks at
    os.rename(folder / f"{kind}{STARTING}", folder / kind)
    server = os.getpid()
    request = ForkServer(sockets[kind]).serve()
    _end_with(server)
    gc.enable()
    _become(request)


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[2])
    else:
        descriptors = (word.partition("=") for word in sys.argv[3:])
        main(int(sys.argv[1]), Path(sys.argv[2]), {kind: int(given) for kind, _, given in descriptors})
