"""Registry of weight transports: the built-in ones by name, or the user's own as "module:function".

Importing this module imports no transport; the functions that make transports import them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from titan_rl.core.calls.imports import find_function
from titan_rl.core.errors import ConfigError
from titan_rl.weights.types import StateDictTransport


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """Parameters of one end of a transport: a trainer rank, which publishes, or a generator rank, which pulls. Only the
    trainer closes its ends."""

    run_id: str  # part of the names of shared files
    _: KW_ONLY
    timeout_s: float = 120.0  # longest wait for the bytes of one shard
    rank: int = 0  # rank in the trainer or in the generator
    host: str = ""  # name of this process's host; hosts with equal names share memory
    address: str = "127.0.0.1"  # address at which other hosts reach this one; loopback in a run on one host
    fanout: int = 1  # number of hosts to which each host sends a version
    anchor_interval: int = 16  # versions that are a multiple of this number are sent whole


@dataclass(frozen=True, slots=True)
class TransportKind:
    """Factory of a transport's ends, and its requirements. A plain function from `TransportSpec` to
    `StateDictTransport` has none."""

    make: Callable[[TransportSpec], StateDictTransport]
    needs_gpus: bool = False  # works only on hosts with a GPU
    spans_hosts: bool = True  # generators may be on other hosts than the trainer

    def __call__(self, spec: TransportSpec) -> StateDictTransport:
        return self.make(spec)


def _shared_memory(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport(spec.run_id)


def _rdma(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.rdma import RDMATransport

    return RDMATransport(spec.run_id, host=spec.host, timeout_s=spec.timeout_s)


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
"""Built-in transports, by their names in `statedict.transport`."""


def find_transport(name: str) -> TransportKind:
    """Look up the kind of transport that `statedict.transport` names.

    Raises:
        ConfigError: There is no transport of that name.
    """
    found: Any = find_function("statedict.transport", name, BY_NAME)
    return found if isinstance(found, TransportKind) else TransportKind(found)


def make_transport(name: str, spec: TransportSpec) -> StateDictTransport:
    """Make an end of a transport.

    Raises:
        ConfigError: There is no transport of that name, or the result is not a `StateDictTransport`.
        Exception: Raised by the function that makes it.
    """
    transport: Any = find_transport(name)(spec)
    if not isinstance(transport, StateDictTransport):
        raise ConfigError(
            f"statedict.transport = {name!r} returned {transport!r}, which is not a StateDictTransport; see "
            "titan_rl.weights.types"
        )
    return transport
