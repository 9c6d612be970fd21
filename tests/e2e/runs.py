"""Commands run in separate processes, with access to their output, files, processes and leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from background import HANG_S

from titan_rl.metrics.table import find_metric

REPOSITORY = Path(__file__).parents[2]
RUN_S = 480.0
"""Limit of a wait for a run: enough on a busy machine, and below the test timeout, which ends pytest's process."""
QUICK = {
    "generation.num_generators": 1,
    "training.steps": 3,
    "scheduling.groups_per_step": 4,
    "rollout.group_size": 4,
    "validation.num_prompts": 4,
    "validation.samples_per_prompt": 2,
    "generation.start_timeout_s": 900,
}


class Run:
    """A `titan-rl train` or another command, shortened by `QUICK`. An environment variable marks its processes."""

    def __init__(self, folder: Path, config: str, settings: dict[str, object], command: str = "train") -> None:
        self._command = command
        self._mark = f"TITAN_RL_TEST_RUN={uuid.uuid4().hex}"
        self.scratch = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short, because it contains sockets
        self._runs = folder / "runs"
        self._output = folder / "output.txt"
        arguments = [config]
        for key, value in (QUICK | settings | {"run_dir": str(self._runs)}).items():
            arguments += [f"--{key}", str(value)]
        self._start(arguments)

    def resume(self, *overrides: str) -> None:
        """Continue the run in a new process."""
        self._start(["--resume", str(self.folder), *overrides])

    def _start(self, arguments: list[str]) -> None:
        name, _, value = self._mark.partition("=")
        environment = os.environ | {"TMPDIR": str(self.scratch), name: value}
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "titan_rl.cli.main", self._command, *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_restore_sigint,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def folder(self) -> Path:
        (folder,) = [path for path in self._runs.iterdir() if not path.is_symlink()]
        return folder

    def metrics(self) -> list[dict[str, float]]:
        """Read the records of `metrics.jsonl`, and check that each metric is documented."""
        records: list[dict[str, float]] = []
        with contextlib.suppress(FileNotFoundError, ValueError):
            lines = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
            records = [json.loads(line) for line in lines if line.endswith("\n")]
        names = {name for record in records for name in record} - {"step", "time_s"}
        assert sorted(name for name in names if find_metric(name) is None) == []
        return records

    def wait_for_step(self, step: int, timeout_s: float = RUN_S) -> None:
        """Wait until optimizer step `step` is recorded, while the command runs."""
        deadline = time.monotonic() + timeout_s
        while not any("train/loss" in record and record["step"] >= step for record in self.metrics()):
            assert self.process.poll() is None, f"the run ended before step {step}:\n{self.output}"
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s} s:\n{self.output}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = RUN_S) -> None:
        """Wait until the condition holds, while the command runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)

    def wait(self, timeout_s: float = RUN_S) -> int:
        return self.process.wait(timeout_s)

    def child(self, name: str) -> int:
        """Process id of the actor whose output goes to `logs/<name>.log`."""
        return process_writing_to(self.folder / "logs" / f"{name}.log")

    def processes(self) -> list[int]:
        """Ids of all living processes of this run."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0") and state not in "ZX":
                    found.append(int(entry.name))
        return found

    def listeners(self) -> list[str]:
        """Unix sockets that the processes listen on: paths, and names of abstract sockets, which begin with "@"."""
        own: set[str] = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                own |= {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return [row[7] for row in rows if len(row) > 7 and row[3] == "00010000" and f"socket:[{row[6]}]" in own]

    def trained_groups(self) -> dict[int, list[str]]:
        """Groups that each step was trained on, from the transcripts, which must include each group."""
        found: dict[int, list[str]] = {}
        for line in (self.folder / "rollouts.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["phase"] == "train" and "dropped" not in record:
                groups = found.setdefault(record["step"], [])
                if record["sibling"] == 0:
                    groups.append(record["group_id"])
        return found

    def wait_until_nothing_is_left(self) -> None:
        """Wait for the kernel to end the processes of a controller that is gone."""
        deadline = time.monotonic() + HANG_S
        while left := self.leftovers():
            assert time.monotonic() < deadline, f"a controller that is gone leaves {left}"
            time.sleep(0.1)

    def leftovers(self) -> list[str]:
        """Processes, shared-memory segments and temporary files of a run that has ended."""
        run_id = self.folder.name
        processes = [f"process {pid}" for pid in self.processes()]
        segments = [str(path) for path in Path("/dev/shm").glob(f"*{run_id}*")]
        scratch = [  # os.walk skips files that are removed meanwhile
            os.path.join(folder, name)
            for folder, folders, files in os.walk(self.scratch)
            for name in (*folders, *files)
        ]
        return processes + segments + scratch


def _restore_sigint() -> None:
    """Restore the default handler of SIGINT, which shells make background commands and their children ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def process_writing_to(log: Path) -> int:
    """Id of the actor process whose standard output is this file. Its helper processes write to the same file."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # not a process, gone by now, or another user's
            command = (entry / "cmdline").read_bytes()
            is_actor = b"monarch._src.actor.bootstrap_main" in command or b"fork_server.py" in command
            if is_actor and os.readlink(entry / "fd" / "1") == str(log.resolve()):
                return int(entry.name)
    raise ProcessLookupError(f"no process writes to {log}")


@contextlib.contextmanager
def run_training(
    folder: Path, *, config: str = "examples/alphabet_sort/cpu.toml", command: str = "train", **settings: object
) -> Iterator[Run]:
    """Start a run, and kill it and its children if the test ends first.

    Settings are named with double underscores for dots: `training__steps=2`.
    """
    run = Run(folder, config, {key.replace("__", "."): value for key, value in settings.items()}, command)
    try:
        yield run
    finally:
        for pid in {run.process.pid, *run.processes()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
        shutil.rmtree(run.scratch)
