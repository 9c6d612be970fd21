"""Monarch listens only on sockets of this user, and prints nothing when it starts and when the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

PROGRAM = """
import os, sys
from pathlib import Path
from titan_rl.cluster.processes.sockets import listen_below
from titan_rl.cluster.processes.sockets import has_abstract_sockets
from monarch.actor import Actor, endpoint, this_host

class Child(Actor):
    @endpoint
    async def listens_openly(self):
        return has_abstract_sockets()

listen_below(Path(sys.argv[1]))
processes = this_host().spawn_procs({"procs": 2}, name="child")
seen = [openly for _, openly in processes.spawn("child", Child).listens_openly.call().get()]
processes.stop().get()
print(seen, has_abstract_sockets())
print(*sorted(os.listdir(sys.argv[1])))
"""


def started(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "program.py"
    file.write_text(program)
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, str(file), str(folder)], capture_output=True, text=True, timeout=HANG_S, env=environment
    )


def test_no_process_listens_on_an_abstract_socket(tmp_path: Path) -> None:
    done = started(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "[False, False] False"
    sockets = [name for name in done.stdout.splitlines()[1].split() if not name.startswith(".")]
    assert len(sockets) == 4, "the gateway, the back end, and one for the start of each child"
    assert done.stderr == ""


PROGRAM_WITH_STDERR = """
import os, sys
from titan_rl.cluster.processes.sockets import LOG_NOTICE, without_log_notice
os.write(2, b"before\\n")
try:
    with without_log_notice():
        os.write(2, LOG_NOTICE + b"/tmp\\n")
        print("within", file=sys.stderr)
        raise OSError("no start")
except OSError:
    os.write(2, b"after\\n")
"""


def test_other_stderr_output_survives_hiding_the_log_notice(tmp_path: Path) -> None:
    assert started(tmp_path, PROGRAM_WITH_STDERR).stderr == "before\nwithin\nafter\n"


ENDING = """
import sys
from pathlib import Path
from monarch._rust_bindings.monarch_hyperactor import handle, host_mesh
from titan_rl.cluster.processes.sockets import listen_below

class ProcMesh:
    async def stop(self): ...

listen_below(Path(sys.argv[1]))
never = handle._new_handle_pair()
host_mesh.shutdown_local_host_mesh = lambda timeout: never[0]
ProcMesh().stop()
print("last line", file=sys.stderr)
"""


def test_end_of_the_process_prints_nothing_even_if_monarch_does_not_shut_down_in_time(tmp_path: Path) -> None:
    done = started(tmp_path, ENDING)
    assert (done.returncode, done.stderr) == (0, "last line\n")


REMOVING = """
import sys
from pathlib import Path
from titan_rl.cluster.processes.sockets import listen_below, removed_sockets

folder = Path(sys.argv[1])
print(repr(removed_sockets()))
listen_below(folder)
print(repr(removed_sockets()))
(folder / "monarch").unlink()
print(removed_sockets())
"""


def test_removed_sockets_are_named(tmp_path: Path):
    before, there, removed = started(tmp_path, REMOVING).stdout.splitlines()
    assert before == there == "''"
    assert removed.startswith(f"sockets in {tmp_path / 's'} were removed, as cleaners of temporary files do, and no")
