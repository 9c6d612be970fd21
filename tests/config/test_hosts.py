"""The table [hosts]: addresses, roles, providers and limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from titan_rl.config.hosts import HostsConfig, Roles, address_towards, check_own_machine, split_address
from titan_rl.core.calls.parsing import names_this_machine
from titan_rl.core.errors import ConfigError


def test_addresses_are_a_list_or_comma_separated_with_a_default_port() -> None:
    expected = ("10.0.0.1:22222", "node-2:4000", "[fd00::1]:22222")
    assert HostsConfig.model_validate({"addresses": ["10.0.0.1", "node-2:4000", "[fd00::1]"]}).addresses == expected
    assert HostsConfig.model_validate({"addresses": "10.0.0.1, node-2:4000,[fd00::1]:22222"}).addresses == expected
    assert HostsConfig(addresses=expected).elsewhere
    assert not HostsConfig().elsewhere
    assert HostsConfig.model_validate({"addresses": ""}) == HostsConfig()


def test_without_training_all_or_the_set_number_of_hosts_generate() -> None:
    names = ["a", "b", "c"]
    hosts = HostsConfig(addresses=("a:1", "b:1", "c:1"), train=2, play=3)
    assert Roles.of(hosts.of_generators_alone, names).generate == ("a", "b", "c")
    assert Roles.of(hosts.model_copy(update={"generate": 1}).of_generators_alone, names).generate == ("c",)
    assert Roles.of(HostsConfig().of_generators_alone, ["here"]).generate == ("here",)


@pytest.mark.parametrize(
    "address", ["", ":22222", "tcp://a:1", "a:0", "a:65536", "a:b", "a:", "10.0.0.2 10.0.0.3", "a\tb:1"]
)
def test_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(ValidationError, match="must be HOST or HOST:PORT"):
        HostsConfig.model_validate({"addresses": [address]})


def test_duplicate_address_is_rejected() -> None:
    with pytest.raises(ValidationError, match="a:22222 is listed more than once"):
        HostsConfig.model_validate({"addresses": ["a", "a:22222"]})


def test_loopback_addresses_are_recognized() -> None:
    assert [names_this_machine(split_address(each)[0]) for each in ("127.0.0.1", "localhost", "[::1]:1")] == [True] * 3
    assert not any(map(names_this_machine, ("0.0.0.0", "10.0.0.1", "node-2")))
    assert address_towards(HostsConfig(addresses=("127.0.0.1:22222",))) == "127.0.0.1"


WILDCARDS = ("0.0.0.0", "0.0.0.0:22222", "[::]:22222", "*:22222", "0:22222", "[]:22222", "[::ffff:0.0.0.0]:1")


@pytest.mark.parametrize("address", WILDCARDS)
def test_wildcard_address_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match=r"all interfaces; name one address of the machine|must be HOST or HOST:PORT"):
        split_address(address)
    with pytest.raises(ValidationError, match=r"all interfaces|must be HOST or HOST:PORT"):
        HostsConfig.model_validate({"addresses": [address]})


@pytest.mark.parametrize("address", ["255.255.255.255", "224.0.0.1:1", "[ff02::1]:22222", "[::ffff:224.0.0.1]:1"])
def test_multicast_and_broadcast_addresses_are_rejected(address: str) -> None:
    with pytest.raises(ValidationError, match="stands for several machines; name one address"):
        HostsConfig.model_validate({"addresses": [address]})


@pytest.mark.parametrize("address", ["fd00::2", "fd00::2:22222", "::1", "::ffff:10.0.0.1", "1:2:3:4:5:6:7:8"])
def test_ipv6_address_needs_brackets(address: str) -> None:
    with pytest.raises(ValidationError, match=r"needs brackets around the IPv6 address, as in \[fd00::2\]:22222"):
        HostsConfig.model_validate({"addresses": [address]})


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "*"])
def test_controller_cannot_listen_on_all_interfaces(listen: str) -> None:
    with pytest.raises(ValidationError, match="all interfaces; name one address"):
        HostsConfig.model_validate({"addresses": ["a"], "listen": listen})


def test_controller_must_listen_on_an_address_of_its_machine() -> None:
    check_own_machine(HostsConfig(addresses=("127.0.0.1",), listen="127.0.0.1"))
    for listen in ("203.0.113.9", "a..b", "fe80::1:2:3:4"):
        with pytest.raises(ConfigError, match=rf"hosts\.listen = '{listen}': .*name an address of this machine"):
            check_own_machine(HostsConfig(addresses=("127.0.0.1",), listen=listen))


def test_addresses_file_must_exist_and_needs_addresses(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    with pytest.raises(ValidationError, match=r"addresses_file = .* needs addresses or provider"):
        HostsConfig(addresses_file=str(file))
    config = HostsConfig(addresses=("127.0.0.1",), addresses_file=str(file))
    with pytest.raises(ConfigError, match=r"hosts\.addresses_file = '.*': No such file or directory; create"):
        check_own_machine(config)
    file.touch()
    check_own_machine(config)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"train": 3}, "hosts.train is 3, and there is 1 host;"),
        ({"addresses": (), "train": 3}, "hosts.train is 3, and there is 1 host;"),
        ({"addresses": ("a",), "generate": 5}, "hosts.generate is 5, and there is 1 host;"),
        ({"addresses": ("a", "b"), "play": 3}, "hosts.play is 3, and there are 2 hosts;"),
        ({"provider": "ssh", "names": ("a",), "train": 2}, "hosts.train is 2, and there is 1 host;"),
        (
            {"provider": "kubernetes", "kubernetes": {"image": "i", "volume": "v"}, "train": 3},
            "hosts.train is 3, and there is 1 host;",
        ),
        ({"addresses": ("a", "b"), "train": 2, "generate": 2}, None),
        ({"provider": "slurm", "train": 3}, None),  # the allocation determines the number of hosts
        ({"provider": "mine:workers", "train": 3}, None),
    ],
)
def test_roles_cannot_need_more_hosts_than_configured(table: dict[str, object], message: str | None) -> None:
    found = list(HostsConfig.model_validate(table).too_few())
    assert [line.startswith(message) for line in found] == [True] if message else not found


def test_slurm_job_has_a_known_number_of_hosts_when_launched() -> None:
    config = HostsConfig(provider="slurm", train=3)
    assert list(config.too_few(launched=True)) == ["hosts.train is 3, and there is 1 host; lower it, or use more hosts"]
    with pytest.raises(ConfigError, match=r"hosts\.train is 3, and there is 1 host;"):
        Roles.of(config, ["a"])


def test_ssh_hosts_are_a_list_or_comma_separated() -> None:
    hosts = HostsConfig.model_validate({"provider": "ssh", "names": "gpu-1,me@gpu-2=fd00::2"})
    assert hosts.named_hosts == {"gpu-1": "", "me@gpu-2": "fd00::2"}
    with pytest.raises(ValidationError, match="must have an IP address after ="):
        HostsConfig.model_validate({"provider": "ssh", "names": "a=a.example"})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"silence_s": 0.5}, "silence_s = 0.5 is less than 1: hosts send four heartbeats a second, .* raise it"),
        (
            {"hang_timeout_s": 1},
            "hang_timeout_s = 1 is less than 2: processes are checked once a second, .* raise it",
        ),
    ],
)
def test_limits_too_short_for_healthy_hosts_are_rejected(settings: dict[str, float], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        HostsConfig.model_validate(settings)


def test_shortest_possible_limits_are_accepted() -> None:
    hosts = HostsConfig.model_validate({"silence_s": 1, "hang_timeout_s": 2, "drain_s": 0})
    assert (hosts.silence_s, hosts.lease_s, hosts.hang_timeout_s, hosts.drain_s) == (1, 5, 2, 0)
