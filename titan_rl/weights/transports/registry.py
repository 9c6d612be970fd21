"""The transport that a config names."""

from __future__ import annotations

from titan_rl.weights.settings import StateDictConfig
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import StateDictTransport


def make_transport(config: StateDictConfig, run_id: str) -> StateDictTransport:
    """One end of it: a writer's, or a reader's, which only pulls."""
    if config.transport == "cuda_ipc":
        from titan_rl.weights.transports.cuda_ipc import CudaIPCTransport

        return CudaIPCTransport(run_id)
    local = SharedMemoryTransport(run_id)
    if config.transport == "shared_memory":
        return local
    from titan_rl.weights.transports.rdma import RDMATransport

    return RDMATransport(local, timeout_s=config.pull_timeout_s)
