"""The providers by name: the library's own, or the user's as "module:function"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from titan_rl.cluster.providers import kubernetes, slurm, ssh
from titan_rl.cluster.providers.spec import ProviderSpec, Submission
from titan_rl.config.hosts import ProviderSettings
from titan_rl.core.calls.imports import find_function

Workers = AbstractAsyncContextManager[Iterable[str]]
"""Gives addresses, or `ChangingWorkers` where hosts come and go."""


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """Kind of provider. A plain function from `ProviderSpec` to `Workers` is a kind that takes no jobs.

    Args:
        workers: Starts a worker a host, gives their addresses as "10.0.0.2:22222", and ends at the block's end what it
            started.
        render: What `titan-rl launch` submits, as text.
        folder_there: From where hosts mean relative paths that have other files than this machine, the model's for
            instance; None where they have the same.
        ends_with_workers: Who tells all workers to end means the run, since no others come in their place.
        submit: Hands that over, and says what became of it; None where nothing takes jobs.
    """

    workers: Callable[[ProviderSpec], Workers]
    folder_there: Callable[[ProviderSettings], str] | None = None
    ends_with_workers: bool = False
    render: Callable[[Submission], str] | None = None
    submit: Callable[[Submission, str], str] | None = None


BY_NAME = {
    "ssh": ProviderKind(ssh.workers, render=ssh.render),
    "slurm": ProviderKind(slurm.workers, ends_with_workers=True, render=slurm.render, submit=slurm.submit),
    "kubernetes": ProviderKind(
        kubernetes.workers, folder_there=kubernetes.folder_there, render=kubernetes.render, submit=kubernetes.submit
    ),
}
"""The library's own that `hosts.provider` names."""


def find_provider(name: str) -> ProviderKind:
    """The kind of provider that `hosts.provider` names.

    Raises:
        ConfigError: There is none of that name.
    """
    found: Any = find_function("hosts.provider", name, BY_NAME)
    return found if isinstance(found, ProviderKind) else ProviderKind(found)
