"""Kubernetes provider: its manifests, its kubectl calls and its lookup of pods."""

import json
import os
import socket
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from providers.fakes import Commands

from titan_rl.cluster.providers import kubernetes
from titan_rl.cluster.providers.spec import ChangingWorkers, ProviderSpec, Submission
from titan_rl.config.hosts import KubernetesConfig, ProviderSettings
from titan_rl.core.errors import ConfigError, ProviderError

CONFIG = KubernetesConfig(
    image="registry.example/titan_rl:1",
    volume="claim",
    resources={"nvidia.com/gpu": "8", "memory": "64Gi"},
)
SETTINGS = ProviderSettings(provider="kubernetes", count=2, options=("--context=far",), kubernetes=CONFIG)
TOML = "[model]\n  path = 'it''s'\n"


def submission(**more) -> Submission:
    given = {"tomls": {"folder/cpu.toml": TOML}, "overrides": [("training.lr", "-1e-3")], **more}
    return Submission(SETTINGS, "Word_sort-lr=1", "", time="1122-180000", **given)


def objects(text: str) -> dict[str, dict]:
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_manifests_match_the_kubernetes_schemas(version: str):
    made = objects(kubernetes.render(submission()))
    assert made.keys() == {"ConfigMap", "Service", "NetworkPolicy", "StatefulSet", "Job"}
    for manifest in made.values():
        kubernetes_validate.validate(manifest, version, strict=True)
        assert manifest["metadata"]["name"] == "word-sort-lr-1-1122-180000"


def test_controller_knows_each_workers_dns_name():
    made = objects(kubernetes.render(submission()))
    workers, job = made["StatefulSet"]["spec"], made["Job"]["spec"]["template"]["spec"]
    name = made["Service"]["metadata"]["name"]
    assert workers["serviceName"] == name
    variables = {one["name"]: one["value"] for one in job["containers"][0]["env"]}
    assert variables[kubernetes.WORKERS].split() == [f"{name}-0.{name}", f"{name}-1.{name}"]
    worker = workers["template"]["spec"]["containers"][0]
    assert worker["command"] == ["titan-rl", "worker", "--listen", "[$(POD_IP)]:22222"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "64Gi"}
    assert len(f"{name}-0123456789") <= 63


def test_network_policy_admits_only_pods_of_the_run():
    made = objects(kubernetes.render(submission()))
    policy, labels = made["NetworkPolicy"]["spec"], made["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    selected = policy["podSelector"]["matchLabels"]
    assert selected.items() <= labels.items()
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": selected}}]}]
    assert selected == {"app.kubernetes.io/instance": made["Job"]["metadata"]["name"]}


def begin(script: str, folder: Path, commands: Commands) -> list[list[str]]:
    """Run the script of the controller's pod, and return its calls of titan-rl."""
    commands.make("titan-rl", "")
    subprocess.run(["sh", "-c", script], cwd=folder, check=True, timeout=60)
    return [arguments for arguments, _ in commands.calls("titan-rl")]


def test_second_controller_pod_resumes_the_run(tmp_path: Path, commands: Commands):
    script = objects(kubernetes.render(submission()))["ConfigMap"]["data"]["begin.sh"]
    name = "word-sort-lr-1-1122-180000"
    first = ["train", "/etc/titan_rl/0-cpu.toml", "--training.lr=-1e-3", "--name", name]
    assert begin(script, tmp_path, commands) == [first]
    for run in (f"runs/20260101-000000-{name}", "runs/20260101-000001-another"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run_state.json").touch()
    assert begin(script, tmp_path, commands)[-1] == ["train", "--resume", f"runs/20260101-000000-{name}"]


@given(
    st.text(st.characters(min_codepoint=32, max_codepoint=0x17F, exclude_characters="\x7f", exclude_categories=["Cc"]))
)
def test_config_map_preserves_settings_exactly(text: str):
    toml = f"a = '{text}'\n\n  b = 1\n"
    made = objects(kubernetes.render(submission(tomls={"a.toml": toml, "b.toml": TOML})))
    assert made["ConfigMap"]["data"]["0-a.toml"] == toml
    assert made["ConfigMap"]["data"]["1-b.toml"] == TOML


def test_job_owns_all_created_objects(commands: Commands):
    commands.make("kubectl", "print('some-uid' if 'get' in argv else '')", reads=True)
    text = kubernetes.render(submission())
    message = kubernetes.submit(submission(), text)
    name = "word-sort-lr-1-1122-180000"
    assert message.endswith(f"kubectl --context=far delete job {name} stops it")
    create, get, *patches = commands.calls("kubectl")
    assert create == (["--context=far", "create", "--filename", "-"], text)
    assert get[0][1:4] == ["get", "job", name]
    assert [arguments[2] for arguments, _ in patches] == ["statefulset", "service", "configmap", "networkpolicy"]
    for arguments, _ in patches:
        (owner,) = json.loads(arguments[-1])["metadata"]["ownerReferences"]
        assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "some-uid"}


async def test_workers_are_returned_once_all_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv(kubernetes.WORKERS, "localhost 127.0.0.1")
        settings = SETTINGS.model_copy(update={"port": port})
        async with kubernetes.workers(ProviderSpec(settings, tmp_path)) as addresses:
            assert list(addresses) == [f"127.0.0.1:{port}", f"127.0.0.1:{port}"]


async def test_missing_worker_is_looked_up_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kubernetes, "LOOK_S", 0)
    known, asked = {"a-0.a": "10.0.0.7"}, list[str]()

    def find(name: str) -> str:
        asked.append(name)
        if len(asked) == 3:
            known["a-1.a"] = "10.0.0.8"
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[name]

    assert await kubernetes.found_by(find, ["a-0.a", "a-1.a"], 60) == ["10.0.0.7", "10.0.0.8"]
    assert asked == ["a-0.a", "a-1.a", "a-1.a"]
    with pytest.raises(ProviderError, match=r"a-2.a: no worker listens there after 0.05 s; see kubectl describe"):
        await kubernetes.found_by(find, ["a-0.a", "a-2.a"], 0.05)


async def test_current_pods_follow_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, list[str]] = {"a": ["10.0.0.7", "10.0.0.8"]}

    def getaddrinfo(name: str, port: int, family: int, kind: int):
        assert family == socket.AF_INET
        return [(family, kind, 6, "", (address, port)) for address in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    pods = kubernetes.Pods("a", known["a"], 700)
    assert isinstance(pods, ChangingWorkers)
    assert list(pods) == await pods.current() == ["10.0.0.7:700", "10.0.0.8:700"]
    known["a"] = ["10.0.0.8", "10.0.0.9"]
    assert await pods.current() == ["10.0.0.8:700", "10.0.0.9:700"]
    assert list(pods) == ["10.0.0.7:700", "10.0.0.8:700"], "the pods at the start"


def test_service_selects_only_workers() -> None:
    """The controller's pod is not a host."""
    made = objects(kubernetes.render(submission()))
    selected = made["Service"]["spec"]["selector"].items()
    assert selected <= made["StatefulSet"]["spec"]["template"]["metadata"]["labels"].items()
    assert not selected <= made["Job"]["spec"]["template"]["metadata"]["labels"].items()


async def test_error_outside_a_job_says_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(kubernetes.WORKERS, raising=False)
    assert kubernetes.WORKERS not in os.environ
    with pytest.raises(ConfigError, match="start the run with that"):
        async with kubernetes.workers(ProviderSpec(SETTINGS, tmp_path)):
            pytest.fail("it began")
