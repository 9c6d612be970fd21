"""User-defined engine, transport, strategy and filter, each given as "module:function"."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_rl import EngineLoop, GeneratorRouter, LocalReplica, Rollout, RolloutGroup, SamplingParams
from titan_rl.cluster.hosts.placement import check_transport
from titan_rl.config.hosts import Roles
from titan_rl.config.load import load_config
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.registry import find_engine, make_engine
from titan_rl.generation.router.strategies import make_strategy
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.scheduling.filters import find_filter, first_reason
from titan_rl.weights.transports.registry import TransportSpec, find_transport, make_transport

OWN = """
from titan_rl import ScriptedEngine
from titan_rl.generation.registry import EngineKind
from titan_rl.generation.router import RoundRobin
from titan_rl.weights.transports.registry import TransportKind
from titan_rl.weights.types import Manifest

def engine(spec):
    return ScriptedEngine(max_context=spec.max_context, max_running=spec.max_running, script=lambda _: spec.generator)

experts = EngineKind(lambda spec: ScriptedEngine(experts=(2, 1, 4)), routed_experts=True)

shared = {}

class Transport:
    def __init__(self, spec): self.versions = shared.setdefault(spec.run_id, {})
    def publish(self, version, named_tensors):
        self.versions[version] = dict(named_tensors)
        return Manifest(version, ())
    def pull(self, manifest): return iter(self.versions[manifest.version].items())
    def release(self, version): self.versions.pop(version, None)
    def close(self): self.versions.clear()

on_gpus = TransportKind(Transport, needs_gpus=True)

class Last(RoundRobin):
    def __init__(self, max_sessions): super().__init__()
    def choose(self, session_id, cost): return self._turns[-1]

def one_sided(group):
    return "one_sided" if len(group.rollouts) > 2 else None

def nothing(*args): ...

def number(*args): return 3

def broken(*args): raise KeyError("answer")
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_parts", None)


def load(*overrides: tuple[str, str]) -> object:
    return load_config("examples/alphabet_sort/cpu.toml", overrides, check_files=False)


async def test_custom_engine_serves_weights_from_a_custom_transport() -> None:
    name = "own_parts:Transport"
    writer, reader = (make_transport(name, TransportSpec("run-7")) for _ in range(2))
    manifest = writer.publish(1, [("w", 1)])
    engine = make_engine("own_parts:engine", EngineSpec("policy", max_context=16, generator=5))
    assert isinstance(engine, ScriptedEngine)
    loop = EngineLoop(lambda: engine)
    await loop.start()
    await loop.pull(1, lambda: reader.pull(manifest))
    completion = await loop.generate([1, 2], request_id="a", sampling=SamplingParams(max_tokens=3))
    await loop.close()
    assert (list(completion.token_ids), completion.versions) == ([5, 5, 5], [1, 1, 1])
    assert engine.state_dict == {"w": 1}


async def test_custom_strategy_routes_requests() -> None:
    replicas = [LocalReplica(name, EngineLoop(ScriptedEngine), lambda version: []) for name in ("a", "b")]
    for replica in replicas:
        await replica.loop.start()
    router = GeneratorRouter(replicas, make_strategy("own_parts:Last"))
    calls = [
        asyncio.create_task(router.generate([1], request_id=f"r{index}", sampling=SamplingParams(max_tokens=2)))
        for index in range(3)
    ]
    await asyncio.sleep(0)
    assert [replica.num_requests for replica in router.replicas] == [0, 3]
    await asyncio.gather(*calls)
    await router.close()


def group_of(size: int) -> RolloutGroup:
    return RolloutGroup("g", None, [Rollout(f"g/{index}", "g", index, None) for index in range(size)])


def test_custom_filter_names_the_reason_for_dropping_a_group() -> None:
    filters = [find_filter("zero_variance"), find_filter("own_parts:one_sided")]
    assert first_reason(filters, group_of(2)) is None
    assert first_reason(filters, group_of(3)) == "one_sided"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "own_parts:number",
            "filter 'own_parts:number' returned 3 for group 'g'; it must return a metric's name, or None",
        ),
        ("own_parts:broken", r"filter 'own_parts:broken' failed on group 'g': KeyError: 'answer' \(.*own_parts.py:"),
    ],
)
def test_filter_errors_name_the_filter_and_its_line(name: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        first_reason([find_filter(name)], group_of(2))


def test_settings_unsupported_by_a_custom_engine_are_rejected() -> None:
    two = ("generation.tensor_parallel_size", "2")
    with pytest.raises(
        ConfigError, match=r"^command line: generation.tensor_parallel_size = 2.*'own_parts:engine' .*set"
    ):
        load(two, ("generation.engine", "own_parts:engine"))
    load(two)
    experts = ("generation.return_routed_experts", "true")
    with pytest.raises(
        ConfigError, match=r"return_routed_experts = true.*'own_parts:engine' does not return them; set"
    ):
        load(experts, ("generation.engine", "own_parts:engine"))
    load(experts, ("generation.engine", "own_parts:experts"))
    speculative = ("generation.speculative.method", "ngram")
    with pytest.raises(ConfigError, match=r'speculative.method = "ngram".*\'own_parts:engine\' has no speculative'):
        load(speculative, ("generation.engine", "own_parts:engine"))
    load(speculative)
    auto = ("generation.max_running", "auto")
    with pytest.raises(ConfigError, match=r"max_running = 'auto'.*'own_parts:engine' cannot determine.*set it to a"):
        load(auto, ("generation.engine", "own_parts:engine"))
    load(auto)
    assert find_engine("own_parts:experts").routed_experts
    assert not find_engine("own_parts:engine").modules


def test_transport_that_needs_gpus_is_rejected_without_them() -> None:
    name = load(("statedict.transport", "own_parts:on_gpus")).statedict.transport
    roles = Roles(("here",), ("here",), ("here",))
    with pytest.raises(ConfigError, match=r"statedict.transport is 'own_parts:on_gpus' and here has no GPU"):
        check_transport(name, find_transport(name), roles, {"here": ()})
    assert not find_transport("own_parts:Transport").needs_gpus
    assert [name for name in ("shared_memory", "rdma", "cuda_ipc") if find_transport(name).needs_gpus] == ["cuda_ipc"]


def test_transport_spec_takes_no_rank_in_place_of_a_time_limit() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        TransportSpec("run", 3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: make_engine("own_parts:nothing", EngineSpec("p")),
            "generation.engine = .* returned None, .* not an Engine",
        ),
        (
            lambda: make_engine("vlm", EngineSpec("p")),
            "generation.engine = 'vlm' is unknown; it must be one of vllm, or \"module:funct",
        ),
        (
            lambda: make_transport("own_parts:number", TransportSpec("r")),
            "statedict.transport = .* 3, which is not",
        ),
        (lambda: make_strategy("own_parts:nothing"), "routing.strategy = 'own_parts:nothing' returned None; it must"),
        (lambda: make_strategy("own_parts:broken"), "routing.strategy = .* failed: KeyError: 'answer' .*own_parts"),
        (lambda: find_filter("own_parts:gone"), "scheduling.filters = .*: own_parts has no function gone; it has: "),
    ],
)
def test_invalid_custom_part_error_names_its_setting(make, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()
