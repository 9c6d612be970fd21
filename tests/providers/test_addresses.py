"""Addresses of hosts that the other hosts can reach."""

import socket

import pytest

from titan_rl.cluster.providers import addresses
from titan_rl.cluster.providers.addresses import addresses_of, source_towards
from titan_rl.core.errors import ProviderError


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch):
    known = {"me": ["127.0.1.1"], "two": ["10.0.0.2"], "six": ["fd00::6"], "both": ["fd00::7", "10.0.0.7"]}

    def getaddrinfo(name: str, *_: object, **__: object):
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in known[name]]
        return [
            (kind, socket.SOCK_STREAM, 6, "", (address, 0)) for kind, address in zip(kinds, known[name], strict=True)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "source_towards", lambda address: f"towards {address}")


@pytest.mark.usefixtures("names")
def test_own_hostname_is_not_loopback_with_other_hosts():
    assert addresses_of(["me", "two"]) == {"me": "towards 10.0.0.2", "two": "10.0.0.2"}
    assert addresses_of(["me"]) == {"me": "127.0.1.1"}
    assert addresses_of(["me", "two"], {"two": "127.0.0.2"}) == {"me": "127.0.1.1", "two": "127.0.0.2"}


@pytest.mark.usefixtures("names")
def test_ipv4_is_preferred_to_ipv6():
    assert addresses_of(["six", "both"]) == {"six": "fd00::6", "both": "10.0.0.7"}


@pytest.mark.usefixtures("names")
def test_unknown_host_name_error_gives_the_fix():
    with pytest.raises(ProviderError, match="three has no address here: Name or service not known; fix DNS"):
        addresses_of(["two", "three"])
    with pytest.raises(ProviderError, match="not known; give its address"):
        addresses_of(["three"], fix="give its address")


def test_source_address_towards_a_host():
    assert source_towards("127.0.0.1") == "127.0.0.1"
