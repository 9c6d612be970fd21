"""The experimental settings of a run, which are not proved on the hardware or network that they are for."""

from __future__ import annotations

from titan_rl.config.run import RunConfig

EXPERIMENTAL: dict[str, tuple[str, ...]] = {
    "generation.gpu_share": (),
    "hosts.provider": ("kubernetes",),
    "statedict.transport": ("cuda_ipc", "rdma", "tcp"),
}
"""Experimental values of each setting. If the list is empty, every value except None is experimental."""


def experimental_warning(config: RunConfig, transport: str) -> str | None:
    """Write one line that names the experimental settings of a run, with their values; None if there are none.

    Args:
        transport: Name of the run's transport, to which `statedict.transport` was resolved if it is "auto".
    """
    values = {
        "generation.gpu_share": config.generation.gpu_share,
        "hosts.provider": config.hosts.provider,
        "statedict.transport": transport,
    }
    if not config.hosts.elsewhere and transport == "tcp":
        del values["statedict.transport"]  # both ends of the connection are on this machine
    used = [
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}"
        for name, value in values.items()
        if value is not None and (value in EXPERIMENTAL[name] or not EXPERIMENTAL[name])
    ]
    if not used:
        return None
    return f"experimental, not proved on the hardware or network it is for: {', '.join(used)}"
