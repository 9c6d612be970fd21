"""Who can reach a run on several hosts is told, once of each address. Nothing listens."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from titan_rl.config.hosts import HostsConfig
from titan_rl.core.console import ConsoleLines
from titan_rl.run.provider_workers import use_monarch


def test_an_address_on_which_a_process_listens_for_several_policies_is_told_once(monkeypatch: pytest.MonkeyPatch):
    used: list[str] = []
    listening = SimpleNamespace(listen_below=None, listen_on=lambda address, folder: used.append(address))
    monkeypatch.setitem(sys.modules, "titan_rl.cluster.processes.sockets", listening)
    monkeypatch.setattr("titan_rl.run.provider_workers.own_address", lambda hosts: hosts.listen)
    monkeypatch.setattr("titan_rl.run.provider_workers._announced", set[str]())
    told = ConsoleLines()
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2", "127.0.0.1"):
        use_monarch(HostsConfig(addresses=("10.0.0.9",), listen=address), told)
    assert used == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "127.0.0.1"]
    assert [line.partition(": ")[0] for line in told] == [
        "this run listens on 10.0.0.1",
        "this run listens on 10.0.0.2",
    ]
