"""Restarts of a trainer and its moves between hosts. No process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster import trainer_processes
from titan_rl.cluster.hosts.placement import ProcessPlace, place_trainer_again
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.processes.roles import ProcessId
from titan_rl.cluster.trainer_actor import ModelCheck, TrainerSettings
from titan_rl.cluster.trainer_processes import TrainerProcesses
from titan_rl.core.errors import ModelError, NoHostError
from titan_rl.core.model_identity import model_identity
from titan_rl.training.settings import AdapterConfig, CorrectionConfig, ModelConfig, PolicySettings, TrainingConfig

TRAINING = TrainingConfig(data_parallel=2)
POLICIES = {"": PolicySettings(TRAINING, CorrectionConfig())}
SETTINGS = TrainerSettings(ModelConfig(path="unused", max_context=16), POLICIES, None, "run", 0)


class Processes:
    """Records its calls in order."""

    def __init__(self, notices: list[str]) -> None:
        self.calls: list[str] = []
        self.hosts = SimpleNamespace(notify=notices.append)

    async def spawn(
        self, process: ProcessId, actor_class: object, *arguments: Any, places: Sequence[ProcessPlace]
    ) -> Any:
        self.calls.append(f"start on {' '.join(place.host for place in places)}")
        return RemoteProcess(process), [None for _ in places]

    async def clear(self, remote: RemoteProcess, timeout_s: float) -> None:
        self.calls.append("clear")


def processes_on(hosts: dict[str, tuple[str, ...]], notices: list[str], wait_s: float) -> tuple[Processes, Any]:
    places = [ProcessPlace("a"), ProcessPlace("a")]
    processes: Any = Processes(notices)
    again = lambda: place_trainer_again(TRAINING, places, hosts)  # noqa: E731
    return processes, TrainerProcesses(processes, SETTINGS, again, wait_s=wait_s)


async def test_restart_clears_the_old_trainer_then_starts_on_a_live_host() -> None:
    hosts: dict[str, tuple[str, ...]] = {"a": (), "b": ()}
    processes, training = processes_on(hosts, [], 10.0)
    first = await training.start()
    del hosts["a"]
    assert await training.restart() is training.trainer is not first
    assert processes.calls == ["start on a a", "clear", "start on b b"]


def settings_of_model(folder: Path, **training: float) -> TrainerSettings:
    """Settings of a run whose initial model is in `folder`."""
    save_file({"weight": torch.zeros(8)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    model = ModelConfig(path=str(folder), max_context=16)
    policies = {"": PolicySettings(TrainingConfig(**training), CorrectionConfig())}  # pyright: ignore
    return replace(SETTINGS, model=model, policies=policies, began_with={"model.path": model_identity(folder)})


def test_restarted_trainer_rejects_replaced_initial_weights(tmp_path: Path) -> None:
    settings = settings_of_model(tmp_path)
    ModelCheck(settings, "a").check_weights()
    save_file({"weight": torch.ones(8)}, tmp_path / "model.safetensors")
    check = ModelCheck(settings, "b")
    with pytest.raises(ModelError, match="on host b is not the initial model of the run: weights changed; put"):
        check.check_weights()
    check.checkpoint_loaded()
    check.check_weights()


def test_trainer_rejects_a_changed_reference_model_or_tokenizer(tmp_path: Path) -> None:
    settings = settings_of_model(tmp_path, kl_coef=0.1)
    ModelCheck(settings, "a").check_weights()
    save_file({"weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="weights changed"):
        ModelCheck(settings, "a")
    settings = settings_of_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match="tokenizer changed"):
        ModelCheck(settings, "a")


def settings_of_adapters(folder: Path, **training: float) -> TrainerSettings:
    """Settings of a run of two adapters, each of which starts from a folder of its own."""
    settings = settings_of_model(folder)
    policies: dict[str, PolicySettings] = {}
    began_with = dict(settings.began_with)
    for name in ("a", "b"):
        (start := folder / name).mkdir(exist_ok=True)
        save_file({"lora_A": torch.zeros(8)}, start / "adapter_model.safetensors")
        (start / "adapter_config.json").write_text("{}")
        adapter = AdapterConfig(rank=4, start=str(start))
        policies[name] = PolicySettings(TrainingConfig(adapter=adapter, **training), CorrectionConfig())  # pyright: ignore
        began_with[f"adapters.{name}.training.adapter.start"] = model_identity(start)
    return replace(settings, policies=policies, began_with=began_with)


def test_restarted_trainer_rejects_a_replaced_initial_adapter(tmp_path: Path) -> None:
    settings = settings_of_adapters(tmp_path)
    save_file({"lora_A": torch.ones(8)}, tmp_path / "b" / "adapter_model.safetensors")
    check = ModelCheck(settings, "a")
    check.check_weights("a")
    with pytest.raises(ModelError, match=r"adapters.b.training.adapter.start = '.*' on host a is not the initial adap"):
        check.check_weights("b")
    check.checkpoint_loaded("a")
    with pytest.raises(ModelError, match="weights changed; put that adapter back"):
        check.check_weights("b")
    check.checkpoint_loaded("b")
    check.check_weights("b")


def test_trainer_rejects_a_replaced_adapter_that_is_the_reference_or_has_other_settings(tmp_path: Path) -> None:
    settings = settings_of_adapters(tmp_path, kl_coef=0.1)
    save_file({"lora_A": torch.ones(8)}, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="weights changed"):
        ModelCheck(settings, "a")
    settings = settings_of_adapters(tmp_path)
    (tmp_path / "a" / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"adapters.a.training.adapter.start = .*config changed"):
        ModelCheck(settings, "a")


async def test_trainer_waits_for_a_host_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_processes, "LOOK_S", 0.0)
    hosts: dict[str, tuple[str, ...]] = {"a": ()}
    notices: list[str] = []
    processes, training = processes_on(hosts, notices, 60.0)
    await training.start()
    hosts.clear()
    restarting = asyncio.ensure_future(training.restart())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not restarting.done()
    assert training.waits_for.startswith("hosts, 60 s at most: no host that sees the run")
    hosts["c"] = ()
    await restarting
    assert not training.waits_for
    assert processes.calls[-1] == "start on c c"
    assert notices == [
        "the trainer waits for hosts, 60 s at most: no host that sees the run's folder is left to train on; "
        "`titan-rl hosts RUN add ADDRESS` adds one"
    ]


async def test_trainer_stops_waiting_for_a_host_at_the_limit() -> None:
    hosts: dict[str, tuple[str, ...]] = {"a": ()}
    _, training = processes_on(hosts, [], 0.0)
    await training.start()
    hosts.clear()
    with pytest.raises(NoHostError, match=r"the trainer has waited 0 s for hosts: no host that sees the run's folder"):
        await training.restart()


async def test_leaving_trainer_is_saved_and_continues_until_a_host_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_processes, "LOOK_S", 0.0)
    hosts: dict[str, tuple[str, ...]] = {}  # those that are not leaving
    notices: list[str] = []
    processes, training = processes_on(hosts, notices, 10.0)
    hosts["a"] = ()
    await training.start()
    del hosts["a"]
    saved = asyncio.Event()
    training.before_leaving = saved.wait
    finishing = asyncio.ensure_future(training.finish(30.0))
    for event in (asyncio.Event(), saved):
        event.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not finishing.done()
    assert notices == [
        "the trainer waits for hosts, 30 s at most: no host that sees the run's folder is left to train on; "
        "`titan-rl hosts RUN add ADDRESS` adds one"
    ]
    assert training.trainer.is_leaving
    hosts["c"] = ()
    await finishing
    assert processes.calls == ["start on a a"]


@pytest.mark.looptime
async def test_leaving_trainer_that_cannot_save_ends_at_the_limit() -> None:
    hosts: dict[str, tuple[str, ...]] = {"a": ()}
    _, training = processes_on(hosts, [], 10.0)
    await training.start()
    began = asyncio.get_running_loop().time()
    training.before_leaving = asyncio.Event().wait
    await training.finish(30.0)
    assert asyncio.get_running_loop().time() - began == pytest.approx(30)
