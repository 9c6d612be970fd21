"""Kubernetes provider: the pods of a StatefulSet, with a worker in each, and a job that runs the controller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import PurePath

from titan_rl.cluster.providers.cluster_commands import rendered, run_tool
from titan_rl.cluster.providers.spec import ProviderSpec, Submission, worker_command
from titan_rl.config.hosts import join_address
from titan_rl.core.errors import ConfigError, ProviderError

WORKERS = "TITAN_RL_WORKERS"
"""Environment variable of the controller's pod: the names of the workers' pods, separated by spaces."""

LONGEST_NAME = 50
"""Longest name of a StatefulSet. Its pods have a label with this name and ten more characters, at most 63 in all."""

OWNED = ("statefulset", "service", "configmap", "networkpolicy")
"""Kinds of objects that are deleted together with the job."""

LOOK_S = 1.0
CONNECT_S = 5.0


@contextlib.asynccontextmanager
async def workers(spec: ProviderSpec) -> AsyncGenerator[Iterable[str]]:
    """Context manager: wait until all workers that were started with this pod listen. They outlive this pod, for the
    pod that continues the run if this one dies. Later workers come and go as the StatefulSet is scaled."""
    names = os.environ.get(WORKERS, "").split()
    if not names:
        raise ConfigError(
            'hosts.provider = "kubernetes" uses the workers that titan-rl launch CONFIG creates, and there are none '
            f"({WORKERS} is not set): start the run with that command"
        )
    port = spec.settings.port
    addresses = await found_by(partial(_reached, port=port), names, spec.wait_s)
    yield Pods(names[0].partition(".")[2], addresses, port)


class Pods:
    """Workers of a run: those at the start, and the current ones. All are pods of one headless service.

    Args:
        service: DNS name of the service.
        addresses: Addresses of the pods that the run starts with.
    """

    def __init__(self, service: str, addresses: Sequence[str], port: int) -> None:
        self._service = service
        self._addresses = addresses
        self._port = port

    def __iter__(self) -> Iterator[str]:
        return iter([join_address(address, self._port) for address in self._addresses])

    async def current(self) -> list[str]:
        family = socket.AF_INET6 if ":" in self._addresses[0] else socket.AF_INET
        found = await asyncio.to_thread(socket.getaddrinfo, self._service, self._port, family, socket.SOCK_STREAM)
        return sorted({join_address(str(entry[4][0]), self._port) for entry in found})


def _reached(name: str, port: int) -> str:
    """Connect to the worker of a pod, and return its address. DNS knows the pod once it is placed, before it
    listens."""
    with socket.create_connection((name, port), timeout=CONNECT_S) as connection:
        return connection.getpeername()[0]


async def found_by(find: Callable[[str], str], names: Sequence[str], wait_s: float) -> list[str]:
    """Call `find` for each name, repeatedly while it raises OSError, and return the results in the order of the names.

    Raises:
        ProviderError: A name was not found within `wait_s` seconds.
    """
    found = dict[str, str]()
    try:
        async with asyncio.timeout(wait_s):
            while missing := [name for name in names if name not in found]:
                for name in missing:
                    with contextlib.suppress(OSError):
                        found[name] = await asyncio.to_thread(find, name)
                if len(found) < len(names):
                    await asyncio.sleep(LOOK_S)
    except TimeoutError:
        missing = [name for name in names if name not in found]
        raise ProviderError(
            f"{', '.join(missing)}: no worker listens there after {wait_s:g} s; see kubectl describe pod for the reason"
        ) from None
    return [found[name] for name in names]


def render(submission: Submission) -> str:
    """Render the manifests of a run: its settings, its workers and their DNS names, the network policy, its
    controller."""
    settings = submission.settings
    in_pods = settings.model_copy(update={"command": settings.command or "titan-rl"})
    name = object_name(submission.name, submission.time)
    tomls = {f"{index}-{PurePath(toml).name}": text for index, (toml, text) in enumerate(submission.tomls.items())}
    given = [f"/etc/titan_rl/{toml}" for toml in tomls]
    options = [f"--{key}={value}" for key, value in submission.overrides]
    return rendered(
        "kubernetes.yaml.jinja",
        kubernetes=settings.kubernetes,
        count=settings.count,
        name=name,
        tomls=tomls,
        port=settings.port,
        command=in_pods.command,
        worker=worker_command(in_pods, f"[$(POD_IP)]:{settings.port}"),
        drain_s=settings.worker_drain_s,
        which_run=rendered(
            "which_run.sh.jinja", run_dir=submission.run_dir, settings=shlex.join([*given, *options])
        ).rstrip(),
        variable=WORKERS,
        pods=" ".join(f"{name}-{index}.{name}" for index in range(settings.count)),
    )


def submit(submission: Submission, manifests: str) -> str:
    """Create the manifests in the cluster, and make the job their owner: deleting the job then deletes all of them."""
    kubectl = ["kubectl", *submission.settings.options]
    name = object_name(submission.name, submission.time)
    run_tool([*kubectl, "create", "--filename", "-"], manifests)
    uid = run_tool([*kubectl, "get", "job", name, "--output", "jsonpath={.metadata.uid}"]).strip()
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    for kind in OWNED:
        run_tool([*kubectl, "patch", kind, name, "--type", "merge", "--patch", patch])
    shown = shlex.join(kubectl)
    shows, ends = f"{shown} logs --follow job/{name}", f"{shown} delete job {name}"
    return f"job {name} is submitted; {shows} shows it, {ends} stops it"


def object_name(run: str, time: str) -> str:
    """Name of the objects of a run: the run's name in the characters that Kubernetes allows, and its submission time.

    >>> object_name("Word_sort-lr=1e-3", "1122-180501")
    'word-sort-lr-1e-3-1122-180501'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", f"run-{run}".lower() if not run[:1].isalpha() else run.lower())
    return f"{plain[: LONGEST_NAME - 1 - len(time)].strip('-')}-{time}"
