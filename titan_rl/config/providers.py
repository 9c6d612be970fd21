"""What the table [hosts] says of providers, each with a table of its own."""

from __future__ import annotations

import datetime
import ipaddress
import math
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from titan_rl.core.settings import FunctionName, Section, TakesEffect

WORKER_DRAIN_S = 120
"""The --drain-s of a worker to which nothing else is said."""
DETACH_S = 60
"""For what follows once a host is drained."""

NAMES = ("ssh", "slurm", "kubernetes")
"""The library's own providers, see `titan_rl.cluster.providers.registry`."""


_WITH_PROVIDER = TakesEffect("hosts.provider", none_of=(None,), without="without hosts.provider", fix="set that")
ON_SEVERAL_HOSTS = TakesEffect(
    "hosts.elsewhere", one_of=(True,), without="on one machine", fix="set hosts.addresses or hosts.provider"
)


def split_list(value: object) -> object:
    """What stands between commas, as of the command line; nothing in an empty text."""
    if value == "":
        return []
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _line(text: str) -> str:
    if "\n" in text or not text.strip():
        raise PydanticCustomError("line", "must be one line that says something")
    return text


def _duration(value: object) -> object:
    """TOML takes 30 for a number, and "10:00:00" on the command line for a time of day."""
    return str(value) if isinstance(value, int | datetime.time) and not isinstance(value, bool) else value


def _time_limit(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|(?i:unlimited|infinite)", text):
        raise PydanticCustomError("time_limit", 'must be a time as sbatch takes it: "24:00:00", "2-12:00" or minutes')
    return text


def _seconds(time_limit: str) -> float:
    """Of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; Slurm takes 0 for no limit."""
    if not time_limit[0].isdigit():
        return math.inf
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False)) or math.inf


SAID_BY_SETTINGS = {
    "--nodes": "nodes",
    "-N": "nodes",
    "--time": "time_limit",
    "-t": "time_limit",
    "--requeue": "requeue",
    "--no-requeue": "requeue",
    "--signal": "grace_s",
    "--output": "run_dir",
    "-o": "run_dir",
}
"""Options of sbatch that the library gives itself, and the setting that says what they say."""
AGAINST_THE_SCRIPT = {
    "--array": "a job is one run: submit each run by itself",
    "-a": "a job is one run: submit each run by itself",
    "--chdir": "a run's paths are meant from where it is submitted: submit it from that folder",
    "-D": "a run's paths are meant from where it is submitted: submit it from that folder",
}
"""Options of sbatch with which the job is not what the library submits, and what to do instead."""


def _name_of(option: str) -> str:
    """Of sbatch: "-N" of "-N5", "--nodes" of "--nodes=5"."""
    return option[:2] if re.match(r"-\w", option) else re.split(r"[=\s]", option)[0]


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise PydanticCustomError("ip", "must be an IP address") from None


def _option(text: str) -> str:
    if not _line(text).startswith("-"):
        raise PydanticCustomError("option", "must begin with -, as --partition=gpu does")
    return text


def _host(text: str) -> str:
    if text.startswith("-") or text.split() != [text]:
        raise PydanticCustomError("host", "must be a host's name as ssh takes it, without spaces and options")
    return text


def _words(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PydanticCustomError("words", "must be words as in a shell: {problem}", {"problem": str(error)}) from None
    if not words:
        raise PydanticCustomError("words", "must name a command")
    return text


def _image(text: str) -> str:
    if any(character.isspace() for character in text):
        raise PydanticCustomError("image", "must be an image's name, without spaces")
    return text


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise PydanticCustomError("namespace", "must be at most 63 of a-z, 0-9 and -, with neither end a -")
    return text


def _quantity(text: str) -> str:
    if not re.fullmatch(r"(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?", text):
        raise PydanticCustomError("quantity", 'must be a quantity as Kubernetes takes it: "8", "500m" or "64Gi"')
    return text


def _mount(text: str) -> str:
    if not re.fullmatch(r"/[^\s:]+", text):
        raise PydanticCustomError("mount", "must begin with /, and have neither spaces nor colons, as /workspace")
    return text


Quantity = Annotated[str, AfterValidator(_quantity)]


class SSHConfig(Section):
    """Hosts that ssh reaches without a question, where `hosts.provider` names ssh. Each has a worker for as long as
    the run."""

    hosts: Annotated[
        tuple[Annotated[str, AfterValidator(_host)], ...], BeforeValidator(split_list), Field(strict=False)
    ] = ()
    """As ssh takes them, a list or between commas: a name, user@name, or what ~/.ssh/config calls one."""
    options: tuple[Annotated[str, AfterValidator(_line)], ...] = Field(default=(), strict=False)
    """Of ssh, each word of its own: ["-p", "2222", "-i", "key"]."""
    addresses: Mapping[str, Annotated[str, AfterValidator(_ip)]] = Field(default={}, strict=False)
    """By host, the IP address at which its worker listens, where that is not what its name means here."""


class SlurmConfig(Section):
    """Where `hosts.provider` names slurm, each node of the allocation is a host. The rest is for the job that
    `titan-rl launch` submits."""

    nodes: PositiveInt = 1
    """Of the job."""
    time_limit: Annotated[str, BeforeValidator(_duration), AfterValidator(_time_limit)] | None = None
    """As sbatch takes it, "24:00:00", or minutes; by default the partition's."""
    options: tuple[Annotated[str, AfterValidator(_option)], ...] = Field(default=(), strict=False)
    """Further ones of sbatch: ["--partition=gpu", "--gpus-per-node=8", "--exclusive"]."""
    setup: tuple[Annotated[str, AfterValidator(_line)], ...] = Field(default=(), strict=False)
    """Lines of shell before the run begins: ["module load cuda"]."""
    requeue: bool = True
    """When the time is up, the job is preempted or its first node fails, it waits for its next turn, and goes on with
    the run then."""
    grace_s: PositiveInt = 120
    """Seconds before the end of its time in which the run ends in order."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if self.time_limit and self.grace_s >= _seconds(self.time_limit):
            raise ValueError(
                f"grace_s = {self.grace_s} s and time_limit = {self.time_limit!r}: the job would end as it begins; "
                "give it more time, or a smaller grace_s"
            )
        for option in self.options:
            if setting := SAID_BY_SETTINGS.get(name := _name_of(option)):
                raise ValueError(f"options has {option!r}, which the job's script says itself; set {setting} instead")
            if problem := AGAINST_THE_SCRIPT.get(name):
                raise ValueError(f"options has {option!r}, and {problem}")
        return self


class KubernetesConfig(Section):
    """Workers as a StatefulSet and the controller as a Job, which `titan-rl launch` makes where `hosts.provider` names
    kubernetes. Experimental."""

    image: Annotated[str, AfterValidator(_image)] = ""
    """With titan_rl and the task installed, or with them on the volume."""
    workers: PositiveInt = 1
    """Hosts, a pod each; the controller has one more, which needs no GPU."""
    volume: str = ""
    """A PersistentVolumeClaim that all pods mount, with the model, and for the run's folder."""
    folder: Annotated[str, AfterValidator(_mount)] = "/workspace"
    """Where the volume is, and the current folder of the run and of its workers."""
    namespace: Annotated[str, AfterValidator(_namespace)] = "default"
    """In which all of it is made."""
    resources: Mapping[str, Quantity] = Field(default={}, strict=False)
    """Of each worker, requested and at most: { "nvidia.com/gpu" = "8", memory = "200Gi", cpu = "32" }."""
    controller_resources: Mapping[str, Quantity] = Field(default={}, strict=False)
    """Of the controller."""
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm in each pod, where weights travel and PyTorch's workers talk."""
    kubectl: Annotated[str, AfterValidator(_words)] = "kubectl"
    """The command, which may have options: "kubectl --context=cluster"."""


class ProviderSettings(Section):
    """Who starts the workers of a run, and how."""

    provider: Annotated[str, FunctionName(NAMES, ("spec",), may_be_class=False)] | None = None
    """Starts a worker on each host: over ssh, in an allocation of Slurm, or as pods of Kubernetes, which is
    experimental. A function of yours returns, for a `titan_rl.cluster.providers.spec.ProviderSpec`, an async context
    manager of the workers' addresses."""
    port: Annotated[int, _WITH_PROVIDER] = Field(default=22222, ge=0, le=65535)
    """On which the workers of a provider listen; with 0 each takes one that is free, but for kubernetes."""
    command: Annotated[Annotated[str, AfterValidator(_words)] | None, _WITH_PROVIDER] = None
    """What runs titan-rl there; by default what runs it here, and with kubernetes titan-rl."""
    drain_s: Annotated[NonNegativeFloat, ON_SEVERAL_HOSTS] = 60.0
    """A host that is to go has so long to finish what it is at, and to have the trainer saved and another host found
    for it; what is left then goes on elsewhere. A worker that a provider starts waits longer on SIGTERM; one that is
    started by hand as long as its --drain-s says."""
    ssh: Annotated[SSHConfig, TakesEffect("hosts.provider", one_of=("ssh",))] = SSHConfig()
    slurm: Annotated[SlurmConfig, TakesEffect("hosts.provider", one_of=("slurm",))] = SlurmConfig()
    kubernetes: Annotated[KubernetesConfig, TakesEffect("hosts.provider", one_of=("kubernetes",))] = KubernetesConfig()

    @property
    def worker_drain_s(self) -> int:
        """How long a worker waits on SIGTERM for its runs to drain its host."""
        return max(WORKER_DRAIN_S, math.ceil(self.drain_s) + DETACH_S)

    @model_validator(mode="after")
    def _says_what_the_provider_needs(self) -> Self:
        if self.provider == "ssh" and not self.ssh.hosts:
            raise ValueError('provider = "ssh" needs ssh.hosts, the names of the hosts')
        if twice := sorted({host for host in self.ssh.hosts if self.ssh.hosts.count(host) > 1}):
            raise ValueError(f"ssh.hosts: {', '.join(twice)} is there more than once; name each host once")
        if self.provider == "ssh" and (strays := self.ssh.addresses.keys() - set(self.ssh.hosts)):
            raise ValueError(
                f"ssh.addresses has {', '.join(sorted(strays))}, which ssh.hosts lacks; write a host the same in both"
            )
        if self.provider == "kubernetes" and not self.port:
            raise ValueError('port = 0 with provider = "kubernetes": its service has to name the port; set one')
        for name in ("image", "volume") if self.provider == "kubernetes" else ():
            if not getattr(self.kubernetes, name):
                raise ValueError(f'provider = "kubernetes" needs kubernetes.{name}; set it')
        return self
