"""`titan-rl launch`: submits a run to Slurm or Kubernetes, or shows what it would submit."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from providers.fakes import Commands

from titan_rl.cli.main import main

KUBERNETES = [
    "--hosts.provider",
    "kubernetes",
    "--hosts.kubernetes.image",
    "it:1",
    "--hosts.kubernetes.volume",
    "claim",
]


def test_dry_run_shows_the_script_and_submits_nothing(project: Path, capfd: pytest.CaptureFixture[str]):
    argv = ["launch", "config.toml", "--hosts.provider", "slurm", "--hosts.count", "3", "--training.steps", "4"]
    assert main([*argv, "--dry-run"]) == 0
    script = capfd.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    assert "#SBATCH --nodes=3\n" in script
    (settings,) = re.findall(r"<<'END_OF_SETTINGS' [^\n]*\n(.*)END_OF_SETTINGS\n", script, re.DOTALL)
    submitted = tomllib.loads(settings)
    assert submitted["training"]["steps"] == 4
    assert submitted["model"]["path"] == str(project / "policy")
    assert not (project / "runs").exists()


@pytest.mark.parametrize("limit", ["30", "10:00:00", "1-00:00:00", "5:30", "2-12", "UNLIMITED"])
@pytest.mark.usefixtures("project")
def test_time_limit_accepts_every_slurm_format(limit: str, capfd: pytest.CaptureFixture[str]):
    options = f'--hosts.options=["--time={limit}"]'
    assert main(["launch", "config.toml", "--hosts.provider=slurm", options, "--dry-run"]) == 0
    assert f"#SBATCH --time={limit}\n" in capfd.readouterr().out


def test_submits_a_run_to_slurm(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    commands = Commands(tmp_path, monkeypatch)
    commands.make("sbatch", "print(17)", reads=True)
    assert main(["launch", "config.toml", "--hosts.provider", "slurm"]) == 0
    assert "titan-rl: job 17 is submitted; its output: runs/echo-17.log" in capfd.readouterr().err
    ((arguments, script),) = commands.calls("sbatch")
    assert (arguments, script[:12]) == (["--parsable"], "#!/bin/bash\n")


def test_model_folder_is_checked_for_slurm_but_not_for_kubernetes(project: Path, capfd: pytest.CaptureFixture[str]):
    shutil.rmtree(project / "policy")
    assert main(["launch", "config.toml", "--hosts.provider", "slurm", "--dry-run"]) == 2
    assert "policy" in capfd.readouterr().err
    assert main(["launch", "config.toml", *KUBERNETES, "--seed", "3", "--dry-run"]) == 0
    shown = capfd.readouterr()
    assert (
        "model.path = 'policy' is /workspace/policy on the machines of the run; make sure that it exists" in shown.err
    )
    made = {found["kind"]: found for found in yaml.safe_load_all(shown.out)}
    data = made["ConfigMap"]["data"]
    assert data["0-config.toml"] == (project / "config.toml").read_text()
    assert " --hosts.provider=kubernetes " in data["begin.sh"]
    assert " --seed=3 " in data["begin.sh"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "hosts.provider is not set; set it to slurm or kubernetes"),
        (
            ["--hosts.provider", "ssh", "--hosts.names", '["a"]'],
            'hosts.provider = "ssh" accepts no jobs; titan-rl train',
        ),
        (["--hosts.provider", "ssh"], 'provider = "ssh" needs names, the names of the hosts'),
        (["--hosts.provider", "slurm", "--hosts.train", "3"], "hosts.train is 3, and there is 1 host"),
        (
            ["--hosts.provider", "ssh", "--hosts.names", "a,b,a", "--dry-run"],
            "names: a is listed more than once; list each host once",
        ),
        (["--hosts.provider", "pbs"], "must be one of ssh, slurm, kubernetes"),
        (KUBERNETES[:-2], 'provider = "kubernetes" needs kubernetes.volume; set it'),
        ([*KUBERNETES, "--hosts.port", "0"], "its Service must name a fixed port; set one"),
        (
            ["--hosts.provider", "slurm", "--hosts.options", '["gpu"]'],
            "must begin with -, as --partition=gpu does",
        ),
        (["--hosts.provider", "slurm", "--hosts.addresses", '["a:1"]'], "exclude each other; leave one out"),
    ],
)
@pytest.mark.usefixtures("project")
def test_invalid_submissions_are_explained(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]):
    assert main(["launch", "config.toml", *arguments]) == 2
    assert message in capfd.readouterr().err
