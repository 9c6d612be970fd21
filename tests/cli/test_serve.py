"""`titan-rl serve`: the policies and settings that it accepts. No server is started."""

from __future__ import annotations

import os
import socket
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from peft_files import BASE, write_adapter

from titan_rl.cli.main import main
from titan_rl.cli.options import Parser
from titan_rl.cli.serve import set_up
from titan_rl.config.load import dump_config, load_config
from titan_rl.config.serve import ServeConfig
from titan_rl.evaluation.policies.policy_source import PolicySource, find_policy


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ServeConfig, PolicySource]]:
    """Run a command line and return the arguments that the server gets."""
    calls: list[Any] = []
    module = ModuleType("titan_rl.evaluation.serve")
    module.run_server = lambda config, source, verbosity, adapters: calls.append((config, source)) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "titan_rl.evaluation.serve", module)

    def run(*argv: str) -> tuple[ServeConfig, PolicySource]:
        assert main(["serve", *argv]) == 0
        return calls.pop()

    return run


@pytest.fixture
def run_folder(project: Path) -> Path:
    """Folder of a run without checkpoints."""
    run = project / "runs" / "20260101-000000-policy"
    (run / "checkpoints").mkdir(parents=True)
    config = load_config("config.toml", [("generation.num_generators", "3"), ("model.max_context", "128")])
    (run / "config.toml").write_text(dump_config(config))
    return run


def test_model_folder_is_served_with_defaults_and_options(project: Path, served):
    config, source = served("policy", "--generation.num_generators", "1", "--server.port=0")
    assert config.model.path == str(project / "policy")
    assert (config.generation.num_generators, config.server.port, config.server.host) == (1, 0, "127.0.0.1")
    assert (source.toml, source.checkpoint) == (None, None)


def test_toml_file_settings_apply_except_those_of_training(project: Path, served):
    config, _ = served("config.toml", "--model.max_context", "64")
    assert (config.seed, config.model.max_context) == (7, 64)
    assert config.model.path == str(project / "policy")


def test_run_is_served_without_its_task_module(run_folder: Path, served):
    Path("echo_task.py").unlink()
    sys.modules.pop("echo_task", None)
    config, source = served(str(run_folder))
    assert (config.generation.num_generators, config.model.max_context) == (3, 128)
    assert source.name == f"the initial model of {run_folder}, which has no saved step yet"


def saved(run: Path, step: int, time: int) -> Path:
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir()
    os.utime(folder, (time, time))
    return folder


def test_newest_checkpoint_or_export_of_a_run_is_served(run_folder: Path):
    saved(run_folder, 9, time=100)
    newest = saved(run_folder, 40, time=200)
    source = find_policy(str(run_folder))
    assert (source.checkpoint, source.version) == (newest, 40)
    export = run_folder / "export"
    export.mkdir()
    os.utime(export, (300, 300))
    source = find_policy(str(run_folder))
    assert (source.folder, source.checkpoint, source.version) == (export, None, 40)
    assert source.name == f"the exported policy of {run_folder}"
    later = saved(run_folder, 80, time=400)
    source = find_policy(str(run_folder))
    assert (source.folder, source.checkpoint, source.name) == (None, later, f"step 80 of {run_folder}")


def test_follow_option_and_setting_follow_a_run(run_folder: Path, served):
    config, source = served(str(run_folder))
    assert (config.server.follow_s, source.run) == (None, run_folder)
    config, _ = served(str(run_folder), "--follow")
    assert config.server.follow_s == 5
    for argv in (["--follow", "--server.follow_s", "30"], ["--server.follow_s=30"]):
        config, _ = served(str(run_folder), *argv)
        assert config.server.follow_s == 30


def test_follow_resolves_the_latest_link_once(run_folder: Path):
    (latest := run_folder.parent / "latest").symlink_to(run_folder.name)
    saved(run_folder, 9, time=100)
    assert find_policy(str(latest)).run == run_folder


def test_dry_run_prints_the_settings(project: Path, capsys):
    assert main(["serve", "policy", "--dry-run", "--server.model", "tiny", "--server.port", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# the model policy\n")
    assert tomllib.loads(printed)["server"]["model"] == "tiny"
    Path("server.toml").write_text(printed)
    assert main(["serve", "server.toml", "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(printed)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "nowhere: there is no such folder; name a run's folder"),
        (["configs/nowhere.toml"], "configs/nowhere.toml: there is no such file; name a run's folder"),
        (["runs"], "runs is neither a run's folder, which has a config.toml, nor a model's, which has a config.json"),
        (["echo_task.py"], "echo_task.py is a file; name a run's folder, a model's folder or a TOML file"),
        (["policy", "--server.port", "99999"], "command line: server.port = 99999 must be less than 65536"),
        (["policy", "--server.hos", "::1"], "server.hos = '::1' is not a setting; nearest: server.host"),
        (["policy", "--training.lr", "1"], "[training] is not a table; valid here: seed, pythonpath, model"),
        (["policy", "--port", "8123"], "port = 8123 is not a setting; nearest: server.port"),
        (["policy", "--model.path", "other"], "--model.path: the policy is already given as"),
        (["policy", "--model.max_context", "513"], "model.max_context = 513 is more than the model's 512 positions"),
        (["policy", "--hosts.generate", "2", "--dry-run"], "hosts.generate is 2, and there is 1 host; lower it"),
        (["policy", "--hosts.addresses", "a", "--hosts.generate", "2"], "hosts.generate is 2, and there is 1 host"),
        (
            ["policy", "--follow"],
            "--follow: policy is not a run's folder, and so gets no newer versions; name a",
        ),
        (["config.toml", "--server.follow_s=9"], "server.follow_s = 9: config.toml is not a run's folder"),
        (["policy", "--server.follow_s=4000"], "server.follow_s = 4000 must be less than or equal to 3600"),
        (["policy", "--generation.engine", "echo_task:engin"], "generation.engine = 'echo_task:engin'"),
    ],
)
def test_invalid_serve_arguments_are_explained(run_folder: Path, argv: list[str], message: str, capsys):
    assert main(["serve", *argv]) == 2
    assert message in capsys.readouterr().err


def test_folder_of_runs_suggests_the_newest(run_folder: Path, capsys):
    (run_folder.parent / "latest").symlink_to(run_folder.name)
    assert main(["serve", "runs"]) == 2
    assert "; runs/latest is a run's" in capsys.readouterr().err


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("host", "keys", "message"),
    [
        ("127.0.0.1", {}, "cannot listen on"),  # the port is in use
        ("0.0.0.0", {}, "there is no key for clients"),
        ("nowhere.invalid", {"API": "a"}, "host 'nowhere.invalid'"),
        ("127.0.0.1", {"API": "a", "ADMIN": "a"}, "the admin key is also a client key"),
        ("127.0.0.1", {"API": "é"}, "other than printable ASCII"),
        ("127.0.0.1", {"API": ""}, "a server key is empty"),
    ],
)
def test_unusable_addresses_and_keys_are_rejected_before_anything_starts(
    project: Path, dry_run: tuple[str, ...], host: str, keys: dict[str, str], message: str, capsys, monkeypatch
):
    if not dry_run:
        pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
    Path("own.py").write_text("def engine(spec): raise AssertionError('started')\n")
    for name in ("API", "ADMIN"):
        monkeypatch.delenv(f"TITAN_RL_{name}_KEY", raising=False)
    for name, key in keys.items():
        monkeypatch.setenv(f"TITAN_RL_{name}_KEY", key)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        options = ["--server.host", host, "--server.port", str(port), "--generation.engine", "own:engine"]
        assert main(["serve", "policy", *dry_run, *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_serve_declares_only_server_settings():
    parser = Parser(prog="titan-rl serve")
    set_up(parser)
    parser.declare_settings()
    text = parser.format_help()
    assert "--server.num_places" in text
    assert "--generation.num_generators" in text
    assert "--training" not in text


def test_adapter_is_served_with_its_base_model(project: Path, served):
    adapter = write_adapter(project / "adapter")
    config, source = served(str(adapter))
    assert config.model.path == str(BASE)
    assert (source.checkpoint, source.version, source.name) == (adapter, 0, f"the adapter {adapter}")


def test_adapter_without_its_base_model_is_rejected(project: Path, capsys):
    write_adapter(project / "adapter", base_model_name_or_path="Qwen/Qwen3-0.6B")
    assert main(["serve", "adapter"]) == 2
    assert "base_model_name_or_path = 'Qwen/Qwen3-0.6B', which is not a folder; change it in" in capsys.readouterr().err


def test_damaged_adapter_is_rejected(project: Path, capsys):
    weights = write_adapter(project / "adapter") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert main(["serve", "adapter", "--dry-run"]) == 2
    assert "adapter_model.safetensors is not a safetensors file, or is cut off" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\\u0000b", "two words", "n" * 101])
def test_adapter_name_that_is_no_folder_name_is_rejected(project: Path, name: str, capsys) -> None:
    adapter = write_adapter(project / "adapter")
    assert main(["serve", str(BASE), "--dry-run", f'--server.adapters={{ "{name}" = "{adapter}" }}']) == 2
    err = capsys.readouterr().err
    assert "command line: server.adapters = {" in err
    assert "; use letters, digits and -_.:@+=, 1 to 100, and no dot at the beginning" in err


def test_run_with_pinned_adapters_is_served(run_folder: Path, served):
    settings = [("training.adapter.rank", "1"), ("generation.adapter_swap", "pinned")]
    (run_folder / "config.toml").write_text(dump_config(load_config("config.toml", settings)))
    config, _ = served(str(run_folder))
    assert config.generation.adapter_swap == "pinned"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, ""),
        ({"server.follow_s": "5"}, "server.follow_s"),
        ({"server.model": "sorter"}, "server.adapters has 'sorter', the name of the model"),
        ({"generation.speculative.method": "ngram"}, "drafts would come without the adapter"),
        ({"server.adapters": '{ sorter = "nowhere" }'}, "server.adapters.sorter = 'nowhere' is neither"),
    ],
)
def test_server_adapters_are_checked_before_start(project: Path, settings, problem: str, capsys):
    adapter = write_adapter(project / "adapter")
    given = {"server.adapters": f'{{ sorter = "{adapter}" }}', **settings}
    code = main(["serve", str(BASE), "--dry-run", *(f"--{name}={value}" for name, value in given.items())])
    assert code == (2 if problem else 0)
    assert problem in capsys.readouterr().err
