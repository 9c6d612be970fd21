"""Validation of provider settings before anything is submitted."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from titan_rl.cluster.providers.spec import worker_command
from titan_rl.config.hosts import KubernetesConfig, ProviderSettings


@pytest.mark.parametrize(("drain_s", "waits"), [(0, 120), (60, 120), (60.5, 121), (300, 360)])
def test_worker_drain_time_exceeds_the_hosts(drain_s: float, waits: int) -> None:
    settings = ProviderSettings.model_validate({"command": "titan-rl", "drain_s": drain_s})
    options = [] if waits == 120 else ["--drain-s", str(waits)]
    assert worker_command(settings, "10.0.0.2:1") == ["titan-rl", "worker", "--listen", "10.0.0.2:1", *options]


@pytest.mark.parametrize("limit", ["1", "2", "1:59", "0-0:02", "00:02:00"])
def test_rejects_time_limits_shorter_than_the_drain(limit: str) -> None:
    with pytest.raises(ValidationError, match=rf"options has '--time={limit}'.* 120 s before its time limit"):
        ProviderSettings(provider="slurm", options=(f"--time={limit}",))


@pytest.mark.parametrize("limit", ["3", "2:01", "1:00:00", "1-0", "0-1:00", "0-0:02:01", "0", "unlimited"])
def test_accepts_time_limits_longer_than_the_drain(limit: str) -> None:
    ProviderSettings(provider="slurm", options=(f"--time={limit}",))


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--nodes=5", "count"),
        ("-N 5", "count"),
        ("-N5", "count"),
        ("--signal=B:TERM@5", "drain_s"),
        ("--output=log", "run_dir"),
        ("-o log", "run_dir"),
    ],
)
def test_rejects_options_that_a_setting_covers(option: str, setting: str) -> None:
    with pytest.raises(ValidationError, match=rf"options has '{option}'.*; set {setting} instead"):
        ProviderSettings(provider="slurm", options=("--exclusive", option))


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("--array=1-4", "submit each run separately"),
        ("-a 1-4", "submit each run separately"),
        ("--chdir=/x", "submit it from that folder"),
        ("-D /x", "submit it from that folder"),
    ],
)
def test_rejects_options_that_change_the_kind_of_job(option: str, fix: str) -> None:
    with pytest.raises(ValidationError, match=rf"options has '{option}', and .*: {fix}"):
        ProviderSettings(provider="slurm", options=(option,))


def test_accepts_other_slurm_options() -> None:
    options = ("--partition=gpu", "-p gpu", "--nodelist=a,b", "--time-min=5", "--ntasks-per-core=1", "-n 4")
    assert ProviderSettings(provider="slurm", options=options).options == options


@pytest.mark.parametrize(
    "table",
    [
        {"shared_memory": "foo"},
        {"shared_memory": "8 Gi"},
        {"resources": {"memory": "lots"}},
        {"controller_resources": {"cpu": "-1"}},
        {"image": "a b"},
        {"volume": "claim:workspace"},
        {"volume": "claim:/work space"},
    ],
)
def test_rejects_invalid_kubernetes_values(table: dict[str, object]) -> None:
    (name,) = table
    with pytest.raises(ValidationError) as refused:
        KubernetesConfig.model_validate(table)
    assert refused.value.errors()[0]["loc"][0] == name
    assert refused.value.errors()[0]["msg"].startswith("must be")


def test_accepts_kubernetes_quantities() -> None:
    resources = {"nvidia.com/gpu": "8", "memory": "400Gi", "cpu": "500m", "ephemeral-storage": "1.5e3", "x": "0.5"}
    assert KubernetesConfig(resources=resources, shared_memory="64G").resources == resources
