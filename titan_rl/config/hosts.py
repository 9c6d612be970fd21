"""The machines of a run. Checked before any process starts; the settings alone look nothing up."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from titan_rl.config.providers import ON_SEVERAL_HOSTS, ProviderSettings, split_list
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import PathText

OPEN = (
    "whoever reaches it can run programs as this user: nothing is encrypted, and nobody is asked who they are; close "
    "it to all but the hosts of your runs"
)
"""What is to be known of an address that others than this machine reach."""

NOT_AN_ADDRESS = "must be HOST or HOST:PORT"
ONE_ADDRESS = "name one address of the machine, that by which the others reach it"

LEAST_SILENCE_S = 1.0
LEAST_HANG_S = 2.0

WORKER_PORT = 22222
"""Where `titan-rl worker` listens, and is looked for, if nothing else is said."""


def split_address(address: str, *, least_port: int = 1) -> tuple[str, int]:
    """`"10.0.0.1:22222"` is `("10.0.0.1", 22222)`; without a port it is that of `WORKER_PORT`. IPv6 addresses stand in
    brackets, IPv4 ones may.

    Raises:
        ValueError: it is no address, or none of one machine.
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
    """What is wrong with an address that stands for several interfaces or machines."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name, or a short form of IPv4
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


def is_broadcast(host: str, port: int) -> bool:
    """Whether it stands for all machines of a network that this one is in. Nothing is sent."""
    if ":" in host:  # IPv6 has none
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except PermissionError:
            return True
        except OSError:
            return False
    return False


def address_towards(config: HostsConfig) -> str:
    """The address of this machine from which it reaches the first worker. Nothing is sent.

    Raises:
        ConfigError: there is no way there.
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
    """The address of this machine on which the others reach it.

    Raises:
        ConfigError: `listen` is none of this machine, or there is no way to the first worker.
    """
    if not config.listen:
        return address_towards(config)
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(config.listen, 0, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise ConfigError(
            f"hosts.listen = {config.listen!r}: {problem}; name an address of this machine, without a port"
        ) from None
    return config.listen


def check_own_machine(config: HostsConfig) -> None:
    """What the settings name of the machine where the run begins.

    Raises:
        ConfigError: it is not there.
    """
    if config.listen and config.elsewhere:
        own_address(config)
    if config.addresses_file:
        try:
            Path(config.addresses_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = error.strerror if isinstance(error, OSError) else "no text"
            raise ConfigError(
                f"hosts.addresses_file = {config.addresses_file!r}: {problem}; make it a file of addresses, one a "
                "line, empty where there are no further ones yet"
            ) from None


def _address(text: str) -> str:
    try:
        return join_address(*split_address(text))
    except ValueError as error:
        said = str(error).removeprefix(f"{text!r} ")
        raise PydanticCustomError("address", "{said}", {"said": said}) from None


def _one_interface(host: str) -> str:
    if problem := not_one_machine(host):
        raise PydanticCustomError("address", "{said}", {"said": problem})
    return host


class HostsConfig(ProviderSettings):
    """The machines on which a run has its processes, by default this one. The first of them train, the last generate
    and play rollouts."""

    addresses: Annotated[
        tuple[Annotated[str, AfterValidator(_address)], ...], BeforeValidator(split_list), Field(strict=False)
    ] = ()
    """HOST:PORT of `titan-rl worker` on each machine, a list or between commas, where no provider starts
    them; none for this machine alone."""
    listen: Annotated[str, AfterValidator(_one_interface), ON_SEVERAL_HOSTS] = ""
    """Address of this machine on which the others reach it; by default that from which it reaches the first of them.
    Whoever reaches it can run programs here: only within a network that you trust."""
    train: PositiveInt = 1
    """Hosts of the trainer's ranks, which are shared out evenly."""
    generate: Annotated[PositiveInt | None, ON_SEVERAL_HOSTS] = None
    """Hosts of the generators; by default those that do not train, or all if there are no others."""
    play: Annotated[PositiveInt | None, ON_SEVERAL_HOSTS] = None
    """Hosts of the rollout workers; by default those of the generators. Where all that generate play, so does a host
    that joins."""
    addresses_file: PathText = ""
    """A file of further addresses, one a line, that is read again and again: a host whose address comes joins the run,
    and one whose address goes is drained. None by default."""
    silence_s: Annotated[PositiveFloat, ON_SEVERAL_HOSTS] = 3.0
    """A host of which nothing is heard for so long is gone. What it was at goes on elsewhere. At least 1: hosts give
    four signs of life a second."""
    lease_s: Annotated[PositiveFloat, ON_SEVERAL_HOSTS] = 15.0
    """A host that hears nothing of the controller for so long ends its processes. More than silence_s."""
    hang_timeout_s: PositiveFloat = 60.0
    """A process that for so long neither answers nor computes is killed, and so is one whose step does not get on. At
    least 2: processes are looked at once a second."""
    wait_s: PositiveFloat = 3600.0
    """Longest wait for hosts, where fewer generators serve than generation.least_generators, or none can train or play
    rollouts."""

    sync: Annotated[bool, ON_SEVERAL_HOSTS] = False
    """Copy the model's folder, and those of `pythonpath` and PYTHONPATH, to hosts that lack what is in them. The copies
    go with the run."""

    @model_validator(mode="after")
    def _each_once_from_one_side(self) -> Self:
        twice = sorted({address for address in self.addresses if self.addresses.count(address) > 1})
        if twice:
            raise ValueError(f"addresses: {', '.join(twice)} is there more than once; name each worker once")
        if self.addresses and self.provider is not None:
            raise ValueError(f'addresses and provider = "{self.provider}" exclude each other; leave one out')
        if self.addresses_file and not self.elsewhere:
            raise ValueError(
                f"addresses_file = {self.addresses_file!r} needs addresses or provider: it names hosts that join others"
            )
        return self

    @model_validator(mode="after")
    def _heard_of_several_times(self) -> Self:
        if self.silence_s < LEAST_SILENCE_S:
            raise ValueError(
                f"silence_s = {self.silence_s:g} is less than {LEAST_SILENCE_S:g}: hosts give four signs of life a "
                "second, and one that is busy for a moment would be given up; raise it"
            )
        if self.hang_timeout_s < LEAST_HANG_S:
            raise ValueError(
                f"hang_timeout_s = {self.hang_timeout_s:g} is less than {LEAST_HANG_S:g}: processes are looked at once "
                "a second, and one that is busy for a moment would be killed; raise it"
            )
        return self

    @model_validator(mode="after")
    def _lost_before_it_ends(self) -> Self:
        if self.lease_s <= self.silence_s:
            raise ValueError(
                f"lease_s = {self.lease_s:g} is not more than silence_s = {self.silence_s:g}: hosts would end what is "
                "not yet given up; raise the one or lower the other"
            )
        return self

    @property
    def of_generators_alone(self) -> Self:
        """The same hosts where nothing trains or plays rollouts: all generate, or as many as settings say."""
        generate = self.generate or len(self.addresses) or None
        return self.model_copy(update={"train": 1, "generate": generate, "play": None})

    @property
    def elsewhere(self) -> bool:
        """Whether processes are started by workers, and not by this process."""
        return bool(self.addresses) or self.provider is not None

    def too_few(self, *, launched: bool = False) -> Iterator[str]:
        """Say of which role there are more hosts than settings name, where these say how many there are.

        Args:
            launched: as a job of its own, which with Slurm has `slurm.nodes`; else an allocation says how many.
        """
        counts = {
            None: len(self.addresses) or 1,
            "ssh": len(self.ssh.hosts),
            "slurm": self.slurm.nodes if launched else None,
            "kubernetes": self.kubernetes.workers,
        }
        if (count := counts.get(self.provider)) is not None:
            yield from self.too_few_of(count)

    def too_few_of(self, count: int) -> Iterator[str]:
        """Of which role there are more than so many hosts."""
        there = "is 1 host" if count == 1 else f"are {count} hosts"
        for name in ("train", "generate", "play"):
            wanted: int | None = getattr(self, name)
            if wanted is not None and wanted > count:
                yield f"hosts.{name} is {wanted}, and there {there}; lower it, or have more hosts"


@dataclass(frozen=True, slots=True)
class Roles:
    """The names of the hosts that do each of the three; one may do several."""

    train: tuple[str, ...]
    generate: tuple[str, ...]
    play: tuple[str, ...]

    @staticmethod
    def of(config: HostsConfig, hosts: Sequence[str]) -> Roles:
        """
        Example: of hosts a, b and c, a trains by default, and b and c generate and play.

        Raises:
            ConfigError: a role needs more hosts than there are.
        """
        for problem in config.too_few_of(len(hosts)):
            raise ConfigError(problem)
        generate = config.generate or len(hosts) - config.train or len(hosts)
        last = tuple(hosts[len(hosts) - generate :])
        play = last if config.play is None else tuple(hosts[len(hosts) - config.play :])
        return Roles(tuple(hosts[: config.train]), last, play)
