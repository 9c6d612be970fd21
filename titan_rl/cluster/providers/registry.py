"""Registry of host providers: the built-in ones by name, or the user's own as "module:function"."""

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
"""Context manager that yields addresses, or `ChangingWorkers` if hosts come and go."""


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """Kind of provider. A plain function from `ProviderSpec` to `Workers` is a kind that accepts no submissions.

    Args:
        workers: Starts a worker on each host, yields the addresses, such as "10.0.0.2:22222", and ends the workers that
            it started at the end of the block.
        render: Makes the text that `titan-rl launch` submits.
        remote_folder: Returns the folder to which relative paths refer on hosts whose files differ from this machine's,
            for example for the model. None if hosts have the same files.
        ends_with_workers: Whether ending all workers is meant to end the run, because no others will replace them.
        submit: Submits the rendered text, and returns a description of the result. None if there is nothing to submit
            to.
    """

    workers: Callable[[ProviderSpec], Workers]
    remote_folder: Callable[[ProviderSettings], str] | None = None
    ends_with_workers: bool = False
    render: Callable[[Submission], str] | None = None
    submit: Callable[[Submission, str], str] | None = None


BY_NAME = {
    "ssh": ProviderKind(ssh.workers, render=ssh.render),
    "slurm": ProviderKind(slurm.workers, ends_with_workers=True, render=slurm.render, submit=slurm.submit),
    "kubernetes": ProviderKind(
        kubernetes.workers, lambda hosts: hosts.kubernetes.folder, render=kubernetes.render, submit=kubernetes.submit
    ),
}
"""Built-in providers, by their names in `hosts.provider`."""


def find_provider(name: str) -> ProviderKind:
    """Find the provider that `hosts.provider` names.

    Raises:
        ConfigError: There is no provider of this name.
    """
    found: Any = find_function("hosts.provider", name, BY_NAME)
    return found if isinstance(found, ProviderKind) else ProviderKind(found)
