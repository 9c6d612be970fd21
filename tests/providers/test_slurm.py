"""Hosts of Slurm, whose commands are scripts here: the nodes of an allocation, and a job that goes on."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from providers.fakes import Commands, worker_command

from titan_rl.errors import ConfigError, ProviderError
from titan_rl.providers import slurm
from titan_rl.providers.settings import ProviderSettings, SlurmConfig
from titan_rl.providers.spec import ProviderSpec, Submission

LIMIT_S = 60.0
SRUN = """
words = argv[next(i for i, word in enumerate(argv[1:], 1) if not word.startswith("-")):]
os.execvp(words[0], words)
"""


async def test_each_node_of_an_allocation_has_a_worker(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
):
    commands.make("scontrol", "print('127.0.0.1\\n127.0.0.2')")
    commands.make("srun", SRUN)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    settings = ProviderSettings(provider="slurm", command=worker_command(tmp_path), port=700)
    async with slurm.workers(ProviderSpec(settings, tmp_path)) as addresses:
        assert addresses == ["127.0.0.1:700", "127.0.0.2:700"]
    assert commands.calls("scontrol") == [(["show", "hostnames", "node[1-2]"], "")]
    nodes = {next(word for word in words if word.startswith("--nodelist")) for words, _ in commands.calls("srun")}
    assert nodes == {"--nodelist=127.0.0.1", "--nodelist=127.0.0.2"}
    assert (tmp_path / "worker-127.0.0.2.log").read_text().endswith("told to end\n")


async def test_outside_of_an_allocation_the_way_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ConfigError, match="titan-rl launch CONFIG, or in a job of sbatch or salloc"):
        async with slurm.workers(ProviderSpec(ProviderSettings(provider="slurm"), tmp_path)):
            pytest.fail("it began")


TITAN_RL = """
import signal
runs = pathlib.Path("runs")
words = argv[argv.index("train") + 1:]
if words[0] == "--resume":
    run = pathlib.Path(words[1])
else:
    run = runs / f"20260101-000000-{words[2]}"
    run.mkdir(parents=True)
    (run / "run_state.json").touch()
    (run / "settings").write_text(pathlib.Path(words[0]).read_text())
def stop(*_):
    with open(run / "said", "a") as said: said.write("stopped in order\\n")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
with open(run / "said", "a") as said: said.write("resumed\\n" if "--resume" in words else "began\\n")
if pathlib.Path("ends").exists():
    sys.exit(int(pathlib.Path("ends").read_text()))
print("ready", flush=True)
signal.pause()
"""


class Job:
    """The batch script of a run, as Slurm runs it again and again under one number."""

    def __init__(self, folder: Path, commands: Commands, **settings) -> None:
        self.folder, self._commands = folder, commands
        commands.make("scontrol", "")
        command = commands.make("titan", TITAN_RL)
        given = ProviderSettings(provider="slurm", command=command, slurm=SlurmConfig(**settings))
        self.submission = Submission(given, "word_sort", CONFIG, {}, folder=folder)
        self.script = folder / "script"
        self.script.write_text(slurm.render(self.submission))

    def turn(self, send: signal.Signals | None = None, ends: int | None = None) -> int:
        """One turn of the job: its run is sent a signal when it goes, or ends by itself."""
        if ends is not None:
            (self.folder / "ends").write_text(str(ends))
        environment = {**os.environ, "SLURM_JOB_ID": "17", "TMPDIR": str(self.folder)}
        script = subprocess.Popen(["bash", self.script], env=environment, stdout=subprocess.PIPE, text=True)
        assert script.stdout is not None
        if send is not None:
            assert script.stdout.readline() == "ready\n"
            script.send_signal(send)
        return script.wait(LIMIT_S)

    @property
    def said(self) -> list[str]:
        return (self.folder / "runs" / "20260101-000000-word_sort-17" / "said").read_text().splitlines()

    @property
    def requeued(self) -> list[list[str]]:
        return [arguments for arguments, _ in self._commands.calls("scontrol")]


CONFIG = 'name = "it\'s $HOME `date`"\n# END_OF_SETTINGS\n'


def test_when_its_time_is_up_a_job_stops_waits_for_its_turn_and_goes_on(tmp_path: Path, commands: Commands):
    job = Job(tmp_path, commands)
    assert job.turn(signal.SIGUSR1) == 143
    assert job.requeued == [["requeue", "17"]]
    assert job.turn(ends=0) == 0
    assert job.said == ["began", "stopped in order", "resumed"]
    assert next(tmp_path.glob("runs/*/settings")).read_text() == CONFIG
    assert (tmp_path / "runs" / "word_sort-17.toml").read_text() == CONFIG


def test_a_cancelled_job_ends_its_run_in_order_and_does_not_come_back(tmp_path: Path, commands: Commands):
    job = Job(tmp_path, commands)
    assert job.turn(signal.SIGTERM) == 143
    assert job.said == ["began", "stopped in order"]
    assert job.requeued == []


def test_a_job_ends_with_its_runs_code(tmp_path: Path, commands: Commands):
    job = Job(tmp_path, commands)
    assert job.turn(ends=1) == 1
    assert job.requeued == []


def test_the_script_says_what_is_asked_of_slurm(tmp_path: Path, commands: Commands):
    job = Job(
        tmp_path,
        commands,
        nodes=3,
        time_limit="1:00:00",
        options=["--partition=gpu"],
        setup=["module load a"],
        grace_s=9,
    )
    asked = re.findall(r"^#SBATCH (.*)$", job.script.read_text(), re.MULTILINE)
    assert {"--nodes=3", "--time=1:00:00", "--partition=gpu", "--signal=B:USR1@9", "--requeue", "--no-kill"} <= set(
        asked
    )
    assert "\nmodule load a\n" in job.script.read_text()
    once = Job(tmp_path / "bin", commands, requeue=False).script.read_text()
    assert "--signal=B:TERM@120" in once
    assert "--no-requeue" in once


def test_the_script_is_given_to_sbatch(tmp_path: Path, commands: Commands):
    commands.make("sbatch", "print('18;cluster')", reads=True)
    job = Job(tmp_path, commands)
    said = slurm.submit(job.submission, job.script.read_text())
    assert said.startswith("job 18 is submitted; its output: runs/word_sort-18.log; ")
    assert commands.calls("sbatch") == [(["--parsable"], job.script.read_text())]
    assert (tmp_path / "runs").is_dir()


def test_what_slurm_refuses_is_told(tmp_path: Path, commands: Commands):
    commands.make("sbatch", "sys.exit('sbatch: error: invalid partition specified: gpu')", reads=True)
    job = Job(tmp_path, commands)
    with pytest.raises(ProviderError, match=r"sbatch --parsable failed with code 1: .*invalid partition"):
        slurm.submit(job.submission, job.script.read_text())
