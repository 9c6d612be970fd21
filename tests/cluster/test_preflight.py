"""Preflight checks of hosts, and the files that are sent to hosts that lack them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.hosts.folders import chunks_of, code_files
from titan_rl.cluster.hosts.host import free_names, resolve
from titan_rl.cluster.hosts.preflight import FactsRequest, HostFacts, HostNeeds, check_hosts, collect_facts
from titan_rl.config.hosts import Roles
from titan_rl.core.errors import ConfigError

GIB = 1 << 30
ROLES = Roles(("a",), ("b",), ("b",))
NEEDS = HostNeeds(Path("/runs/one"), Path("/models/tiny"), ("my.task",), train_gpus=2, generate_gpus=1)
HERE = HostFacts(
    hostname="here",
    executable="python",
    versions={"python": "3.11", "torch": "2.13.0", "vllm": "not installed"},
    model="0a",
    model_bytes=3 * GIB,
    missing={},
    sees_run=True,
    memory=64 * GIB,
    shared_memory=32 * GIB,
    gpus=(),
    num_cores=8,
)


def problems(sync: bool = False, **facts: object) -> list[str]:
    """Lines of the error for a host b whose facts differ from this machine's."""
    with pytest.raises(ConfigError) as caught:
        check_hosts(HERE, {"a": HERE, "b": replace(HERE, **facts)}, NEEDS, ROLES, sync=sync)
    title, header, *lines = str(caught.value).splitlines()
    assert title == "hosts lack what the run needs:"
    assert header.split() == ["host", "what", "expected", "found", "fix"]
    return [" ".join(line.split()) for line in lines]


def test_check_accepts_hosts_that_have_everything() -> None:
    check_hosts(HERE, {"a": HERE, "b": HERE}, NEEDS, ROLES)
    check_hosts(HERE, {"a": HERE, "b": replace(HERE, sees_run=False)}, NEEDS, ROLES)  # b does not train


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"versions": {**HERE.versions, "torch": "2.12.1"}}, "b torch 2.13.0 2.12.1 pip install torch==2.13.0"),
        ({"versions": {**HERE.versions, "vllm": "0.32.0"}}, "b vllm not installed 0.32.0 pip uninstall vllm"),
        ({"versions": {**HERE.versions, "python": "3.12"}}, "b python 3.11 3.12 run the worker there with Python 3.11"),
        ({"model": "0b"}, "b model checksum 0a checksum 0b copy the folder there, or set hosts.sync = true"),
        ({"model": None}, "b model checksum 0a no /models/tiny copy the folder there, or set hosts.sync = true"),
        ({"model": ""}, "b model checksum 0a no model files in /models/tiny copy the folder there, or set hosts"),
        ({"missing": {"my.task": "no such module"}}, "b module my.task found no such module copy its folder there"),
        ({"memory": GIB}, "b memory 3.0 GiB free 1.0 GiB free memory there"),
        ({"shared_memory": GIB}, "b /dev/shm 6.0 GiB free 1.0 GiB mount -o remount,size=12288M /dev/shm"),
        ({"shared_memory": 6 * GIB - 1}, "b /dev/shm 6.0 GiB free 5.9 GiB mount"),
        ({"shared_memory": GIB - 1}, "b /dev/shm 6.0 GiB free 1023.9 MiB mount"),
    ],
)
def test_difference_shows_host_expected_found_and_fix(facts: dict[str, Any], line: str) -> None:
    (found,) = problems(**facts)
    assert found.startswith(line)


def test_error_lists_the_differences_of_all_hosts() -> None:
    lacking = replace(HERE, model=None, sees_run=False, missing={"my.task": "no such module"})
    with pytest.raises(ConfigError) as caught:
        check_hosts(HERE, {"a": lacking, "b": replace(HERE, memory=1)}, NEEDS, ROLES)
    lines = str(caught.value).splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [["a", "model"], ["a", "module"], ["a", "run_dir"], ["b", "memory"]]


def test_missing_files_are_accepted_with_sync() -> None:
    lacking = replace(HERE, model=None, missing={"my.task": "no such module"})
    check_hosts(HERE, {"a": HERE, "b": lacking}, NEEDS, ROLES, sync=True)
    assert problems(sync=True, model=None, memory=0)[0].startswith("b memory")


def test_all_hosts_of_a_role_need_gpus_if_one_has_them() -> None:
    roles = Roles(("a", "b"), ("b",), ())
    needs = replace(NEEDS, generate_gpus=0)
    check_hosts(HERE, {name: replace(HERE, gpus=("0", "1")) for name in "ab"}, needs, roles)
    found = {"a": replace(HERE, gpus=("0", "1")), "b": replace(HERE, gpus=("0",))}
    with pytest.raises(ConfigError, match=r"b +GPUs, training +2 +1 "):
        check_hosts(HERE, found, needs, roles)


def test_training_hosts_need_shared_memory_only_for_their_shard() -> None:
    roles = Roles(("a", "b"), ("c",), ())
    tight = replace(HERE, shared_memory=3 * GIB)
    check_hosts(HERE, {"a": tight, "b": tight, "c": HERE}, NEEDS, roles)
    with pytest.raises(ConfigError, match=r"c +/dev/shm"):
        check_hosts(HERE, {"a": tight, "b": tight, "c": tight}, NEEDS, roles)


def test_shared_memory_of_a_small_model_is_shown_in_mebibytes() -> None:
    small, tight = replace(HERE, model_bytes=900_000), replace(HERE, shared_memory=1 << 20, model_bytes=900_000)
    with pytest.raises(ConfigError) as caught:
        check_hosts(small, {"a": small, "b": tight}, NEEDS, ROLES)
    line = " ".join(str(caught.value).splitlines()[-1].split())
    assert line == "b /dev/shm 1.8 MiB free 1.0 MiB mount -o remount,size=4M /dev/shm"


def test_collect_facts_of_this_host(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_task.py").write_text("raise AssertionError('nothing is imported')")
    question = FactsRequest(
        run, "token", model, ("own_task", "not_there", "not_there.inner"), (str(tmp_path / "mine"),)
    )
    facts = collect_facts(question)
    assert facts.model_bytes == 5
    assert not facts.sees_run
    assert facts.missing.keys() == {"not_there", "not_there.inner"}
    assert facts.versions["torch"]
    assert min(facts.memory, facts.shared_memory) > 0
    (run / ".hosts").write_text("token")
    (model / "config.json").write_text('{"a": 1}')
    again = collect_facts(question)
    assert again.sees_run
    assert again.model != facts.model
    assert again.versions == facts.versions
    assert collect_facts(replace(question, model=tmp_path / "nowhere")).model is None
    assert collect_facts(replace(question, model=tmp_path / "mine")).model == ""


def test_code_files_with_and_without_git(tmp_path: Path) -> None:
    for name in ("task.py", "own/inner.py", "__pycache__/task.pyc", ".secret/key", "venv/pyvenv.cfg", "runs/log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [str(path.relative_to(tmp_path)) for path in code_files(tmp_path)] == ["own/inner.py", "task.py"]
    (tmp_path / ".gitignore").write_text("own\nvenv\nruns\n.secret\n__pycache__\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert [path.name for path in code_files(tmp_path)] == [".gitignore", "task.py"]


def test_resolve_ipv4_ipv6_and_hostname() -> None:
    assert [resolve(host) for host in ("127.0.0.1", "::1", "localhost")] == ["127.0.0.1", "::1", "127.0.0.1"]


def test_duplicate_host_names_get_numbers() -> None:
    assert free_names(["a", "b", "a"], ["b"]) == ["a", "b-2", "a-2"]


def test_folder_is_sent_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.cluster.hosts.folders.CHUNK", 4)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "long").write_bytes(b"123456789")
    pieces = list(chunks_of(tmp_path, [tmp_path / "empty", tmp_path / "long"]))
    assert pieces == [("empty", b""), ("long", b"1234"), ("long", b"5678"), ("long", b"9")]
