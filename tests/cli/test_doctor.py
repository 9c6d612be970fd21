"""`titan-rl doctor`: checks of the machine, and the hints of how to install an extra."""

import json
import os
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_rl.cli import doctor
from titan_rl.cli.main import main
from titan_rl.core.errors import MissingExtraError, install_command
from titan_rl.run.checks.machine_checks import TRIALS, Finding, check_up, try_out


def test_trials_report_success_failure_crash_and_hang():
    trials = {
        "works": "print('chatter'); found = 'device cpu'",
        "fails": "import no_such_package_anywhere",
        "crashes": "import os; os.abort()",
        "meets an unknown instruction": "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
    }
    hangs = try_out({"hangs": "while True: pass"}, "install it", timeout_s=0.5)
    found = {finding.subject: finding for finding in [*try_out(trials, "install it", timeout_s=60.0), *hangs]}
    assert found["works"] == Finding("works", "ok", "device cpu")
    reported = {subject: finding.found for subject, finding in found.items()}
    assert "No module named 'no_such_package_anywhere'" in reported["fails"]
    assert reported["crashes"] == "killed by SIGABRT"
    assert reported["meets an unknown instruction"] == "killed by SIGILL"
    assert "built for this CPU" in (found.pop("meets an unknown instruction").fix or "")
    assert reported["hangs"] == "did not end within 0.5 s"
    assert {(f.state, f.fix) for f in found.values() if f.subject != "works"} == {("missing", "install it")}


def test_trials_do_not_import_files_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("queue.py", "json.py"):
        (tmp_path / name).write_text("raise ImportError('of the current folder')\n")
    monkeypatch.chdir(tmp_path)
    (finding,) = try_out({"queue": "import queue, titan_rl; found = 'works'"}, "install it", timeout_s=60.0)
    assert finding == Finding("queue", "ok", "works")


@pytest.mark.parametrize(
    ("torch", "kernels"),
    [
        ("avx512 = bf16 = False", "_C_AVX2.abi3.so"),
        ("avx512 = True; bf16 = False", "_C_AVX512.abi3.so"),
        ("avx512 = bf16 = True", "_C.abi3.so"),
    ],
)
def test_kernels_of_vllm_are_those_that_it_chooses_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, kernels: str
) -> None:
    (tmp_path / "torch.py").write_text(
        f"from types import SimpleNamespace as N\n{torch}\nversion, ops = N(cuda=None), N(load_library=print)\n"
        "cpu = N(_is_avx512_supported=lambda: avx512, _is_avx512_bf16_supported=lambda: bf16)\n"
    )
    (tmp_path / "platform.py").write_text("def machine(): return 'x86_64'\n")
    (tmp_path / "vllm").mkdir()
    for name in ("__init__.py", "_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so"):
        (tmp_path / "vllm" / name).touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = try_out({"vllm kernels": TRIALS["packages"]["vllm kernels"]}, "install it", timeout_s=60.0)
    assert finding == Finding("vllm kernels", "ok", f"{kernels}, which fits torch")


def test_deleted_current_folder_is_the_only_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(["doctor"]) == 2
    err = "titan-rl: the current folder cannot be used: No such file or directory; change to another folder\n"
    assert capsys.readouterr() == ("", err)


def test_checks_the_machine_and_the_packages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.run.checks.machine_checks.try_out", lambda *_: iter(()))
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    found = {finding.subject: finding for finding in check_up()}
    assert {"python", "cores", "memory", "shared memory", "open files", "scratch", "torch", "torchmonarch"} <= set(
        found
    )
    assert (found["threads"].state, found["threads"].fix) == ("warning", "unset OMP_NUM_THREADS")
    assert all(finding.fix is None for finding in found.values() if finding.state == "ok")


def test_uninstalled_source_tree_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    def not_installed(name: str):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("titan_rl.run.checks.machine_checks.try_out", lambda *_: iter([Finding("torch", "ok", "2.11")]))
    monkeypatch.setattr("titan_rl.run.checks.machine_checks.requires", not_installed)
    findings = {finding.subject: finding for finding in check_up()}
    assert findings["titan-rl"].state == "warning"
    assert findings["torch"].found == "2.11"


def test_uninstalled_extras_are_optional(monkeypatch: pytest.MonkeyPatch):
    about = Message()
    for extra in ("games", "tables", "dev"):
        about["Provides-Extra"] = extra
    needs = [
        'no-such-game==1.0; extra == "games"',
        'pytest; extra == "games"',
        'pytest; extra == "tables"',
        'nowhere; extra == "dev"',
    ]
    monkeypatch.setattr("titan_rl.run.checks.machine_checks.try_out", lambda *_: iter(()))
    monkeypatch.setattr("titan_rl.run.checks.machine_checks.metadata", lambda _: about)
    monkeypatch.setattr("titan_rl.run.checks.machine_checks.requires", lambda _: needs)
    found = {finding.subject: finding for finding in check_up() if finding.subject.startswith("[")}
    assert found == {
        "[games]": Finding("[games]", "absent", "lacks no-such-game", install_command("games")),
        "[tables]": Finding("[tables]", "ok", f"pytest {pytest.__version__}"),
    }


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"dir_info": {"editable": true}, "url": "file:///a%20clone"}', "pip install -e '/a clone[cpu]'"),
        ('{"dir_info": {}, "url": "file:///clone"}', "pip install '/clone[cpu]'"),
        ('{"archive_info": {}, "url": "file:///a.whl"}', "pip install 'titan-rl[cpu] @ file:///a.whl'"),
        (
            '{"vcs_info": {"vcs": "git", "commit_id": "c0"}, "url": "https://host/repository"}',
            "pip install 'titan-rl[cpu] @ git+https://host/repository@c0'",
        ),
        (None, "pip install 'titan-rl[cpu]'"),
    ],
)
def test_install_command_uses_the_origin_of_the_installation(
    origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch
):
    installed = SimpleNamespace(read_text=lambda _: origin)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: installed)
    assert install_command("cpu") == command
    assert str(MissingExtraError("torch", "cpu")) == f"torch is not installed; run: {command}"


def test_exits_with_1_and_names_the_fix_when_a_run_cannot_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = [Finding("cores", "ok", "2"), Finding("import vllm", "missing", "not there", "pip install it")]
    monkeypatch.setattr(doctor, "check_up", lambda: iter(found))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert "missing  import vllm       not there" in printed.out
    assert "-> pip install it" in printed.out
    assert printed.err == "titan-rl: 1 of these prevent a run from starting\n"
    monkeypatch.setattr(doctor, "check_up", lambda: iter(found[:1]))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"subject": "cores", "state": "ok", "found": "2", "fix": None}


def test_version_is_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("titan-rl 0.")


@pytest.mark.parametrize(("own", "private"), [(False, False), (False, True), (True, False)])
def test_sockets_reachable_by_other_users_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, own: bool, private: bool
) -> None:
    links = {"/proc/self/ns/net": "net:[1]", "/proc/1/ns/net": f"net:[{2 if own else 1}]"}
    monkeypatch.setattr("os.readlink", lambda path, real=os.readlink: links.get(path) or real(path))
    tried = [Finding("other users", "ok" if private else "missing", "as tried out")]
    monkeypatch.setattr("titan_rl.run.checks.machine_checks.version", lambda _: "1.0")
    monkeypatch.setattr(
        "titan_rl.run.checks.machine_checks.try_out", lambda trials, *_: iter(tried) if len(trials) == 1 else ()
    )
    (finding,) = [finding for finding in check_up() if finding.subject == "other users"]
    assert finding.state == ("ok" if own or private else "warning")
    assert own or private or "every user of this machine can run code as you" in finding.found
