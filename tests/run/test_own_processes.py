"""Description of a run's processes on this machine, and warnings if there are too many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from user_project import project

from titan_rl.config.load import load_config
from titan_rl.run.checks.own_processes import Machine, describe_processes, memory_problem, overloads

__all__ = ["project"]

SMALL = Machine((), 2, 24 * 2**30)


@pytest.fixture(autouse=True)
def default_threads(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("titan_rl.generation.gpu_share.has_gpu_driver", lambda: False)


def described(machine: Machine, **settings: object) -> list[str]:
    return list(describe_processes(config_of(**settings), machine))


def config_of(**settings: object):
    return load_config("config.toml", [(key.replace("__", "."), str(value)) for key, value in settings.items()])


def test_processes_without_gpus_are_described_with_reasons(monkeypatch: pytest.MonkeyPatch):
    trainer, threads, generators, priority = described(SMALL)
    assert trainer == "trainer: 1 rank without a GPU, because this machine has none"
    assert threads.startswith("the trainer computes 2 micro-batches at the same time: ")
    assert generators == (
        "generators: 2 engines without a GPU, with 1 thread each, because engines and trainer share 2 cores"
    )
    assert priority.startswith("priority: nice ")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "with 2 threads each, because OMP_NUM_THREADS is set to 2" in described(SMALL)[2]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"training__compile": "true"}, "training.compile"),
        ({"training__activation_checkpointing": "full"}, "training.activation_checkpointing"),
        ({"training__kl_coef": 0.1, "training__offload": '["reference"]'}, "training.offload"),
        ({"training__kl_coef": 0.1, "training__adapter__rank": 2}, "training.kl_coef with an adapter"),
    ],
)
def test_setting_that_prevents_threads_is_the_reason(settings: dict[str, object], reason: str):
    expected = f"the trainer computes one micro-batch at a time, because of {reason}"
    assert described(SMALL, **settings)[1] == expected


def test_experts_that_prevent_threads_are_the_reason():
    path = Path("policy/config.json")
    config = config_of()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts": 4}))
    (_, threads, *_) = describe_processes(config, SMALL)
    assert threads.endswith("because of experts of the model")


@pytest.mark.parametrize(
    ("gpus", "generators"),
    [
        (("0", "1", "2"), "2 engines on GPUs 1, 2, which the trainer leaves"),
        (("0",), "2 engines on GPU 0, shared with the trainer, because it leaves less than 1 GPU"),
    ],
)
def test_processes_on_gpus_are_described_with_reasons(gpus: tuple[str, ...], generators: str):
    trainer, second, priority = described(Machine(gpus, 8, 24 * 2**30))
    assert trainer.startswith("trainer: 1 rank on GPU 0, because each rank has its own GPU")
    assert generators in second
    assert priority.startswith("priority: ")


def test_processes_on_hosts_are_described_by_their_roles():
    (line,) = described(SMALL, hosts__addresses="127.0.0.1,127.0.0.2")
    assert "when the hosts have answered" in line
    assert "127.0.0.1" in line.partition(" trains, and ")[0]
    assert "127.0.0.2" in line.partition(" trains, and ")[2]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"generation__num_generators": 30}, ["30 KV caches of generation.kv_cache_gib = 1 need 30 GiB"]),
        ({"training__data_parallel": 64}, ["64 trainer ranks", "on 2 cores", "lower training.data_parallel"]),
        ({"rollout__num_workers": 14}, ["14 rollout workers", "lower rollout.num_workers"]),
    ],
)
def test_overload_warning_names_the_setting(settings: dict[str, object], expected: list[str]):
    warnings = "\n".join(overloads(config_of(**settings), SMALL))
    assert all(text in warnings for text in expected), warnings
    assert not list(overloads(config_of(**settings, hosts__addresses="127.0.0.1"), SMALL))


def test_settings_that_fit_give_no_overload_warning():
    assert not list(overloads(config_of(), SMALL))
    assert not list(overloads(config_of(rollout__num_workers=13), SMALL))


def test_kv_cache_larger_than_the_memory_is_a_problem():
    config = config_of(generation__kv_cache_gib=25)
    problem = memory_problem(config, SMALL)
    assert problem is not None
    assert "generation.kv_cache_gib = 25 is more than the memory of this machine, 24.0 GiB" in problem
    assert memory_problem(config, Machine(("0",), 2, SMALL.memory)) is None  # the cache is on the GPU
    assert memory_problem(config_of(generation__kv_cache_gib=23), SMALL) is None
