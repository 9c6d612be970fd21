"""Weight transfer between virtual hosts that stall and die in turn, while the others receive every byte."""

from __future__ import annotations

import signal
import time
import zlib
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from depth import on_more_hosts
from hosts.namespaces import Namespaces

from benchmarks.across_hosts.ends import End, ends_on
from titan_rl.weights.transports.tcp import TCPTransport

MEGABYTES = 6  # half a second over a link of 100 Mbit/s
UNDER_WAY_S = 0.2


@pytest.fixture
def writer(hosts: Namespaces, tmp_path: Path) -> Generator[TCPTransport]:
    transport = TCPTransport("run", host="controller", interface=hosts.gateway, root=tmp_path, anchor_interval=1)
    yield transport
    transport.close()
    assert not list(tmp_path.iterdir())


@on_more_hosts
def test_stalled_or_dead_hosts_do_not_delay_others(hosts: Namespaces, writer: TCPTransport) -> None:
    weights = np.random.default_rng(0).integers(0, 256, MEGABYTES << 20, np.uint8)
    crc = zlib.crc32(weights.tobytes())
    for host in hosts:
        host.cap(100)

    def begin(version: int, readers: list[End]) -> None:
        manifest = writer.publish(version, [("w", torch.from_numpy(weights).view(torch.bfloat16))])
        for reader in readers:
            reader.tell_to_pull(manifest)
            time.sleep(0.05)  # so that the chain has this order
        time.sleep(UNDER_WAY_S)

    with ends_on(hosts.hosts, hosts.gateway) as (first, second, third):
        readers = [first, second, third]
        for reader in readers:
            reader.open()

        begin(1, readers)
        first.process.send(signal.SIGSTOP)
        assert second.wait()["crc"] == third.wait()["crc"] == crc
        first.process.send(signal.SIGCONT)
        assert first.wait()["crc"] == crc

        begin(2, readers)
        hosts[0].link_down()  # of the host that relays to the others
        assert second.wait()["crc"] == third.wait()["crc"] == crc  # although the link stays down
        hosts[0].link_up()
        assert first.wait()["crc"] == crc

        begin(3, readers)
        hosts[2].link_down()  # of the last one
        assert first.wait()["crc"] == second.wait()["crc"] == crc
        hosts[2].link_up()
        assert third.wait()["crc"] == crc

        begin(4, [second, first, third])
        first.process.send(signal.SIGKILL)
        assert second.wait()["crc"] == third.wait()["crc"] == crc
    for host in hosts:
        host.uncap()
