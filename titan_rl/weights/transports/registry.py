"""The transports by name: the library's own, or the user's as "module:function".

Importing this imports no transport: what one needs is imported by the function that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_rl.core.calls.imports import find_function
from titan_rl.core.errors import ConfigError
from titan_rl.weights.types import StateDictTransport


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """Parameters of one end of a transport: a trainer rank, which publishes, or a generator rank, which pulls. The
    trainer closes its ends; a generator's goes with its process."""

    run_id: str  # in the names of whatever the run's processes share
    timeout_s: float = 120.0  # longest wait for the bytes of one shard
    rank: int = 0  # of the trainer, each of which publishes a shard of its own, or of the generator
    host: str = ""  # the name of the one on which this process is; those with equal names share memory
    address: str = "127.0.0.1"  # by which other hosts reach it; that of a run on one host is the loopback device's
    fanout: int = 1  # hosts that one host sends a version to
    anchor_interval: int = 16  # versions that are a multiple of it are sent whole


@dataclass(frozen=True, slots=True)
class TransportKind:
    """Factory of a transport's ends, and its requirements. A plain function from `TransportSpec` to
    `StateDictTransport` has none."""

    make: Callable[[TransportSpec], StateDictTransport]
    needs_gpus: bool = False  # it cannot be had on a host without one
    spans_hosts: bool = True  # generators may be on other hosts than the trainer

    def __call__(self, spec: TransportSpec) -> StateDictTransport:
        return self.make(spec)


def _shared_memory(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport(spec.run_id)


def _rdma(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.rdma import RDMATransport
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    return RDMATransport(SharedMemoryTransport(spec.run_id), host=spec.host, timeout_s=spec.timeout_s)


def _tcp(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.tcp import TCPTransport

    return TCPTransport(
        spec.run_id,
        host=spec.host,
        interface=spec.address,
        timeout_s=spec.timeout_s,
        fanout=spec.fanout,
        anchor_interval=spec.anchor_interval,
    )


def _auto(spec: TransportSpec) -> StateDictTransport:
    is_alone = spec.address.startswith("127.")
    return _shared_memory(spec) if is_alone else _tcp(spec)


def _cuda_ipc(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport

    return CudaIPCTransport(spec.run_id)


BY_NAME = {
    "auto": TransportKind(_auto),
    "shared_memory": TransportKind(_shared_memory, spans_hosts=False),
    "tcp": TransportKind(_tcp),
    "rdma": TransportKind(_rdma),
    "cuda_ipc": TransportKind(_cuda_ipc, needs_gpus=True, spans_hosts=False),
}
"""The library's own that `statedict.transport` names."""


def find_transport(name: str) -> TransportKind:
    """The kind of transport that `statedict.transport` names.

    Raises:
        ConfigError: there is none of that name.
    """
    found: Any = find_function("statedict.transport", name, BY_NAME)
    return found if isinstance(found, TransportKind) else TransportKind(found)


def make_transport(name: str, spec: TransportSpec) -> StateDictTransport:
    """An end of a transport of that kind.

    Raises:
        ConfigError: there is none of that name, or what was made is no `StateDictTransport`.
        Exception: what keeps it from being made.
    """
    transport: Any = find_transport(name)(spec)
    if not isinstance(transport, StateDictTransport):
        raise ConfigError(
            f"statedict.transport = {name!r} gave {transport!r}, which is no StateDictTransport; see "
            "titan_rl.weights.types"
        )
    return transport
