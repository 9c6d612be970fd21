"""Relay chain of hosts: the trainer sends about once, there are no cycles, and bad hosts are avoided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.weights.relay.origin import KEPT, REMEMBERED, Chain


def test_hosts_form_a_chain() -> None:
    chain = Chain()
    assert chain.assign(1, "a", "A") is None
    assert chain.assign(1, "b", "B") == ("a", "A", 1)
    assert chain.assign(1, "c", "C") == ("b", "B", 2)


def test_larger_fanout_forms_a_tree() -> None:
    chain = Chain(2)
    found = [chain.assign(1, name, name.upper()) for name in "abcdef"]
    assert found == [None, None, ("a", "A", 1), ("a", "A", 1), ("b", "B", 1), ("b", "B", 1)]


def test_reader_of_a_dead_host_moves_to_the_host_before_it() -> None:
    chain = Chain()
    for name in "abc":
        chain.assign(1, name, name.upper())
    assert chain.assign(1, "c", "C", avoid=["b"]) == ("a", "A", 1)
    assert chain.assign(1, "d", "D") == ("c", "C", 2)


def test_slow_host_gets_no_readers_for_some_versions() -> None:
    chain = Chain()
    for name in "abc":
        chain.assign(1, name, name.upper())
    assert chain.assign(1, "b", "B", avoid=["a"]) is None
    for version in range(2, REMEMBERED + 1):
        for name in "abc":
            chain.assign(version, name, name.upper())
        assert chain.assign(version, "d", "D") == ("c", "C", 2)
    assert chain.assign(REMEMBERED + 1, "a", "A") is None
    assert chain.assign(REMEMBERED + 1, "b", "B") == ("a", "A", 1)


def test_moved_host_keeps_its_readers() -> None:
    chain = Chain()
    for name in "abc":
        chain.assign(1, name, name.upper())
    assert chain.assign(1, "b", "B", avoid=["a"]) is None
    assert chain.assign(1, "d", "D") == ("c", "C", 2)


def test_each_version_starts_a_new_chain() -> None:
    chain = Chain()
    for version in range(2 * KEPT):
        assert chain.assign(version, "a", "A") is None
        assert chain.assign(version, "b", "B") == ("a", "A", 1)


names = st.sampled_from("abcdefgh")


@given(st.integers(1, 3), st.lists(st.tuples(names, st.sets(names, max_size=2)), max_size=40))
def test_chain_reaches_the_trainer_after_any_complaints(fanout: int, calls: list[tuple[str, set[str]]]) -> None:
    chain, parents, bad = Chain(fanout), dict[str, str | None](), set[str]()
    for name, avoid in calls:
        avoid -= {name}
        bad |= avoid & parents.keys()
        found = chain.assign(1, name, name.upper(), sorted(avoid))
        parents[name] = None if found is None else found[0]
        assert parents[name] not in avoid | bad
        if found is not None:
            assert found[1] == found[0].upper()
        seen, at = set[str](), name
        while (above := parents[at]) is not None:
            assert above not in seen
            seen.add(above)
            at = above
        for sender in {*parents.values()}:
            read = [reader for reader, of in parents.items() if of == sender and reader not in bad]
            assert len(read) <= fanout or (sender is None and bad)
