"""Table [hosts]: the machines of a run and the providers that start workers on them.

The settings are checked before any process starts, and without any network access.
"""

from __future__ import annotations

import ipaddress
import math
import re
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FunctionName, PathText, Section, TakesEffect, matching, refusal

WORKER_DRAIN_S = 120
"""Default of a worker's --drain-s, in seconds."""
DETACH_S = 60
"""Time for the steps that follow once a host is drained, in seconds."""

NAMES = ("ssh", "slurm", "kubernetes")
"""Built-in providers; see `titan_rl.cluster.providers.registry`."""


_WITH_PROVIDER = TakesEffect("hosts.provider", none_of=(None,), without="without hosts.provider", fix="set that")
_BY_NAME = TakesEffect("hosts.provider", none_of=(None, "slurm", "kubernetes"), fix='set that to "ssh"')
_BY_NUMBER = TakesEffect("hosts.provider", none_of=(None, "ssh"), fix='set that to "slurm" or "kubernetes"')
ON_SEVERAL_HOSTS = TakesEffect(
    "hosts.elsewhere", one_of=(True,), without="on one machine", fix="set hosts.addresses or hosts.provider"
)


def split_list(value: object) -> object:
    """Split text at commas, because the command line gives lists in this form. Empty text is an empty list. Other
    values are returned unchanged."""
    if value == "":
        return []
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_Line = Annotated[str, matching(r".*\S.*", "must be one line of text")]


def _seconds(time_limit: str) -> float:
    """Parse a time limit of Slurm to seconds: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. For Slurm, 0 means no limit.

    Return infinity for no limit and for any other text, which sbatch accepts or refuses by itself.
    """
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", time_limit):
        return math.inf
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False)) or math.inf


REPLACED_BY_SETTINGS = {
    "--nodes": "count",
    "-N": "count",
    "--signal": "drain_s",
    "--output": "run_dir",
    "-o": "run_dir",
}
"""Options of sbatch that the job's script sets itself, and the setting to use instead."""
AGAINST_THE_SCRIPT = {
    "--array": "a job is one run: submit each run separately",
    "-a": "a job is one run: submit each run separately",
    "--chdir": "paths are relative to the folder where a run is submitted: submit it from that folder",
    "-D": "paths are relative to the folder where a run is submitted: submit it from that folder",
}
"""Options of sbatch that would break the job, and what to do instead."""


def _split_option(option: str) -> tuple[str, str]:
    """Split an option of sbatch: "-N5" is ("-N", "5"), and "--nodes=5" is ("--nodes", "5")."""
    if re.match(r"-\w", option):
        return option[:2], option[2:].strip()
    name, _, value = option.replace("=", " ", 1).partition(" ")
    return name, value.strip()


def _host(text: str) -> str:
    host, equals, address = text.partition("=")
    if not host or host.startswith("-") or host.split() != [host]:
        raise refusal("must be a host name as ssh accepts it, without spaces and options")
    if not equals:
        return host
    try:
        return f"{host}={ipaddress.ip_address(address)}"
    except ValueError:
        raise refusal("must have an IP address after =") from None


def _words(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise refusal(f"must be words as in a shell: {error}") from None
    if not words:
        raise refusal("must name a command")
    return text


Quantity = Annotated[
    str,
    matching(
        r"(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?",
        'must be a quantity as Kubernetes accepts it: "8", "500m" or "64Gi"',
    ),
]


class KubernetesConfig(Section):
    """Objects that `titan-rl launch` creates with `hosts.provider = "kubernetes"`: workers as a StatefulSet, the
    controller as a Job. Experimental."""

    image: Annotated[str, matching(r"\S*", "must be an image's name, without spaces")] = ""
    """Container image, with titan_rl and the task installed unless they are on the volume."""
    volume: Annotated[str, matching(r"([^\s:]+(:/[^\s:]+)?)?", "must be CLAIM or CLAIM:/FOLDER, without spaces")] = ""
    """A PersistentVolumeClaim that all pods mount, with the model and for the run's folder: "claim", which is mounted
    at /workspace, or "claim:/folder". That is the current folder of the run and of its workers."""
    resources: Mapping[str, Quantity] = Field(default={}, strict=False)
    """Requests and limits of each worker: { "nvidia.com/gpu" = "8", memory = "200Gi", cpu = "32" }."""
    controller_resources: Mapping[str, Quantity] = Field(default={}, strict=False)
    """Requests and limits of the controller."""
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm in each pod, which is used to transfer weights and by PyTorch's processes."""

    @property
    def claim(self) -> str:
        return self.volume.partition(":")[0]

    @property
    def folder(self) -> str:
        return self.volume.partition(":")[2] or "/workspace"


class ProviderSettings(Section):
    """Settings of the host provider, which starts the workers of a run."""

    provider: Annotated[str, FunctionName(NAMES, ("spec",), may_be_class=False)] | None = None
    """Host provider, which starts a worker on each host: over ssh, in a Slurm allocation, or as Kubernetes pods
    (experimental). A function of yours takes a `titan_rl.cluster.providers.spec.ProviderSpec` and returns an async
    context manager of the workers' addresses."""
    names: Annotated[
        tuple[Annotated[str, AfterValidator(_host)], ...], BeforeValidator(split_list), Field(strict=False), _BY_NAME
    ] = ()
    """Hosts to reach over ssh, as a list or separated by commas: a name, user@name, or an alias of ~/.ssh/config; ssh
    must not ask for a password. "gpu-1=10.1.0.1" also sets the IP address at which its worker listens, if that differs
    from what the name resolves to on this machine."""
    count: Annotated[PositiveInt, _BY_NUMBER] = 1
    """Number of hosts that `titan-rl launch` requests: Slurm nodes, or Kubernetes pods, in addition to the controller's
    pod."""
    options: Annotated[tuple[_Line, ...], Field(strict=False), _WITH_PROVIDER] = ()
    """Options of the provider's command. ssh: each word by itself, ["-p", "2222", "-i", "key"]. sbatch:
    ["--partition=gpu", "--gpus-per-node=8", "--time=24:00:00"]; with "--no-requeue" a job whose time is up ends,
    instead of being requeued to continue the run. kubectl: ["--context=far", "--namespace=team"]."""
    port: Annotated[int, _WITH_PROVIDER] = Field(default=22222, ge=0, le=65535)
    """Port of the provider's workers; with 0 each takes a free one, except with kubernetes."""
    command: Annotated[Annotated[str, AfterValidator(_words)] | None, _WITH_PROVIDER] = None
    """Command that runs titan-rl on the hosts; by default that of this process, and titan-rl with kubernetes."""
    drain_s: Annotated[NonNegativeFloat, ON_SEVERAL_HOSTS] = 60.0
    """Time for a draining host to finish its requests, save the trainer and be replaced; remaining work then continues
    elsewhere. A provider's worker waits one minute longer after SIGTERM, and at least two minutes; a Slurm job starts
    to stop as long before its time limit. A worker that is started by hand waits for its own --drain-s."""
    setup: Annotated[
        tuple[_Line, ...],
        Field(strict=False),
        TakesEffect("hosts.provider", one_of=("slurm",)),
    ] = ()
    """Shell commands that a Slurm job runs first: ["module load cuda"]."""
    kubernetes: Annotated[KubernetesConfig, TakesEffect("hosts.provider", one_of=("kubernetes",))] = KubernetesConfig()

    @property
    def worker_drain_s(self) -> int:
        """Time, in seconds, that a worker waits after SIGTERM for its runs to drain its host, and that a Slurm job has
        to end in order."""
        return max(WORKER_DRAIN_S, math.ceil(self.drain_s) + DETACH_S)

    @property
    def named_hosts(self) -> dict[str, str]:
        """Addresses of the hosts in `names`, by host; "" if none is given."""
        pairs = (name.partition("=") for name in self.names)
        return {host: address for host, _, address in pairs}

    @model_validator(mode="after")
    def _has_provider_settings(self) -> Self:
        if self.provider == "ssh" and not self.names:
            raise ValueError('provider = "ssh" needs names, the names of the hosts')
        hosts = [name.partition("=")[0] for name in self.names]
        if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
            raise ValueError(f"names: {', '.join(twice)} is listed more than once; list each host once")
        if self.provider == "kubernetes" and not self.port:
            raise ValueError('port = 0 with provider = "kubernetes": its Service must name a fixed port; set one')
        for name in ("image", "volume") if self.provider == "kubernetes" else ():
            if not getattr(self.kubernetes, name):
                raise ValueError(f'provider = "kubernetes" needs kubernetes.{name}; set it')
        return self

    @model_validator(mode="after")
    def _options_are_of_the_job(self) -> Self:
        for option in self.options if self.provider == "slurm" else ():
            if not option.startswith("-"):
                raise ValueError(f"options has {option!r}, which must begin with -, as --partition=gpu does")
            name, value = _split_option(option)
            if setting := REPLACED_BY_SETTINGS.get(name):
                raise ValueError(f"options has {option!r}, which the job's script sets itself; set {setting} instead")
            if problem := AGAINST_THE_SCRIPT.get(name):
                raise ValueError(f"options has {option!r}, and {problem}")
            if name in ("--time", "-t") and self.worker_drain_s >= _seconds(value):
                raise ValueError(
                    f"options has {option!r}, and a job starts to stop {self.worker_drain_s} s before its time limit "
                    f"({DETACH_S} s more than drain_s, at least {WORKER_DRAIN_S} s), so it would stop at once; give it "
                    "more time, or lower drain_s"
                )
        return self


OPEN = (
    "anyone who can reach it can run programs as this user, because connections are neither encrypted nor "
    "authenticated; close it to all but the hosts of your runs"
)
"""Warning about an address that other machines can reach."""

NOT_AN_ADDRESS = "must be HOST or HOST:PORT"
ONE_ADDRESS = "name one address of the machine, at which the others reach it"

LEAST_SILENCE_S = 1.0
LEAST_HANG_S = 2.0

WORKER_PORT = 22222
"""Default port of `titan-rl worker`."""


def split_address(address: str, *, least_port: int = 1) -> tuple[str, int]:
    """Split HOST:PORT: `"10.0.0.1:22222"` is `("10.0.0.1", 22222)`. The default port is `WORKER_PORT`. IPv6 addresses
    must be in brackets; IPv4 addresses may be.

    Raises:
        ValueError: The text is not an address, or the address stands for several machines.
    """
    has_port = ":" in address.rpartition("]")[2]
    host, _, port = address.rpartition(":") if has_port else (address, "", str(WORKER_PORT))
    if has_port and re.fullmatch(r"[0-9a-fA-F.]*:[0-9a-fA-F:.]*", host):
        raise ValueError(f"{address!r} needs brackets around the IPv6 address, as in [fd00::2]:{WORKER_PORT}")
    host = host.strip("[]")
    is_host = host and "/" not in host and not any(map(str.isspace, host))
    if not is_host or not (port.isdecimal() and least_port <= int(port) < 2**16):
        raise ValueError(f"{address!r} {NOT_AN_ADDRESS}")
    if problem := not_one_machine(host):
        raise ValueError(f"{address!r} {problem}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def not_one_machine(host: str) -> str | None:
    """Return the problem with an address if it stands for several interfaces or machines, otherwise None."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name, or a short form of an IPv4 address
        if host == "*":
            return f"stands for all interfaces; {ONE_ADDRESS}"
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            return None
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified:
        return f"stands for all interfaces; {ONE_ADDRESS}"
    if address.is_multicast or address == ipaddress.IPv4Address(2**32 - 1):
        return f"stands for several machines; {ONE_ADDRESS}"
    return None


def address_towards(config: HostsConfig) -> str:
    """Find the address of this machine in the network through which it reaches the first worker. Nothing is sent.

    Raises:
        ConfigError: The worker cannot be reached from this machine.
    """
    host, port = split_address(config.addresses[0])
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"hosts.addresses: {host} cannot be reached from here: {error.strerror}") from None


def own_address(config: HostsConfig) -> str:
    """Find the address of this machine at which other hosts reach it.

    Raises:
        ConfigError: `listen` is not an address of this machine, or the first worker cannot be reached.
    """
    if not config.listen:
        return address_towards(config)
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(config.listen, 0, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(
            f"hosts.listen = {config.listen!r}: {problem}; name an address of this machine, without a port"
        ) from None
    return config.listen


def check_own_machine(config: HostsConfig) -> None:
    """Check the settings that name an address or a file of this machine.

    Raises:
        ConfigError: The address or the file does not exist.
    """
    if config.listen and config.elsewhere:
        own_address(config)
    if config.addresses_file:
        try:
            Path(config.addresses_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigError(
                f"hosts.addresses_file = {config.addresses_file!r}: {problem}; create a file of addresses, one per "
                "line; it may be empty"
            ) from None


def _address(text: str) -> str:
    try:
        return join_address(*split_address(text))
    except ValueError as error:
        raise refusal(str(error).removeprefix(f"{text!r} ")) from None


def _one_interface(host: str) -> str:
    if problem := not_one_machine(host):
        raise refusal(problem)
    return host


class HostsConfig(ProviderSettings):
    """Machines of a run, by default only this one. The first hosts train, the last ones generate and play rollouts."""

    addresses: Annotated[
        tuple[Annotated[str, AfterValidator(_address)], ...], BeforeValidator(split_list), Field(strict=False)
    ] = ()
    """HOST:PORT of `titan-rl worker` on each machine, as a list or separated by commas, if no provider starts the
    workers. Empty for this machine only."""
    listen: Annotated[str, AfterValidator(_one_interface), ON_SEVERAL_HOSTS] = ""
    """Address of this machine at which the other hosts reach it; by default that of the network interface that leads to
    the first of them. Anyone who reaches it can run programs here, so use only a network that you trust."""
    train: PositiveInt = 1
    """Number of hosts that train; the trainer's ranks are divided evenly among them."""
    generate: Annotated[PositiveInt | None, ON_SEVERAL_HOSTS] = None
    """Number of hosts with generators; by default the hosts that do not train, or all if every host trains."""
    play: Annotated[PositiveInt | None, ON_SEVERAL_HOSTS] = None
    """Number of hosts with rollout workers; by default those with generators. If all of these play, so do hosts that
    join."""
    addresses_file: PathText = ""
    """File of further addresses, one per line, that is read repeatedly: a host whose address is added joins the run,
    and one whose address is removed is drained. None by default."""
    silence_s: Annotated[PositiveFloat, ON_SEVERAL_HOSTS] = 3.0
    """Seconds without a heartbeat after which a host is lost, and its work continues elsewhere. At least 1: hosts send
    four heartbeats a second."""
    max_respawns: NonNegativeInt = 3
    """Processes of each role (generators, rollout workers, trainer) that may die and be replaced before the run ends. 0
    ends the run at the first death."""
    hang_timeout_s: PositiveFloat = 60.0
    """Seconds after which a process is killed that neither answers nor computes, or whose step makes no progress. At
    least 2: processes are checked once a second."""
    wait_s: PositiveFloat = 3600.0
    """Time limit for waiting for hosts while there are fewer generators than generation.num_generators_range requires,
    or no host that can train or run rollouts."""

    sync: Annotated[bool, ON_SEVERAL_HOSTS] = False
    """Copy the model's folder, and those of `pythonpath` and PYTHONPATH, to hosts that lack their files. The copies are
    deleted at the end of the run."""

    @model_validator(mode="after")
    def _addresses_are_consistent(self) -> Self:
        twice = sorted({address for address in self.addresses if self.addresses.count(address) > 1})
        if twice:
            raise ValueError(f"addresses: {', '.join(twice)} is listed more than once; list each worker once")
        if self.addresses and self.provider is not None:
            raise ValueError(f'addresses and provider = "{self.provider}" exclude each other; leave one out')
        if self.addresses_file and not self.elsewhere:
            raise ValueError(
                f"addresses_file = {self.addresses_file!r} needs addresses or provider: it names hosts that join others"
            )
        return self

    @model_validator(mode="after")
    def _limits_exceed_intervals(self) -> Self:
        if self.silence_s < LEAST_SILENCE_S:
            raise ValueError(
                f"silence_s = {self.silence_s:g} is less than {LEAST_SILENCE_S:g}: hosts send four heartbeats a "
                "second, and one that is busy for a moment would be considered lost; raise it"
            )
        if self.hang_timeout_s < LEAST_HANG_S:
            raise ValueError(
                f"hang_timeout_s = {self.hang_timeout_s:g} is less than {LEAST_HANG_S:g}: processes are checked once "
                "a second, and one that is busy for a moment would be killed; raise it"
            )
        return self

    @property
    def of_generators_alone(self) -> Self:
        """Copy the settings for a server, which only generates, on all hosts or on as many as `generate` says."""
        generate = self.generate or len(self.addresses) or None
        return self.model_copy(update={"train": 1, "generate": generate, "play": None})

    @property
    def lease_s(self) -> float:
        """Time without the controller's heartbeat after which a host ends its processes, in seconds. It is longer than
        `silence_s`, so that the processes have been replaced elsewhere by then."""
        return 5 * self.silence_s

    @property
    def elsewhere(self) -> bool:
        """Whether workers, instead of this process, start the processes of the run."""
        return bool(self.addresses) or self.provider is not None

    def too_few(self, *, launched: bool = False) -> Iterator[str]:
        """Yield an error for each role that asks for more hosts than there are, if the settings determine their number.

        Args:
            launched: Whether the run is submitted as a job, which has `count` nodes with Slurm. Otherwise the Slurm
                allocation determines the number of nodes.
        """
        counts = {
            None: len(self.addresses) or 1,
            "ssh": len(self.names),
            "slurm": self.count if launched else None,
            "kubernetes": self.count,
        }
        if (count := counts.get(self.provider)) is not None:
            yield from self.too_few_of(count)

    def too_few_of(self, count: int) -> Iterator[str]:
        """Yield an error for each role that asks for more than `count` hosts."""
        present = "is 1 host" if count == 1 else f"are {count} hosts"
        for name in ("train", "generate", "play"):
            wanted: int | None = getattr(self, name)
            if wanted is not None and wanted > count:
                yield f"hosts.{name} is {wanted}, and there {present}; lower it, or use more hosts"


@dataclass(frozen=True, slots=True)
class Roles:
    """Names of the hosts in each role; a host may have several roles."""

    train: tuple[str, ...]
    generate: tuple[str, ...]
    play: tuple[str, ...]

    @staticmethod
    def of(config: HostsConfig, hosts: Sequence[str]) -> Roles:
        """Assign hosts to roles.

        Example: given hosts a, b and c, by default a trains, and b and c generate and play.

        Raises:
            ConfigError: A role needs more hosts than there are.
        """
        for problem in config.too_few_of(len(hosts)):
            raise ConfigError(problem)
        generate = config.generate or len(hosts) - config.train or len(hosts)
        last = tuple(hosts[len(hosts) - generate :])
        play = last if config.play is None else tuple(hosts[len(hosts) - config.play :])
        return Roles(tuple(hosts[: config.train]), last, play)
