"""TCP transport between hosts: one transfer over the trainer's link, deltas of changed bytes, and failing hosts."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights.relay.hosts import Hosts, OddHost, arrived, silent

from titan_rl.core.errors import StateDictError
from titan_rl.weights.relay import host_reader
from titan_rl.weights.relay import server as relay_server
from titan_rl.weights.transports.registry import TransportSpec, find_transport, make_transport
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.transports.tcp import TCPTransport
from titan_rl.weights.types import Manifest

NUMBERS = 2_200_000  # in bfloat16: five chunks


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()
    assert not made.left()


def weights(seed: int = 0) -> torch.Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stepped(tensor: torch.Tensor, seed: int, share: float = 0.02, units: int = 1) -> torch.Tensor:
    """Copy of `tensor` in which a share of the values differs by one to `units` units in the last place."""
    random = torch.Generator().manual_seed(seed)
    at = torch.rand(len(tensor), generator=random) < share
    by = torch.randint(1, units + 1, at.shape, generator=random, dtype=torch.int16)
    return (tensor.view(torch.int16) + at * by).view(torch.bfloat16)


def publish(writer: TCPTransport, version: int, tensor: torch.Tensor) -> Manifest:
    return arrived(writer.publish(version, [("w", tensor)]))


def wait_until_encoded() -> None:
    """Wait for the deltas of the last published version, which a run encodes between two steps."""
    for thread in threading.enumerate():
        if thread.name == "encode weights":
            thread.join()


def read(reader: TCPTransport, manifest: Manifest) -> torch.Tensor:
    ((name, tensor),) = reader.pull(manifest)
    assert name == "w"
    return tensor.clone()


def test_auto_transport_is_tcp_with_several_hosts() -> None:
    assert isinstance(make_transport("auto", TransportSpec("run")), SharedMemoryTransport)
    assert isinstance(make_transport("auto", TransportSpec("run", address="10.0.0.1")), TCPTransport)
    assert not find_transport("shared_memory").spans_hosts
    assert find_transport("auto").spans_hosts


def test_trainer_sends_a_version_once_to_several_hosts(hosts: Hosts) -> None:
    writer, readers = hosts.end("t"), [hosts.end(f"h{index}") for index in range(4)]
    manifest = publish(writer, 1, weights())
    with ThreadPoolExecutor(4) as threads:
        for tensor in threads.map(lambda reader: read(reader, manifest), readers):
            assert tensor.equal(weights())
    assert writer.sent_bytes == manifest.shards[0].num_bytes


def test_processes_of_a_host_share_one_transfer(hosts: Hosts) -> None:
    writer, readers = hosts.end("t"), [hosts.end("h") for _ in range(4)]
    manifest = publish(writer, 1, weights())
    with ThreadPoolExecutor(4) as threads:
        for tensor in threads.map(lambda reader: read(reader, manifest), readers):
            assert tensor.equal(weights())
    assert writer.sent_bytes == manifest.shards[0].num_bytes
    assert all(reader.pull_figures()["received_share"] == 1.0 for reader in readers)
    assert len(list(hosts.root.glob("h/*/1"))) == 1


def test_reader_on_the_writers_host_transfers_nothing(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("t")
    assert read(reader, publish(writer, 1, weights())).equal(weights())
    assert (writer.sent_bytes, reader.pull_figures()) == (0, {})


def test_next_version_is_sent_as_a_delta(hosts: Hosts) -> None:
    writer, readers = hosts.end("t"), [hosts.end(f"h{index}") for index in range(3)]
    tensor = weights()
    for version in range(1, 6):
        manifest = publish(writer, version, tensor)
        writer.release(version - 2)
        sent = writer.sent_bytes
        for reader in readers:
            assert read(reader, manifest).equal(tensor)
            share = reader.pull_figures()["received_share"]
            assert share < 0.1 if version > 1 else share == 1.0
        assert writer.sent_bytes - sent == readers[0].pull_figures()["received_bytes"]
        tensor = stepped(tensor, version)


def test_reader_that_missed_versions_gets_a_chain_of_deltas(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("h")
    tensor = weights()
    assert read(reader, publish(writer, 1, tensor)).equal(tensor)
    for version in range(2, 6):  # the only reader misses all but the last
        tensor = stepped(tensor, version)
        manifest = publish(writer, version, tensor)
        wait_until_encoded()
        writer.release(version - 2)
    assert read(reader, manifest).equal(tensor)
    assert reader.pull_figures()["received_share"] < 0.4


def test_host_relays_the_delta_chain_to_one_further_behind(hosts: Hosts) -> None:
    writer, first, second = hosts.end("t"), hosts.end("first"), hosts.end("second")
    tensor = weights()
    for version in range(1, 6):
        manifest = publish(writer, version, tensor)
        for reader, versions in ((first, (1, 3, 4, 5)), (second, (1, 5))):
            if version in versions:
                assert read(reader, manifest).equal(tensor)
        wait_until_encoded()
        writer.release(version - 2)
        sent = writer.sent_bytes
        tensor = stepped(tensor, version)
    assert second.pull_figures()["received_share"] < 0.4
    assert writer.sent_bytes == sent  # the second host reads from the first


def test_delta_chain_as_large_as_the_version_is_dropped(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("h")
    tensor = weights()
    read(reader, publish(writer, 1, tensor))
    for version in range(2, 10):
        tensor = stepped(tensor, version, share=0.3, units=64)  # a delta is about a sixth of the version
        manifest = publish(writer, version, tensor)
        wait_until_encoded()
    assert read(reader, manifest).equal(tensor)
    assert reader.pull_figures()["received_share"] == 1.0


def test_no_delta_is_encoded_without_remote_readers(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*arguments: object) -> None:
        raise AssertionError("a delta nobody asked for")

    monkeypatch.setattr("titan_rl.weights.relay.origin.encode_delta", encode)
    writer = hosts.end("t")
    for version in range(1, 4):
        publish(writer, version, weights())
        wait_until_encoded()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 2)), st.sampled_from(["step", "step", "step", "jump", "big step"])),
        min_size=2,
        max_size=8,
    ),
    st.integers(1, 2),
    st.sampled_from([4, 100]),
)
def test_readers_get_exact_bytes_despite_missed_versions(
    versions: list[tuple[set[int], str]], fanout: int, anchor_interval: int
) -> None:
    with TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        try:
            writer = hosts.end("t", fanout=fanout, anchor_interval=anchor_interval)
            readers = [hosts.end(f"h{index}") for index in range(3)]
            tensor, has = weights(), dict[int, int]()
            since = 1  # first version followed by small steps only
            for version, (reading, change) in enumerate(versions, 1):
                shares = {"step": 0.02, "big step": 0.3}
                tensor = weights(version) if change == "jump" else stepped(tensor, version, shares[change])
                if change != "step" or version % anchor_interval == 0:
                    since = version
                manifest = publish(writer, version, tensor)
                wait_until_encoded()
                writer.release(version - 2)
                for index in sorted(reading):
                    assert read(readers[index], manifest).equal(tensor)
                    share = readers[index].pull_figures()["received_share"]
                    assert share <= 1.0
                    if has.get(index, 0) >= since and index == min(reading):  # it reads from the trainer
                        assert share < 0.5
                    has[index] = version
        finally:
            hosts.close()
        assert not hosts.left()


def test_anchor_version_is_sent_whole(hosts: Hosts) -> None:
    writer, reader = hosts.end("t", anchor_interval=3), hosts.end("h")
    shares, tensor = list[float](), weights()
    for version in range(1, 8):
        assert read(reader, publish(writer, version, tensor)).equal(tensor)
        shares.append(reader.pull_figures()["received_share"])
        tensor = stepped(tensor, version)
    assert [share == 1.0 for share in shares] == [True, False, True, False, False, True, False]


def test_mostly_changed_version_is_sent_whole(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("h")
    for version in (1, 2):
        assert read(reader, publish(writer, version, weights(version))).equal(weights(version))
        assert reader.pull_figures()["received_share"] == 1.0


def test_late_reader_gets_the_whole_version_from_an_earlier_one(hosts: Hosts) -> None:
    writer, early, late = hosts.end("t"), hosts.end("early"), hosts.end("late")
    first, second = weights(), stepped(weights(), 1)
    read(early, publish(writer, 1, first))
    manifest = publish(writer, 2, second)
    assert read(early, manifest).equal(second)
    sent = writer.sent_bytes
    assert read(late, manifest).equal(second)
    assert (writer.sent_bytes, late.pull_figures()["received_share"]) == (sent, 1.0)


def test_another_process_takes_over_when_the_host_reader_ends(hosts: Hosts) -> None:
    writer, first, second = hosts.end("t"), hosts.end("h"), hosts.end("h")
    manifest = publish(writer, 1, weights())
    for reader in (first, second):
        assert read(reader, manifest).equal(weights())
    first.close()
    manifest = publish(writer, 2, stepped(weights(), 1))
    assert read(second, manifest).equal(stepped(weights(), 1))


def test_unresponsive_host_is_skipped(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_server, "SILENCE_S", 0.3)
    writer, reader, behind = hosts.end("t"), hosts.end("h"), hosts.end("behind")
    manifest = publish(writer, 1, weights())
    odd = OddHost("odd", manifest)
    with silent() as server:
        odd.place("odd", f"127.0.0.1:{server.getsockname()[1]}")
        assert read(reader, manifest).equal(weights())
        assert read(behind, manifest).equal(weights())
    odd.server.close()
    assert writer.sent_bytes == manifest.shards[0].num_bytes


def test_slow_host_does_not_delay_others(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow host alone would take half a minute."""
    monkeypatch.setattr(host_reader, "TRIAL_S", 0.1)
    writer, readers = hosts.end("t"), [hosts.end("b"), hosts.end("c")]
    manifest = publish(writer, 1, weights())
    slow, stop = OddHost("slow", manifest), threading.Event()
    with ThreadPoolExecutor(3) as threads:
        sending = threads.submit(slow.sends_slowly, weights().view(torch.uint8).numpy(), 6.0, stop)
        for tensor in threads.map(lambda reader: read(reader, manifest), readers):
            assert tensor.equal(weights())
        assert not slow.copy.is_complete
        stop.set()
        sending.result()
    slow.server.close()


def test_another_process_reads_if_the_host_reader_hangs(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_server, "SILENCE_S", 0.3)
    writer, hung, other = hosts.end("t"), hosts.end("h"), hosts.end("h")
    read(hung, publish(writer, 1, weights()))
    (leader,) = hosts.root.glob("h/*-reader/leader")
    with silent() as server:
        content = leader.read_text()
        leader.write_text(f'{{"address": "127.0.0.1:{server.getsockname()[1]}", "token": ""}}')
        assert read(other, publish(writer, 2, weights(2))).equal(weights(2))
        leader.write_text(content)


def test_released_version_is_an_error(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("h")
    manifest = publish(writer, 1, weights())
    writer.release(1)
    with pytest.raises(StateDictError, match="version 1 is not here"):
        reader.pull(manifest)


def test_closed_trainer_is_an_error(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("h")
    manifest = publish(writer, 1, weights())
    writer.close()
    with pytest.raises(StateDictError, match="could not be read from the trainer"):
        reader.pull(manifest)


def test_stranger_at_the_trainers_address_is_an_error(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("h")
    manifest = publish(writer, 1, weights())
    stranger = OddHost("stranger", manifest)
    (shard,) = manifest.shards
    moved = replace(shard, remote=replace(shard.remote, address=stranger.server.address))
    with pytest.raises(StateDictError, match="could not be read from the trainer"):
        reader.pull(replace(manifest, shards=(moved,)))
    stranger.server.close()


def test_pull_timeout_is_an_error(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("h", timeout_s=0.2)
    manifest = publish(writer, 1, weights())
    silent_host = OddHost("odd", manifest)
    with pytest.raises(StateDictError, match=r"from odd in 0\.\d s: 0 of 5 chunks are here"):
        reader.pull(manifest)
    silent_host.server.close()


def test_pull_without_the_token_is_rejected(hosts: Hosts) -> None:
    writer, reader = hosts.end("t"), hosts.end("h")
    manifest = publish(writer, 1, weights())
    (shard,) = manifest.shards
    stranger = replace(shard, remote=replace(shard.remote, token="0" * 32))
    with pytest.raises(StateDictError, match="token"):
        reader.pull(replace(manifest, shards=(stranger,)))


def test_reader_follows_a_new_writer(hosts: Hosts) -> None:
    reader = hosts.end("h")
    for attempt in range(2):
        writer = hosts.end("t")
        for version in (1, 2):
            tensor = stepped(weights(attempt), version)
            assert read(reader, publish(writer, version, tensor)).equal(tensor)
        writer.close()
    assert len(list(hosts.root.glob("h/*"))) == 2  # its own folder and the last writer's


def odd_bytes() -> bytes:
    return struct.pack("<BBI", 2, 1, 0)  # an empty delta


ODD = ("is gone", "closes", "zeros", "wrong delta", "wrong sum", "no delta", "withdraws")


def misbehave(host: OddHost, how: str) -> None:
    match how:
        case "is gone":
            host.server.close()
        case "closes":
            host.sends_one_chunk()
            host.server.close()
        case "zeros":
            host.sends_zeros()
        case "wrong delta":
            host.sends_deltas(odd_bytes())
        case "wrong sum":
            host.sends_deltas(odd_bytes(), crc=1)
        case "no delta":
            host.sends_deltas(b"\x02\x01garbage")
        case _:
            host.copy.withdraw("it could not be read")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(["step", "jump", "join", "leave", *ODD]), min_size=1, max_size=8), st.integers(1, 2))
def test_every_host_gets_exact_bytes_despite_faults(events: list[str], fanout: int) -> None:
    with TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        try:
            writer = hosts.end("t", fanout=fanout, anchor_interval=5)
            readers, odd = [hosts.end("first")], list[OddHost]()
            tensor = weights()
            for version, event in enumerate(events, 1):
                tensor = weights(version) if event == "jump" else stepped(tensor, version)
                manifest = publish(writer, version, tensor)
                match event:
                    case "join":
                        readers.append(hosts.end(f"h{version}"))
                    case "leave" if len(readers) > 1:
                        readers.pop(0).close()
                    case how if how in ODD:
                        odd.append(OddHost("odd", manifest))
                        misbehave(odd[-1], how)
                    case _:
                        pass
                with ThreadPoolExecutor(len(readers)) as threads:
                    for found in threads.map(lambda reader, manifest=manifest: read(reader, manifest), readers):
                        assert found.equal(tensor)
        finally:
            hosts.close()
            for host in odd:
                host.server.close()
        assert not hosts.left()
