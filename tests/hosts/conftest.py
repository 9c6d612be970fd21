from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hosts.namespaces import HostProcess, NamespaceHost, Namespaces, namespaces, why_not
from hosts.scripted import GATE


@pytest.fixture(scope="session")
def needs_namespaces() -> None:
    pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts(needs_namespaces: None) -> Generator[Namespaces]:
    """Three hosts on one network, for the tests of a module."""
    with namespaces(3) as made:
        yield made


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder whose files synchronize tests with the processes on hosts."""
    return tmp_path_factory.mktemp("gate")


@pytest.fixture(scope="module")
def workers(hosts: Namespaces, gate: Path, tmp_path_factory: pytest.TempPathFactory) -> list[HostProcess]:
    """`titan-rl worker` on each host, with its output in `worker-NAME.txt`."""
    folder: Path = tmp_path_factory.mktemp("workers")

    def start(host: NamespaceHost) -> HostProcess:
        return host.start_worker(folder / f"worker-{host.name}.txt", env={GATE: str(gate)})

    with ThreadPoolExecutor() as threads:
        return list(threads.map(start, hosts))
