"""One engine for many versions: requests wait until their weights are loaded, and no version starves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from titan_rl import Completion, EngineRequest, FinishReason, GenerationError, SamplingParams, StateDictError
from titan_rl.evaluation.policies.version_switch import VersionSwitch
from titan_rl.training.settings import ModelConfig
from titan_rl.types import VersionSpan


class Engine:
    """Engine that records the weights of each request. Requests end once `release` is set."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.ran: list[tuple[str, str]] = []
        self.release = asyncio.Event()
        self.broken = False

    async def load(self, model: ModelConfig) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise StateDictError("no such weights")
        self.loaded.append(Path(model.path).name)

    async def stream(self, request: EngineRequest, on_chunk: object) -> Completion:
        self.ran.append((request.request_id, self.loaded[-1] if self.loaded else "base"))
        await self.release.wait()
        return Completion(request.request_id, [1], [0.0], FinishReason.STOP, (VersionSpan(0, 1),))


def switch_of(engine: Engine, folder: Path) -> VersionSwitch:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    return VersionSwitch(engine.stream, engine, ModelConfig(path=str(folder / "base"), max_context=8), folder)


def ask(switch: VersionSwitch, name: str | None, request_id: str) -> asyncio.Task[Completion]:
    stream = switch.stream_of(name)
    assert stream is not None
    return asyncio.create_task(stream(EngineRequest(request_id, [1], SamplingParams(max_tokens=1)), None))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_of_another_version_wait_for_running_ones(tmp_path: Path) -> None:
    engine = Engine()
    switch = switch_of(engine, tmp_path)
    tasks = [ask(switch, None, "base-0"), ask(switch, "a", "a-0"), ask(switch, "a", "a-1"), ask(switch, "b", "b-0")]
    await settle()
    assert engine.ran == [("base-0", "base")]
    tasks.append(ask(switch, None, "base-1"))
    await settle()
    assert engine.ran == [("base-0", "base")], "it queues behind the versions that are already waiting"
    engine.release.set()
    await asyncio.gather(*tasks)
    assert engine.ran[1:] == [("a-0", "a"), ("a-1", "a"), ("b-0", "b"), ("base-1", "base")]
    assert engine.loaded == ["a", "b", "base"], "each is loaded once for all waiting requests"


async def test_cancelled_waiting_request_does_not_block_others(tmp_path: Path) -> None:
    engine = Engine()
    switch = switch_of(engine, tmp_path)
    running, waiting = ask(switch, None, "base-0"), ask(switch, "a", "a-0")
    await settle()
    waiting.cancel()
    after = ask(switch, "b", "b-0")
    engine.release.set()
    await asyncio.gather(running, after)
    assert ("b-0", "b") in engine.ran
    assert ("a-0", "a") not in engine.ran


async def test_unloadable_weights_fail_only_their_requests(tmp_path: Path) -> None:
    engine = Engine()
    engine.release.set()
    switch = switch_of(engine, tmp_path)
    engine.broken = True
    with pytest.raises(GenerationError, match="version a cannot be loaded: no such weights"):
        await ask(switch, "a", "a-0")
    engine.broken = False
    await ask(switch, None, "base-0")
    assert engine.ran == [("base-0", "base")], "the base is loaded again, because the current weights are unknown"
    assert engine.loaded == ["base"]


async def test_only_versions_with_a_folder_are_known(tmp_path: Path) -> None:
    switch = switch_of(Engine(), tmp_path)
    assert switch.stream_of("a") is not None
    assert [switch.stream_of(name) for name in ("c", "", "..", "../a", "a/b")] == [None] * 5
