"""Experimental settings: the warning at the start of a run, and their help."""

from __future__ import annotations

import re

import pytest

from titan_rl.cli.main import main
from titan_rl.config.experimental import EXPERIMENTAL, experimental_warning
from titan_rl.config.load import load_config
from titan_rl.config.run import RunConfig
from titan_rl.config.settings_reference import field_docstrings

KUBERNETES = {
    "hosts.provider": "kubernetes",
    "hosts.kubernetes.image": "it:1",
    "hosts.kubernetes.volume": "claim",
}


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("settings", "transport", "named"),
    [
        ({}, "shared_memory", None),
        ({"statedict.transport": "tcp"}, "tcp", None),
        ({"statedict.transport": "rdma"}, "rdma", 'statedict.transport = "rdma"'),
        ({}, "cuda_ipc", 'statedict.transport = "cuda_ipc"'),
        ({"hosts.addresses": "a:1,b:1"}, "tcp", 'statedict.transport = "tcp"'),
        ({"generation.gpu_share": 0.5}, "shared_memory", "generation.gpu_share = 0.5"),
        ({"scheduling.on_batch_ready": "sleep"}, "shared_memory", None),
        (KUBERNETES, "tcp", 'hosts.provider = "kubernetes", statedict.transport = "tcp"'),
    ],
)
def test_experimental_settings_are_named_in_one_warning(
    settings: dict[str, object], transport: str, named: str | None
) -> None:
    config = load_config("config.toml", [(key, str(value)) for key, value in settings.items()])
    prefix = "experimental, not proved on the hardware or network it is for: "
    assert experimental_warning(config, transport) == (named and prefix + named)


@pytest.mark.usefixtures("project")
def test_run_warns_of_experimental_settings(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "config.toml", "--statedict.transport", "rdma", "--dry-run"]) == 0
    (warning,) = re.findall("titan-rl: warning: .*experimental.*", capfd.readouterr().err)
    assert 'statedict.transport = "rdma"' in warning


@pytest.mark.usefixtures("project")
def test_run_on_one_machine_has_no_experimental_warning(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "config.toml", "--dry-run"]) == 0
    assert "experimental" not in capfd.readouterr().err


@pytest.mark.usefixtures("project")
def test_submitted_run_warns_of_experimental_settings(capfd: pytest.CaptureFixture[str]) -> None:
    options = [f"--{key}={value}" for key, value in KUBERNETES.items()]
    assert main(["launch", "config.toml", *options, "--dry-run"]) == 0
    assert "titan-rl: warning: experimental, not proved on" in capfd.readouterr().err


def test_help_of_experimental_settings_says_so() -> None:
    for name in EXPERIMENTAL:
        table, _, key = name.partition(".")
        section = RunConfig.model_fields[table].annotation
        assert section is not None
        assert "xperimental" in field_docstrings(section)[key], name
