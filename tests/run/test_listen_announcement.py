"""Announcement of the addresses on which a run listens, on a fake: no socket is opened."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from titan_rl.config.hosts import HostsConfig
from titan_rl.core.console import ConsoleLines
from titan_rl.run.open_host_workers import use_monarch


def test_each_listen_address_is_announced_once(monkeypatch: pytest.MonkeyPatch):
    used: list[str] = []
    listening = SimpleNamespace(listen_below=None, listen_on=lambda address, folder: used.append(address))
    monkeypatch.setitem(sys.modules, "titan_rl.cluster.processes.sockets", listening)
    monkeypatch.setattr("titan_rl.run.open_host_workers.own_address", lambda hosts: hosts.listen)
    monkeypatch.setattr("titan_rl.run.open_host_workers._announced", set[str]())
    console = ConsoleLines()
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2", "127.0.0.1"):
        use_monarch(HostsConfig(addresses=("10.0.0.9",), listen=address), console)
    assert used == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "127.0.0.1"]
    assert [line.partition(": ")[0] for line in console] == [
        "this run listens on 10.0.0.1",
        "this run listens on 10.0.0.2",
    ]
