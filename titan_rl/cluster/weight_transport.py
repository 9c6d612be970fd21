"""How a process of a run moves weights."""

from __future__ import annotations

from titan_rl.cluster.processes.process import ProcessSpec
from titan_rl.config.sections import StateDictConfig
from titan_rl.weights.transports.registry import TransportSpec, make_transport
from titan_rl.weights.types import StateDictTransport


def transport_of(process: ProcessSpec, run_id: str, statedict: StateDictConfig) -> StateDictTransport:
    """The transport that settings name, as this process uses it."""
    spec = TransportSpec(
        run_id,
        statedict.pull_timeout_s,
        process.rank,
        process.host,
        process.address,
        fanout=statedict.fanout,
        anchor_interval=statedict.anchor_interval,
    )
    return make_transport(statedict.transport, spec)
