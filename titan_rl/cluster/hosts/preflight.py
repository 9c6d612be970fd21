"""What keeps hosts from taking part in a run, as one error, before anything of the run is spawned there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path

from titan_rl.cluster.hosts.facts import MISSING, HostFacts
from titan_rl.config.hosts import HostsConfig, Roles
from titan_rl.core.errors import ConfigError

KEPT_VERSIONS = 2  # of the weights, in shared memory
UNITS = (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """What a run has to find on its hosts.

    Args:
        run_dir: the run's folder; what is in `logs` and `trace` below it arrives from every host.
        model: the model's folder.
        modules: which settings name, and PYTHONPATH helps to find.
        train_gpus, generate_gpus: of one host, where hosts have any.
        trains, generates: whether there is a trainer, and generators.
    """

    run_dir: Path
    model: Path
    modules: tuple[str, ...] = ()
    train_gpus: int = 0
    generate_gpus: int = 0
    trains: bool = True
    generates: bool = True

    def roles(self, config: HostsConfig, hosts: Sequence[str], *, begins: bool = True) -> Roles:
        """Those that hosts of these names have in the run, which may have fewer than settings name once it goes on.

        Raises:
            ConfigError: a role needs more hosts than there are.
        """
        if not begins:
            wanted = {name: getattr(config, name) for name in ("train", "generate", "play")}
            fewer = {name: number and min(number, len(hosts)) for name, number in wanted.items()}
            config = config.model_copy(update=fewer)
        roles = Roles.of(config, hosts)
        return Roles(roles.train if self.trains else (), roles.generate if self.generates else (), roles.play)


@dataclass(frozen=True, slots=True)
class HostDifference:
    """One thing that keeps a host from taking part."""

    host: str
    what: str
    expected: str
    found: str
    fix: str


def check_hosts(
    expected: HostFacts, found: Mapping[str, HostFacts], needs: HostNeeds, roles: Roles, *, sync: bool = False
) -> None:
    """
    Args:
        expected: what the controller's machine has.
        found: of each host by its name.
        roles: what the hosts are to do.
        sync: the model and the modules are brought to whom lacks them.

    Raises:
        ConfigError: a table of all differences.
    """
    different: list[HostDifference] = []
    for name, facts in found.items():
        different += _versions(expected, name, facts)
        if not sync:
            different += _files(expected, name, facts, needs)
        if name in roles.train and not facts.sees_run:
            fix = "name hosts first that see it, or set run_dir to a folder of a file system that all share"
            different.append(HostDifference(name, "run_dir", f"{needs.run_dir}", "not there", fix))
        different += _room(expected.model_bytes, name, facts, roles)
    different += _gpus(found, "training", roles.train, needs.train_gpus)
    different += _gpus(found, "generating", roles.generate, needs.generate_gpus)
    if different:
        raise ConfigError(f"hosts lack what the run needs:\n{table(different)}")


def _versions(expected: HostFacts, name: str, facts: HostFacts) -> Iterator[HostDifference]:
    for package, version in expected.versions.items():
        found = facts.versions.get(package, MISSING)
        if found != version:
            yield HostDifference(name, package, version, found, _install(package, version))


def _install(package: str, version: str) -> str:
    if package == "python":
        return f"run the worker there by Python {version}"
    if package == "titan_rl":
        return "install the same titan_rl there"
    return f"pip uninstall {package}" if version == MISSING else f"pip install {package}=={version}"


def _files(expected: HostFacts, name: str, facts: HostFacts, needs: HostNeeds) -> Iterator[HostDifference]:
    if facts.model != expected.model:
        nothing = f"no {needs.model}" if facts.model is None else f"nothing of a model in {needs.model}"
        there = f"checksum {facts.model}" if facts.model else nothing
        fix = "copy the folder there, or set hosts.sync = true"
        yield HostDifference(name, "model", f"checksum {expected.model}", there, fix)
    for module, problem in facts.missing.items():
        if module not in expected.missing:
            fix = "copy its folder there, or set hosts.sync = true"
            yield HostDifference(name, f"module {module}", "found", problem, fix)


def _room(model_bytes: int, name: str, facts: HostFacts, roles: Roles) -> Iterator[HostDifference]:
    """What cannot do: a host's processes hold the model at least once, and its shared memory the versions of it that
    are kept, of which each training host has a part."""
    if name not in (*roles.train, *roles.generate):
        return
    if facts.memory < model_bytes:
        fix = "free memory there, or leave the host out"
        yield HostDifference(name, "memory", f"{_size(model_bytes, ceil)} free", _size(facts.memory, floor), fix)
    shared = KEPT_VERSIONS * model_bytes // (1 if name in roles.generate else len(roles.train))
    if facts.shared_memory < shared:
        fix = f"mount -o remount,size={ceil(2 * shared / (1 << 20))}M /dev/shm"
        found = _size(facts.shared_memory, floor)
        yield HostDifference(name, "/dev/shm", f"{_size(shared, ceil)} free", found, fix)


def _gpus(found: Mapping[str, HostFacts], what: str, hosts: tuple[str, ...], needed: int) -> Iterator[HostDifference]:
    """Where one of the hosts of a role has GPUs, all are to have enough."""
    having = [name for name in hosts if name in found and found[name].gpus]
    for name in hosts:
        if having and name in found and len(found[name].gpus) < needed:
            fix = "leave the host out, give it another role, or see CUDA_VISIBLE_DEVICES of its worker"
            yield HostDifference(name, f"GPUs, {what}", f"{needed}", f"{len(found[name].gpus)}", fix)


def _size(size: int, whole: Callable[[float], int]) -> str:
    """In tenths, which `whole` makes of a float: what is needed upwards and what is there downwards, so that the two
    never look the same."""
    unit, name = next((each for each in UNITS if size >= each[0]), UNITS[-1])
    return f"{whole(10 * size / unit) / 10:.1f} {name}"


def table(different: list[HostDifference]) -> str:
    """
    Example:
        host    what   expected  found   fix
        node-2  torch  2.13.0    2.12.1  pip install torch==2.13.0
    """
    rows = [("host", "what", "expected", "found", "fix")]
    rows += [(each.host, each.what, each.expected, each.found, each.fix) for each in different]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
