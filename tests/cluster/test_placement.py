"""Placement of processes on hosts and GPUs. Needs no GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.cluster.hosts.placement import (
    ProcessPlace,
    check_transport,
    choose_transport,
    place_generator_again,
    place_generators,
    place_trainer,
    place_trainer_again,
    place_workers,
)
from titan_rl.config.hosts import HostsConfig, Roles
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.core.errors import ConfigError
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.weights.transports.registry import TransportKind, find_transport


def training(data_parallel: int = 1, tensor_parallel: int = 1, context_parallel: int = 1) -> TrainingConfig:
    return TrainingConfig(
        data_parallel=data_parallel, context_parallel=context_parallel, tensor_parallel=tensor_parallel
    )


def generation(num_generators: int = 2, size: int = 1) -> GenerationConfig:
    return GenerationConfig(num_generators=num_generators, tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("gpus", "ranks", "generators", "size", "trainer", "expected"),
    [
        ("", 1, 2, 1, "", ["", ""]),
        ("0", 1, 2, 1, "0", ["0", "0"]),
        ("01", 1, 2, 1, "0", ["1", "1"]),
        ("0123", 2, 3, 1, "01", ["2", "3", "2"]),
        ("01234567", 4, 2, 2, "0123", ["45", "67"]),
        ("0123", 3, 2, 2, "012", ["01", "23"]),
    ],
)
def test_generators_on_one_host_take_the_gpus_the_trainer_leaves(
    gpus, ranks, generators, size, trainer, expected
) -> None:
    there = {"here": tuple(gpus)}
    places = place_trainer(training(ranks), ["here"], there)
    assert places == tuple(ProcessPlace("here", tuple(gpu)) for gpu in trainer) or not gpus
    placed = place_generators(generation(generators, size), ["here"], there, places)
    assert placed == tuple(tuple(ProcessPlace("here", tuple(own), rank) for rank in range(size)) for own in expected)


@given(
    hosts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    train=st.integers(1, 3),
    per_host=st.integers(1, 3),
    generators=st.integers(1, 9),
    size=st.sampled_from([1, 2]),
)
def test_ranks_never_share_gpus_and_generators_are_spread(hosts, train, per_host, generators, size) -> None:
    names = [f"host-{index}" for index in range(len(hosts))]
    gpus = {name: tuple(map(str, range(count))) for name, count in zip(names, hosts, strict=True)}
    train = min(train, len(hosts))
    roles = Roles.of(HostsConfig(train=train), names)
    few = next((name for name in roles.train if len(gpus[name]) < per_host), None)
    if few is not None:
        with pytest.raises(ConfigError, match=rf"data_parallel.* {few} has no more"):
            place_trainer(training(train * per_host), roles.train, gpus)
        return
    trainer = place_trainer(training(train * per_host), roles.train, gpus)
    assert len({(place.host, place.gpus) for place in trainer}) == train * per_host
    used = [host for index, host in enumerate(roles.generate) if index < generators]
    if any(len(gpus[host]) < size for host in used):
        with pytest.raises(ConfigError, match=r"generation\.tensor_parallel_size is 2 on a host"):
            place_generators(generation(generators, size), roles.generate, gpus, trainer)
        return
    placed = place_generators(generation(generators, size), roles.generate, gpus, trainer)
    for ranks in placed:
        assert len({place.host for place in ranks}) == 1
        assert all(place.gpus == ranks[0].gpus and len(set(place.gpus)) == size for place in ranks)
        assert [place.local_rank for place in ranks] == list(range(size))
    counts = [sum(ranks[0].host == host for ranks in placed) for host in roles.generate]
    assert max(counts) - min(counts) <= 1
    taken = {(place.host, gpu) for place in trainer for gpu in place.gpus}
    for host in used:
        left = [gpu for gpu in gpus[host] if (host, gpu) not in taken]
        users = [sum(gpu in ranks[0].gpus for ranks in placed if ranks[0].host == host) for gpu in gpus[host]]
        if len(left) >= size:
            users = [count for gpu, count in zip(gpus[host], users, strict=True) if gpu in left]
            assert sum(users) == size * sum(ranks[0].host == host for ranks in placed)
        assert max(users) - min(users) <= 1


def test_roles_first_hosts_train_and_last_generate_and_play() -> None:
    names = ["a", "b", "c"]
    assert Roles.of(HostsConfig(), names) == Roles(("a",), ("b", "c"), ("b", "c"))
    assert Roles.of(HostsConfig(), ["a"]) == Roles(("a",), ("a",), ("a",))
    assert Roles.of(HostsConfig(train=3), names) == Roles(("a", "b", "c"), ("a", "b", "c"), ("a", "b", "c"))
    assert Roles.of(HostsConfig(train=2, generate=2, play=1), names) == Roles(("a", "b"), ("b", "c"), ("c",))
    with pytest.raises(ConfigError, match=r"hosts\.generate is 4, and there are 3 hosts"):
        Roles.of(HostsConfig(generate=4), names)


def test_tensor_parallel_ranks_stay_on_one_host() -> None:
    gpus = {"a": (), "b": ()}
    places = place_trainer(training(2, 2), ["a", "b"], gpus)
    assert [place.host for place in places] == ["a", "a", "b", "b"]
    for uneven in (training(1, 2), training(3)):
        with pytest.raises(ConfigError, match=r"set training\.data_parallel to a multiple of 2, or hosts\.train to 1"):
            place_trainer(uneven, ["a", "b"], gpus)


def test_context_parallel_ranks_may_span_hosts() -> None:
    gpus = {"a": ("0", "1"), "b": ("0", "1")}
    places = place_trainer(training(context_parallel=4), ["a", "b"], gpus)
    assert [(place.host, place.gpus) for place in places] == [
        ("a", ("0",)),
        ("a", ("1",)),
        ("b", ("0",)),
        ("b", ("1",)),
    ]
    with pytest.raises(
        ConfigError, match=r"hosts\.train is 2, and .* is 1 x 3 x 1: each host needs the same number of ranks"
    ):
        place_trainer(training(context_parallel=3), ["a", "b"], gpus)


def test_rollout_workers_are_placed_round_robin() -> None:
    assert [place.host for place in place_workers(3, ["a", "b"])] == ["a", "b", "a"]


def test_gpu_transport_needs_gpus_for_trainer_and_generators() -> None:
    kind, roles = TransportKind(lambda spec: NotImplemented, needs_gpus=True), Roles(("a",), ("b",), ("c",))
    check_transport("on_gpus", kind, roles, {"a": ("0",), "b": ("0",), "c": ()})
    with pytest.raises(ConfigError, match="b has no GPU; choose 'auto'"):
        check_transport("on_gpus", kind, roles, {"a": ("0",), "b": (), "c": ()})


def test_single_host_transport_needs_trainer_and_generators_together() -> None:
    kind, gpus = find_transport("shared_memory"), {"a": (), "b": ()}
    check_transport("shared_memory", kind, Roles(("a",), ("a",), ("b",)), gpus)
    with pytest.raises(ConfigError, match="reaches one host, and a, b train and generate; choose 'auto'"):
        check_transport("shared_memory", kind, Roles(("a",), ("b",), ("b",)), gpus)


GPUS = {"a": ("0", "1"), "b": ("0", "1"), "c": ("0", "1", "2")}
TWO_HOSTS = place_trainer(training(4), ["a", "b"], GPUS)


def shown(places: Sequence[ProcessPlace]) -> list[str]:
    return [f"{place.host}{''.join(place.gpus)}" for place in places]


@pytest.mark.parametrize(
    ("there", "taken", "expected"),
    [
        ("abc", [], ["a0", "a1", "b0", "b1"]),
        ("bc", [], ["b0", "b1", "c0", "c1"]),
        ("ac", [("c", "0")], ["a0", "a1", "c1", "c2"]),
        ("ac", [("c", "0"), ("c", "2")], ["a0", "a1", "c0", "c1"]),  # two of three are needed: one is shared
    ],
)
def test_ranks_of_a_lost_host_move_to_another(there: str, taken: list[Any], expected: list[str]) -> None:
    gpus = {host: GPUS[host] for host in there}
    assert shown(place_trainer_again(training(4), TWO_HOSTS, gpus, taken)) == expected


def test_fewer_hosts_take_more_ranks_until_none_fits() -> None:
    before = place_trainer(training(2, 2), ["a", "b"], {"a": (), "b": ()})
    assert shown(place_trainer_again(training(2, 2), before, {"b": ()})) == ["b", "b", "b", "b"]
    with pytest.raises(ConfigError, match="no host that sees the run's folder"):
        place_trainer_again(training(2, 2), before, {})
    with pytest.raises(ConfigError, match="a has no more"):
        place_trainer_again(training(4), TWO_HOSTS, {"a": GPUS["a"]})


def test_ranks_move_to_the_host_with_most_free_gpus() -> None:
    before = place_trainer(training(), ["a"], GPUS)
    taken = [("b", "0"), ("c", "0")]
    assert shown(place_trainer_again(training(), before, {host: GPUS[host] for host in "bc"}, taken)) == ["c1"]


@pytest.mark.parametrize(
    ("gpus", "size", "expected"),
    [
        ({"b": "0123", "c": "0123"}, 1, [("c", "1")]),
        ({"b": "0123", "c": "0123"}, 2, [("c", "1"), ("c", "2")]),
        ({"b": "0123", "c": "01"}, 2, [("b", "2"), ("b", "3")]),
        ({"b": "01", "c": "0123"}, 2, [("c", "1"), ("c", "2")]),
        ({"b": "01", "c": "01"}, 2, []),
        ({"b": "01"}, 1, []),
        ({}, 1, []),
    ],
)
def test_generator_of_a_lost_host_takes_only_free_gpus(gpus, size, expected) -> None:
    def on(host: str, own: str) -> tuple[ProcessPlace, ...]:
        return tuple(ProcessPlace(host, (gpu,)) for gpu in own)

    gone = tuple(ProcessPlace("a", tuple("01"[:size]), rank) for rank in range(size))
    placed = place_generator_again(
        0, [gone, on("c", "0")], {name: tuple(own) for name, own in gpus.items()}, 1, on("b", "01")
    )
    assert [(place.host, gpu) for place, (_, gpu) in zip(placed, expected, strict=True)] == expected
    assert all(set(place.gpus) == {gpu for _, gpu in expected} for place in placed)


@pytest.mark.parametrize(("per_host", "expected"), [(1, None), (2, "c"), (3, "b")])
def test_generator_without_gpus_moves_to_a_host_with_room(per_host, expected):
    on = [(ProcessPlace(host),) for host in ("a", "b", "b", "c")]
    last = place_generator_again(0, on, {"trains": (), "plays": ()}, per_host, [ProcessPlace("trains")])
    assert last == (ProcessPlace("plays"),), "the run cannot continue without a generator"
    placed = place_generator_again(0, on, {"trains": (), "b": (), "c": ()}, per_host, [ProcessPlace("trains")])
    assert placed == ((ProcessPlace(expected),) if expected else ())


def on(*gpus: str) -> tuple[ProcessPlace, ...]:
    return tuple(ProcessPlace("here", (gpu,) if gpu else ()) for gpu in gpus)


def weights_of(folder: Path, parameters: int) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * parameters)  # sparse: takes no disk space


@pytest.mark.parametrize(
    ("settings", "trainer", "generator", "gpu_gib", "expected"),
    [
        ({}, "0", "1", 80, ("cuda_ipc", "on a trainer's GPU of 80")),
        ({}, "0", "1", 30, ("shared_memory", "18.6 GiB of .* leave too little for activations")),
        ({}, "0", "1", None, ("shared_memory", "nvidia-smi does not say")),
        ({}, "0", "0", 80, ("shared_memory", "share a GPU")),
        ({}, "", "", 80, ("shared_memory", "not all on GPUs")),
        ({"generation": {"engine": "own:engine"}}, "0", "1", 80, ("shared_memory", "other than vllm")),
        ({"hosts": {"addresses": ["a", "b"]}}, "0", "1", 80, ("tcp", "several hosts")),
    ],
)
def test_auto_transport_is_cuda_ipc_on_one_host_with_room(
    tmp_path: Path,
    settings: dict[str, Any],
    trainer: str,
    generator: str,
    gpu_gib: int | None,
    expected: tuple[str, str],
) -> None:
    weights_of(tmp_path, 10**9)
    model = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    config = RunConfig.model_construct(
        model=model,
        training=training(),
        generation=GenerationConfig.model_construct(engine="vllm").model_copy(update=settings.get("generation", {})),
        hosts=HostsConfig.model_validate(settings.get("hosts", {})),
    )
    name, why = choose_transport(
        config, on(trainer), [on(generator)], lambda: None if gpu_gib is None else gpu_gib * 2**30
    )
    assert name == expected[0]
    assert re.search(expected[1], why)
