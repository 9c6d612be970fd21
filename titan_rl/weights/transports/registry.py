"""The transports by name: the library's own, or the user's as "module:function".

Importing this imports no transport: what one needs is imported by the function that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_rl.calls.imports import find_function
from titan_rl.errors import ConfigError
from titan_rl.weights.types import StateDictTransport


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """What a process asks of its end of a transport: a rank of the trainer, which publishes, or of a generator, which
    pulls. The trainer closes its ends; a generator's goes with its process."""

    run_id: str  # in the names of whatever the run's processes share
    timeout_s: float = 120.0  # longest wait for the bytes of one shard
    rank: int = 0  # of the trainer, each of which publishes a shard of its own, or of the generator


@dataclass(frozen=True, slots=True)
class TransportKind:
    """How an end of a transport is made, and what it needs. A plain function from `TransportSpec` to
    `StateDictTransport` is of a kind that needs nothing."""

    make: Callable[[TransportSpec], StateDictTransport]
    needs_gpus: bool = False  # it cannot be had on a host without one

    def __call__(self, spec: TransportSpec) -> StateDictTransport:
        return self.make(spec)


def _shared_memory(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport(spec.run_id)


def _rdma(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.rdma import RDMATransport
    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

    return RDMATransport(SharedMemoryTransport(spec.run_id), timeout_s=spec.timeout_s)


def _cuda_ipc(spec: TransportSpec) -> StateDictTransport:
    from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport

    return CudaIPCTransport(spec.run_id)


BY_NAME = {
    "shared_memory": TransportKind(_shared_memory),
    "rdma": TransportKind(_rdma),
    "cuda_ipc": TransportKind(_cuda_ipc, needs_gpus=True),
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
