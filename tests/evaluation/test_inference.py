"""Evaluation of several policies in turn: policies of one architecture share generators."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("transformers", reason="needs the cpu or gpu extra")

from safetensors.torch import load_file, save_file

from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.load import load_config
from titan_rl.config.run import RunConfig
from titan_rl.core.console import Console, ConsoleLines
from titan_rl.core.errors import StateDictError
from titan_rl.evaluation.policies import inference
from titan_rl.evaluation.policies.inference import Generators, OpenedPolicies, architecture_of
from titan_rl.evaluation.policies.policy_source import PolicySource
from titan_rl.generation.router.control import PullReport
from titan_rl.run.session import SessionFiles
from titan_rl.training.settings import ModelConfig
from titan_rl.types import SamplingParams
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import PublishedWeights

BASE = Path(__file__).parents[2] / "examples" / "alphabet_sort"


class Router:
    """Router whose replicas pull published weights, or refuse them."""

    def __init__(self, transport: SharedMemoryTransport, published: PublishedWeights) -> None:
        self._transport = transport
        self._published = published
        self.pulled: list[dict[str, float]] = []
        self.refuses = False

    async def pull_state_dict(self, version: int) -> PullReport:
        if self.refuses:
            raise StateDictError("no replica could load them")
        manifest = self._published.manifest_of(version)
        self.pulled.append({name: float(tensor.sum()) for name, tensor in self._transport.pull(manifest)})
        return PullReport(version, ("generator-0",), {})

    async def generate(self, prompt_token_ids: object, *, request_id: str, sampling: SamplingParams) -> Any: ...

    def finish_session(self, session_id: str) -> None: ...


class Started:
    """Starts of generators: the policy of each, its router, and whether they have ended."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.names: list[str] = []
        self.routers: list[Router] = []
        self.num_running = 0

    @asynccontextmanager
    async def start(
        self, source: PolicySource, model: ModelConfig, config: RunConfig, files: SessionFiles, console: Console
    ) -> AsyncGenerator[Generators]:
        self.names.append(Path(model.path).name)
        self.num_running += 1
        published = PublishedWeights()
        with SharedMemoryTransport("eval", root=self._root) as transport:
            self.routers.append(router := Router(transport, published))
            yield Generators(cast("Any", router), architecture_of(model), transport, published)
        self.num_running -= 1


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    (tmp_path / "shared").mkdir()
    started = Started(tmp_path / "shared")
    monkeypatch.setattr(inference, "start_generators_for", started.start)
    return started


@pytest.fixture
def policies(tmp_path: Path) -> OpenedPolicies:
    config = load_config(BASE / "cpu.toml")
    return OpenedPolicies(config, EvalConfig(), SessionFiles("eval", tmp_path), ConsoleLines())


def copy_of(folder: Path, *, plus: float = 0.0, **config: object) -> str:
    """Copy the example's model with changed weights and config."""
    shutil.copytree(BASE / "base", folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + plus for name, tensor in weights.items()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    return str(folder)


async def test_same_architecture_is_loaded_into_running_generators(
    tmp_path: Path, started: Started, policies: OpenedPolicies
):
    async with policies:
        for name, plus in (("first", 0.0), ("second", 1.0), ("third", 2.0)):
            policy = await policies.open(copy_of(tmp_path / name, plus=plus))
            assert policy.name.endswith(name)
        assert started.names == ["first"]
        (router,) = started.routers
        second, third = router.pulled
        weights = load_file(tmp_path / "second" / "model.safetensors")
        assert second.keys() == third.keys() == weights.keys()
        assert second["model.norm.weight"] == pytest.approx(float(weights["model.norm.weight"].sum()))
        assert third["model.norm.weight"] > second["model.norm.weight"]
    assert started.num_running == 0


async def test_different_architecture_gets_new_generators(tmp_path: Path, started: Started, policies: OpenedPolicies):
    async with policies:
        await policies.open(copy_of(tmp_path / "first"))
        await policies.open(copy_of(tmp_path / "other", rope_theta=5000.0))
        assert started.num_running == 1
    assert started.names == ["first", "other"]


async def test_generators_restart_when_loading_weights_fails(
    tmp_path: Path, started: Started, policies: OpenedPolicies
):
    async with policies:
        await policies.open(copy_of(tmp_path / "first"))
        started.routers[0].refuses = True
        await policies.open(copy_of(tmp_path / "second"))
        assert started.num_running == 1
    assert started.names == ["first", "second"]
    messages = cast("ConsoleLines", policies.console)
    assert "restarting the generators: no replica could load them" in messages
