"""Server that follows a run: its generators load each newer checkpoint while requests continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from serving.served import client_of, served, until

from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import CheckpointError, StateDictError
from titan_rl.evaluation.policies import following
from titan_rl.evaluation.policies.following import CheckpointPublisher, RunFollower
from titan_rl.evaluation.policies.policy_source import PolicySource
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.training.settings import ModelConfig
from titan_rl.types import FinishReason, SamplingParams, VersionSpan
from titan_rl.weights.types import PublishedWeights

END = 7


class FakePublisher:
    def __init__(self, damaged: Sequence[int] = ()) -> None:
        self.damaged = damaged
        self.tried: list[int] = []
        self.kept: list[int] = []

    async def publish(self, source: PolicySource) -> None:
        self.tried.append(source.version)
        if source.version in self.damaged:
            raise CheckpointError(f"{source.checkpoint} cannot be read: a byte of it is another")

    def keep_only(self, version: int) -> None:
        self.kept.append(version)


def save(run: Path, step: int) -> None:
    (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)


def follower_of(
    run: Path,
    router: GeneratorRouter,
    publisher: Any,
    console: ConsoleLines,
    *,
    version: int = 0,
    every_s: float = 3600.0,
) -> RunFollower:
    return RunFollower(run, "runs/latest", publisher, router, version=version, every_s=every_s, console=console)


async def test_running_request_continues_with_the_newer_version(tmp_path: Path) -> None:
    console = ConsoleLines()
    engines: list[ScriptedEngine] = []

    def next_token(context: Sequence[int]) -> int:
        time.sleep(0.001)
        return END if 80 in engines[0].versions else 1

    limits = {"max_context": 1_000_000, "script": next_token}
    async with served(count=1, engine=limits) as stage:
        engines += stage.engines.engines
        follower = follower_of(tmp_path, stage.router, publisher := FakePublisher(), console)
        sampling = SamplingParams(max_tokens=100_000, stop_token_ids=(END,))
        asked = asyncio.create_task(stage.router.generate([1, 2, 3], request_id="a", sampling=sampling))
        await until(lambda: stage.router.num_tokens_so_far > 0)
        for step in (40, 80):
            save(tmp_path, step)
        await follower.look()
        completion = await asked
    assert [span.version for span in completion.version_spans] == [0, 80]
    assert completion.finish_reason is FinishReason.STOP
    assert (publisher.tried, publisher.kept, follower.version) == ([80], [80], 80)
    assert console == ["step 80 of runs/latest is served"]


async def test_model_card_has_the_weight_version() -> None:
    versions = iter([3, 80])
    async with served(count=1, version=lambda: next(versions)) as stage, client_of(stage.app) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["weight_version"] == "3"
        assert (await client.get("/v1/models/policy")).json()["weight_version"] == "80"


async def test_unreadable_checkpoint_is_reported_and_the_old_version_served(tmp_path: Path) -> None:
    console = ConsoleLines()
    router = GeneratorRouter([replica := FakeReplica("generator-0", step_s=0.0, version=3)])
    follower = follower_of(tmp_path, router, publisher := FakePublisher(damaged=[40]), console, version=3)
    save(tmp_path, 3)
    await follower.look()
    assert publisher.tried == []
    save(tmp_path, 40)
    await follower.look()
    await follower.look()  # not again before its time
    assert (publisher.tried, replica.calls, follower.version) == ([40], [], 3)
    (line,) = console
    assert line.startswith("step 40 of runs/latest cannot be served: ")
    assert line.endswith("a byte of it is another; version 3 is still served; retrying in 3600 s")
    completion = await router.generate([1], request_id="a", sampling=SamplingParams(max_tokens=2))
    assert completion.version_spans == (VersionSpan(3, 2),)
    save(tmp_path, 80)
    await follower.look()
    assert (publisher.tried, replica.calls, follower.version) == ([40, 80], ["pull 80"], 80)
    assert console[1:] == ["step 80 of runs/latest is served"]
    await router.close()


async def test_deleted_checkpoint_is_skipped_for_the_next_one(tmp_path: Path) -> None:
    console = ConsoleLines()
    router = GeneratorRouter([FakeReplica("generator-0", step_s=0.0)])

    class Deleting(FakePublisher):
        async def publish(self, source: PolicySource) -> None:
            if source.version == 3:
                save(tmp_path, 6)
                assert source.checkpoint is not None
                source.checkpoint.rmdir()
                raise CheckpointError("no such file")

    follower = follower_of(tmp_path, router, Deleting(), console)
    save(tmp_path, 3)
    await follower.look()
    assert (follower.version, console) == (0, [])
    await follower.look()
    assert (follower.version, console) == (6, ["step 6 of runs/latest is served"])
    await router.close()


async def test_failed_pull_is_retried_without_publishing_again(tmp_path: Path) -> None:
    console = ConsoleLines()
    router = GeneratorRouter([replica := FakeReplica("generator-0", step_s=0.0)])
    replica.pull_error = StateDictError("no room")
    follower = follower_of(tmp_path, router, publisher := FakePublisher(), console, every_s=1e-6)
    save(tmp_path, 1)
    await follower.look()
    assert follower.version == 0
    assert "cannot be served: " in console[0]
    assert "version 0 is served on" not in console[0]  # the only generator is out of service
    replica.pull_error = None
    following_task = asyncio.create_task(follower.follow())
    await until(lambda: follower.version == 1)
    following_task.cancel()
    assert publisher.tried == [1]
    await router.close()


async def test_published_weights_match_the_checkpoint_and_old_versions_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
    from titan_rl.weights.verification import published_checksums

    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    temporary: list[Path] = []

    def write(directory: Path, added: int) -> None:
        directory.mkdir()
        save_file({name: tensor + added for name, tensor in weights.items()}, directory / "model.safetensors")

    async def export(model: ModelConfig, checkpoint: Path, directory: Path, log: Path) -> ModelConfig:
        temporary.append(directory)
        write(directory, len(temporary))
        return model.model_copy(update={"path": str(directory)})

    monkeypatch.setattr(following, "export_weights", export)
    published = PublishedWeights()
    with SharedMemoryTransport("serve", root=tmp_path) as transport:
        publisher = CheckpointPublisher(ModelConfig(path="base"), transport, published, tmp_path / "export.log")
        for version in (40, 80):
            await publisher.publish(PolicySource("", checkpoint=tmp_path, version=version))
        manifest = published.manifest_of(80)
        pulled = dict(SharedMemoryTransport("serve", root=tmp_path).pull(manifest))
        assert {name: tensor.tolist() for name, tensor in pulled.items()} == {
            name: (tensor + 2).tolist() for name, tensor in weights.items()
        }
        assert published_checksums(manifest).keys() == weights.keys()
        publisher.keep_only(80)
        assert transport.versions == {80}
    assert not any(folder.parent.exists() for folder in temporary)
