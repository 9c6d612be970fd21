from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from titan_rl.cli.main import main, program
from titan_rl.config.load import load_config
from titan_rl.config.resume_changes import settings_of
from titan_rl.config.run import RunConfig
from titan_rl.config.settings_reference import tables
from titan_rl.core.errors import TrainingError
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import RunState


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[RunConfig], int]], None]:
    """Replace `titan_rl.run.train.run_training` with a function."""

    def install(run: Callable[[RunConfig], int]) -> None:
        module = ModuleType("titan_rl.run.train")
        module.run_training = lambda config, resume, **_: SimpleNamespace(summary=None, code=run(config))  # type: ignore
        monkeypatch.setitem(sys.modules, "titan_rl.run.train", module)

    return install


def test_train_passes_the_resolved_config_to_the_run(project: Path, launch):
    ran: list[RunConfig] = []
    launch(lambda config: ran.append(config) or 0)

    assert main(["train", "config.toml", "--training.steps", "9", "--seed=8"]) == 0
    assert (ran[0].training.steps, ran[0].seed) == (9, 8)


def test_dry_run_prints_the_resolved_settings_and_starts_nothing(project: Path, launch, capsys):
    launch(lambda config: pytest.fail("started"))

    assert main(["train", "config.toml", "--dry-run", "--training.steps", "9"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["training"]["steps"] == 9
    assert printed["model"]["path"] == str(project / "policy")


DRY_RUN = """
import sys
from titan_rl.cli.main import main

assert main(["train", "config.toml", "--dry-run"]) == 0
heavy = {"torch", "torchtitan", "monarch", "vllm", "openai", "transformers"}
print(*sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""


def test_dry_run_of_a_dense_model_imports_no_heavy_packages(project: Path):
    done = subprocess.run([sys.executable, "-c", DRY_RUN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "", done.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"intermediate_size": 32}, "'model.layers.0.mlp.down_proj.weight' in .* has shape"),
        ({"tie_word_embeddings": False}, "the weights in .* lack 'lm_head.weight', which config.json describes"),
        ({"model_type": "qwen9"}, "transformers cannot build the model in .* model type `qwen9`"),
        (
            {"model_type": "qwen2", "hidden_act": "wiggle"},
            "cannot build the model in .*: KeyError: 'wiggle'",
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "cannot build the model in .*`layer_types`"),
    ],
)
def test_dry_run_checks_that_the_policy_can_be_built(project: Path, changed, message, capsys):
    path = project / "policy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert main(["train", "config.toml", "--dry-run"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_dry_run_is_short_and_ends_with_a_verdict(project: Path, capsys):
    assert main(["train", "config.toml", "--dry-run", "--training.steps=9"]) == 0
    streams = capsys.readouterr()
    assert len((streams.out + streams.err).splitlines()) < 50
    assert streams.err.endswith(
        "titan-rl: ready: the settings are valid, and the run can start\n"
        "titan-rl: next: titan-rl train config.toml --training.steps=9\n"
    )
    (project / "brief.toml").write_text(streams.out)
    assert load_config("brief.toml") == load_config("config.toml", [("training.steps", "9")])
    assert main(["train", "config.toml", "--dry-run", "--verbose"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 150
    (project / "echo_task.py").write_text((project / "echo_task.py").read_text().replace("1.0", "1 / 0"))
    sys.modules.pop("echo_task")
    assert main(["train", "config.toml", "--dry-run"]) == 1
    assert capsys.readouterr().err.endswith("titan-rl: not ready: a run would fail; see the errors above\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts.listen=203.0.113.9"], "hosts.listen = '203.0.113.9': Cannot assign requested address; name an"),
        (["--hosts.addresses_file=nope.txt"], "hosts.addresses_file = 'nope.txt': No such file or directory; create a"),
        (["--hosts.train=2"], "hosts.train is 2, and there is 1 host; lower it"),
        (["--hosts.listen=0.0.0.0"], "hosts.listen = '0.0.0.0' stands for all interfaces; name one address"),
    ],
)
def test_invalid_hosts_are_rejected_before_a_run_has_a_folder(
    project: Path, arguments: list[str], message: str, capsys
):
    for dry_run in (["--dry-run"], []):
        assert main(["train", "config.toml", "--hosts.addresses=127.0.0.1", *arguments, *dry_run]) == 2
        assert message in capsys.readouterr().err
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--scheduling.on_batch_ready=sleep", 'scheduling.on_batch_ready = "sleep", and this machine has no GPU'),
        ("--statedict.transport=cuda_ipc", "statedict.transport = 'cuda_ipc', and this machine has no GPU; set it to"),
    ],
)
def test_settings_that_need_a_gpu_are_rejected_without_one(
    project: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str, capsys
):
    monkeypatch.setattr("titan_rl.run.checks.requirements.visible_gpus", lambda: ())
    for dry_run in (["--dry-run"], []):
        assert main(["train", "config.toml", arguments, *dry_run]) == 2
        assert message in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_float32_adapters_are_rejected_when_generators_have_gpus(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr("titan_rl.run.checks.requirements.visible_gpus", lambda: ("0",))
    monkeypatch.setattr("titan_rl.run.checks.requirements.least_gpu_bytes", lambda: 80 * 2**30)
    for dry_run in (["--dry-run"], []):
        assert main(["train", "config.toml", "--training.adapter.rank=1", *dry_run]) == 2
        assert 'set model.dtype = "bfloat16"' in capsys.readouterr().err
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("gpus", "arguments", "message"),
    [
        (("0", "1", "2"), [], "statedict.transport is cuda_ipc: trainer and generators have GPUs of one host"),
        (("0",), [], "statedict.transport is shared_memory: trainer and generators share a GPU"),
        ((), [], "statedict.transport is shared_memory: trainer and generators are on one host, not all on GPUs"),
        ((), ["--hosts.addresses=127.0.0.1"], "statedict.transport is tcp: processes may be on several hosts"),
        (("0", "1", "2"), ["--statedict.transport=shared_memory"], "statedict.transport is shared_memory, as set"),
    ],
)
def test_dry_run_names_the_weight_transport_and_the_reason(
    project: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], arguments: list[str], message: str, capsys
):
    monkeypatch.setattr("titan_rl.run.checks.requirements.visible_gpus", lambda: gpus)
    monkeypatch.setattr("titan_rl.run.checks.requirements.least_gpu_bytes", lambda: 80 * 2**30)
    main(["train", "config.toml", *arguments, "--dry-run"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--training.data_parallel=3"],
            "context_parallel x training.tensor_parallel is 3 on a host and each rank",
        ),
        (["--generation.tensor_parallel_size=4"], "generation.tensor_parallel_size is 4 on a host and each"),
        (["--hosts.addresses=127.0.0.1,127.0.0.2", "--hosts.train=2"], "hosts.train is 2, and training.data_parallel"),
        (["--generation.speculative.method=suffix"], 'method = "suffix" needs arctic-inference, which is not'),
    ],
)
def test_settings_beyond_the_machine_are_rejected_before_a_run_has_a_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str, capsys
):
    monkeypatch.setattr("titan_rl.run.checks.requirements.visible_gpus", lambda: ("0", "1"))
    for dry_run in (["--dry-run"], []):
        assert main(["train", "config.toml", *arguments, *dry_run]) == 2
        assert message in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_unknown_setting_prints_one_message_and_exits_with_2(project: Path, launch, capsys):
    launch(lambda config: pytest.fail("started"))

    assert main(["train", "config.toml", "--training.stepz", "9"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err == "titan-rl: command line: training.stepz = 9 is not a setting; nearest: training.steps\n"


def test_model_folder_without_tokenizer_exits_with_2(project: Path, capsys):
    Path("policy/tokenizer.json").unlink()

    assert main(["train", "config.toml", "--dry-run"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_failed_run_prints_its_cause_and_exits_with_1(project: Path, launch, capsys):
    def fail(config: RunConfig) -> int:
        raise TrainingError("the loss at step 3 is nan") from ValueError("inf in the logits")

    launch(fail)

    assert main(["train", "config.toml"]) == 1
    assert capsys.readouterr().err == (
        "titan-rl: the loss at step 3 is nan\n  caused by ValueError: inf in the logits\n"
    )


def test_causes_are_printed_without_their_exception_groups(project: Path, launch, capsys):
    def fail(config: RunConfig) -> int:
        disk = OSError(28, "No space left on device")
        several = BaseExceptionGroup("unhandled errors in a TaskGroup", [ValueError("inf"), asyncio.CancelledError()])
        inner = TrainingError("the step failed: inf")
        inner.__cause__ = BaseExceptionGroup("unhandled errors in a TaskGroup", [several, disk])
        inner.add_note("fix the error, then continue")
        raise inner

    launch(fail)

    assert main(["train", "config.toml"]) == 1
    assert capsys.readouterr().err == (
        "titan-rl: the step failed: inf\n"
        "  caused by OSError: [Errno 28] No space left on device\n"
        "  fix the error, then continue\n"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_unwinds_the_run_and_sets_the_exit_code(project: Path, launch, number: signal.Signals, code: int):
    cleaned: list[bool] = []

    def run(config: RunConfig) -> int:
        try:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5)  # the handler runs before this returns
        finally:
            cleaned.append(True)
        return 0

    launch(run)
    before = signal.getsignal(signal.SIGTERM)
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored

    try:
        assert main(["train", "config.toml"]) == code
    finally:
        signal.signal(signal.SIGINT, interrupts)
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def sigint() -> Iterator[object]:
    """Python's handler of SIGINT, restored after the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("code", [0, 130, 143])
def test_main_restores_the_sigint_handler(project: Path, launch, sigint, code: int):
    launch(lambda config: code)
    assert main(["train", "config.toml"]) == code
    assert signal.getsignal(signal.SIGINT) is sigint


@pytest.mark.parametrize(("code", "is_quiet"), [(0, False), (1, False), (130, True), (143, True)])
def test_second_ctrl_c_ends_a_stopped_program_silently(
    project: Path, launch, sigint, monkeypatch, code: int, is_quiet: bool
):
    launch(lambda config: code)
    monkeypatch.setattr(sys, "argv", ["titan-rl", "train", "config.toml"])
    assert program() == code
    assert signal.getsignal(signal.SIGINT) is (signal.SIG_DFL if is_quiet else sigint)


def test_help_lists_options_and_points_to_the_settings_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])

    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--resume RUN" in text
    assert "`titan-rl settings` explains all of them" in text


def test_settings_command_explains_every_setting(capsys):
    assert main(["settings"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "training.betas: list of number = [0.9, 0.95]" in text
    assert "Requests and limits of the controller." in text
    assert "Steps between checkpoints; 0 saves by time only, and at the end." in text
    assert [setting.key for table in tables() for setting in table.settings if not setting.about] == []


def exit_code(argv: list[str]) -> object:
    try:
        return main(argv)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.lr"], "--training.lr: expected one argument"),
        (["--training.lr", "--seed=3"], "--training.lr: expected one argument"),
        (["--training..lr=1"], "[training.] is not a table; nearest: training"),
        (["--lr", "1"], "lr = 1 is not a setting; nearest: training.lr"),
        (["training.lr=1e-5"], "training.lr=1e-5 is not a file; write a setting with two dashes: --training.lr=1e-5"),
        (["++seed=3"], "++seed=3 is not a file; write a setting with two dashes: --seed=3"),
        (["--learning-rate", "1"], "learning-rate = 1 is not a setting; nearest: training.lr"),
        (["--training.lr_decay", "cosin"], "training.lr_decay = 'cosin' must be 'constant', 'linear' or 'cosine'"),
        (["--seed", "x", "--training.stepz", "-1"], "seed = 'x' must be a valid integer"),
        (["--seed", "x", "--training.stepz", "-1"], "training.stepz = -1 is not a setting; nearest: training.steps"),
    ],
)
def test_invalid_option_errors_suggest_a_fix(project: Path, arguments: list[str], message: str, capsys):
    assert exit_code(["train", "config.toml", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_settings_can_appear_anywhere_and_the_last_one_wins(project: Path, launch):
    ran: list[RunConfig] = []
    launch(lambda config: ran.append(config) or 0)

    arguments = [
        "--task.words",
        '["a=b"]',
        "--training.steps=8",
        "config.toml",
        "--training.steps",
        "9",
        "--task.style=loud",
    ]
    assert main(["train", *arguments]) == 0
    assert ran[0].training.steps == 9
    assert ran[0].tasks[0].task.train_sample(0, 1) == "a=b"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1e-3", -0.001),
        ("-2", -2),
        ("-0.5", -0.5),
        ("1e-3", 0.001),
        ("-inf", -math.inf),
        ("[-1e-3, 2]", [-0.001, 2]),
        ('["a", "b"]', ["a", "b"]),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_values_can_be_negative_numbers_or_lists(project: Path, capsys, text: str, value: object, joined: bool):
    arguments = [f"--task.length={text}"] if joined else ["--task.length", text]
    assert exit_code(["train", *arguments, "config.toml", "--dry-run"]) == (0 if value == -2 else 2)
    streams = capsys.readouterr()
    assert "length = -2" in streams.out or f"task.length = {value!r} must be a valid integer" in streams.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "--training.lr_d"], {"--training.lr_decay"}),
        (["train", "--training.lr_decay", "c"], {"constant", "cosine"}),
        (["train", "--training.loss", "g"], {"grpo", "gspo"}),
    ],
)
def test_shell_completes_commands_settings_and_values(capsys, tmp_path: Path, words: list[str], expected: set):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    typed = shlex.join(["titan-rl", *words])
    script_with_tab = (
        f'source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shtab_titan_rl; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script_with_tab], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) == expected


def test_completion_shows_that_it_lists_the_settings(capsys, monkeypatch):
    shown: list[str] = []

    @contextmanager
    def show(text: str) -> Iterator[None]:
        shown.append(text)
        yield
        assert not capsys.readouterr().out

    monkeypatch.setattr("titan_rl.run.terminal.waiting.WAITING.shown", show)
    assert main(["completion", "bash"]) == 0
    assert shown == ["loading completion", "listing the settings"]


STOPPED_WITHIN_AN_IMPORT = """
import os, signal, sys
from titan_rl.cli.main import program

class Stopping:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                os.kill(os.getpid(), number)
            except BaseException:  # as native modules do
                raise ImportError("numpy.core.multiarray failed to import") from None

module, number = sys.argv.pop(1), int(sys.argv.pop(1))
sys.meta_path.insert(0, Stopping())
sys.exit(program())
"""


@pytest.mark.parametrize(
    ("command", "module", "number"),
    [
        ("train", "titan_rl.cli.options", signal.SIGINT),
        ("train", "pydantic", signal.SIGTERM),
        ("train", "pydantic", signal.SIGHUP),
        ("train", "titan_rl.cli.train", signal.SIGINT),
        ("train", "numpy", signal.SIGTERM),
        ("sft", "echo_task", signal.SIGINT),
        ("train", "echo_task", signal.SIGINT),
        ("view", "numpy", signal.SIGINT),
    ],
)
def test_signal_during_imports_ends_the_command_with_one_line(project: Path, command: str, module: str, number: int):
    argv = [sys.executable, "-c", STOPPED_WITHIN_AN_IMPORT, module, str(int(number)), command, "config.toml"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (128 + number, "titan-rl: stopped before a run began\n")


def test_sighup_stays_ignored_under_nohup(project: Path, launch) -> None:
    launch(lambda config: os.kill(os.getpid(), signal.SIGHUP) or 0)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["train", "config.toml"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


OPEN_FILES = """
import resource, sys
from titan_rl.cli.main import program

resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv.pop(1))))
code = program()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(("most", "code"), [(512, 0), (100, 2)])
def test_limit_of_open_files_is_raised_as_far_as_the_system_allows(project: Path, most: int, code: int) -> None:
    argv = [sys.executable, "-c", OPEN_FILES, str(most), "train", "config.toml", "--dry-run"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == code, ended.stderr
    if code:
        assert ended.stderr.startswith("titan-rl: a process may open 100 files here, and needs 256; raise ulimit -Hn")
    else:
        assert ended.stderr.endswith("512 512\n")


def test_main_module_imports_only_the_errors_module():
    script = (
        "import sys; before = set(sys.modules); import titan_rl.cli.main; print(*sorted(set(sys.modules) - before))"
    )
    argv = [sys.executable, "-c", script]
    names = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout.split()
    outside = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert outside == {"titan_rl"}
    assert {name for name in names if name.startswith("titan_rl")} <= {
        "titan_rl",
        "titan_rl.cli",
        "titan_rl.cli.main",
        "titan_rl.core",
        "titan_rl.core.errors",
    }


def test_no_command_is_a_usage_error():
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2


def test_resume_loads_the_settings_of_the_run(project: Path, launch, monkeypatch):
    seen: list[object] = []
    module = ModuleType("titan_rl.run.train")

    def run_training(config: RunConfig, resume: Path, **_: object) -> SimpleNamespace:
        seen.append((config.training.steps, resume))
        return SimpleNamespace(summary=None, code=0)

    module.run_training = run_training  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "titan_rl.run.train", module)
    run = project / "run-1"
    run.mkdir()
    (run / "config.toml").write_text((project / "config.toml").read_text())
    assert main(["train", "--resume", str(run), "--training.steps", "77"]) == 0
    assert seen == [(77, run)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "either CONFIG.toml, or --resume RUN"),
        (["train", "a.toml", "--resume", "b"], "either CONFIG.toml, or --resume RUN"),
        (
            ["train", "--resume", "nowhere"],
            "--resume nowhere: there is no run: there is no such folder; name the folder",
        ),
        (["train", "--resume", "nowhere", "--seed", "3"], "there is no run"),
    ],
)
def test_invalid_resume_arguments_are_explained(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_resume_of_a_folder_that_is_no_run_suggests_a_run(project: Path, capsys):
    run = project / "runs" / "20260101-000000-base"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    (run / "metrics.jsonl").touch()
    for name, problem in {
        "policy": "the folder has no config.toml; name the folder of a run\n",
        "runs": "the folder has no config.toml; name the folder of a run, as runs/20260101-000000-base\n",
        f"runs/{run.name}/metrics.jsonl": f"it is a file; name the folder of a run, as runs/{run.name}\n",
    }.items():
        assert main(["train", "--resume", name]) == 2
        assert capsys.readouterr().err == f"titan-rl: --resume {name}: there is no run: {problem}"
    (project / "runs" / "latest").symlink_to(run.name)
    assert main(["train", "--resume", "lost"]) == 2
    assert "there is no such folder; name the folder of a run, as runs/latest" in capsys.readouterr().err


@pytest.fixture
def stopped(project: Path) -> RunDirectory:
    """A run that was stopped before its first checkpoint."""
    config = load_config("config.toml")
    run_dir = RunDirectory.create(config)
    RunState(settings=settings_of(config)).write(run_dir.path)
    return run_dir


def test_settings_that_determine_the_weights_cannot_change_on_resume(stopped: RunDirectory, launch, capsys):
    launch(lambda config: pytest.fail("started"))
    resume = ["train", "--resume", str(stopped.path), "--training.steps=9"]
    assert main([*resume, "--sampling.temperature=0.5"]) == 2
    expected_one = (
        "--sampling.temperature is 0.5, and the run has 1.0: these cannot change when a run is resumed (steps, hosts, "
        "generation, weight sync, checkpoints, logging, time limits, teachers and weights of tasks can); leave it out, "
        f"or begin a new run from its weights: titan-rl train --from {stopped.path} --sampling.temperature=0.5\n"
    )
    assert f"titan-rl: {expected_one}" in capsys.readouterr().err
    assert main([*resume, "--seed=9", "--scheduling.max_token_age=3"]) == 2
    expected_two = '--scheduling.max_token_age is 3, and the run has "none": these cannot'
    err = capsys.readouterr().err
    assert "--seed is 9, and the run has 7; " in err
    assert expected_two in err
    assert "; leave them out" in err


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("--training.algorithm=gspo", "--training.algorithm is gspo, and the run has grpo"),
        ("--scheduling.mode=sync", "--scheduling.mode is sync, and the run has none"),
    ],
)
def test_preset_of_other_settings_cannot_change_on_resume(
    stopped: RunDirectory, launch, capsys, option: str, change: str
):
    launch(lambda config: pytest.fail("started"))
    assert main(["train", "--resume", str(stopped.path), option]) == 2
    err = capsys.readouterr().err
    assert f"titan-rl: {change}: these cannot change when a run is resumed (" in err
    assert f"begin a new run from its weights: titan-rl train --from {stopped.path} {option}\n" in err
    assert main(["train", "--resume", str(stopped.path), "--training.algorithm=grpo", "--dry-run"]) == 0


def test_moved_model_may_be_named_on_resume_even_if_its_first_folder_is_gone(stopped: RunDirectory, launch):
    seen: list[RunConfig] = []
    launch(lambda config: seen.append(config) or 0)
    Path("policy").rename("copy")
    assert main(["train", "--resume", str(stopped.path), "--model.path", "copy"]) == 0
    assert seen[0].model.path == str(Path("copy").resolve())


@pytest.fixture
def finished(stopped: RunDirectory) -> RunDirectory:
    """A run with an exported policy."""
    shutil.copytree("policy", stopped.export)
    return stopped


def test_new_run_from_the_weights_of_another_may_change_all_settings(finished: RunDirectory, launch):
    seen: list[RunConfig] = []
    launch(lambda config: seen.append(config) or 0)
    new = ["train", "--from", str(finished.path), "--training.lr=1e-5", "--task.words", '["ham"]', "--seed=9"]
    assert main(new) == 0
    (config,) = seen
    assert (config.training.lr, config.seed, config.model.path) == (1e-5, 9, str(finished.export))
    assert config.training.steps == 5
    assert main([*new, "--model.path", "policy"]) == 2


@pytest.mark.parametrize("name", ["dr_grpo", "gspo", "cispo", "rloo", "reinforce", "rae", "ppo"])
def test_new_run_from_the_weights_of_another_may_have_another_algorithm(finished: RunDirectory, launch, name: str):
    seen: list[RunConfig] = []
    launch(lambda config: seen.append(config) or 0)
    new = ["train", "--from", str(finished.path), f"--training.algorithm={name}", "--scheduling.mode=sync"]
    assert main(new) == 0
    from_files = load_config("config.toml", [("training.algorithm", name), ("scheduling.mode", "sync")])
    assert seen[0].training == from_files.training
    assert seen[0].scheduling == from_files.scheduling


def test_new_run_from_a_run_without_weights_is_refused(stopped: RunDirectory, capsys):
    assert main(["train", "--from", str(stopped.path)]) == 2
    assert f"that run has no saved step yet; begin with its settings: {stopped.config}" in capsys.readouterr().err


def test_options_that_change_nothing_are_accepted_on_resume(stopped: RunDirectory, launch):
    seen: list[RunConfig] = []
    launch(lambda config: seen.append(config) or 0)
    same = ["--sampling.temperature=1.0", "--correction.cap=none", "--training.compile=true"]  # the same steps
    assert main(["train", "--resume", str(stopped.path), *same]) == 0
    assert seen[0].training.compile
    assert settings_of(seen[0])["sampling.temperature"] == 1.0


def test_dry_run_rejects_a_resume_that_would_fail(stopped: RunDirectory, capsys):
    dry = ["train", "--resume", str(stopped.path), "--dry-run"]
    before = stopped.config.read_text()
    assert main(dry) == 0
    capsys.readouterr()
    size = settings_of(load_config(stopped.config))["rollout.group_size"]
    stopped.config.write_text(before.replace(f"group_size = {size}\n", f"group_size = {size + 2}\n"))
    assert main(dry) == 2
    assert f"rollout.group_size is {size + 2}, and this run was made with {size}; restore" in capsys.readouterr().err
    stopped.config.write_text(before)
    with stopped.locked():
        assert main(dry) == 1
    assert "is being run by another process" in capsys.readouterr().err
    assert stopped.config.read_text() == before
