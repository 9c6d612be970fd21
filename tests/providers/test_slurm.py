"""Slurm provider with fake Slurm commands: the nodes of an allocation, and requeued jobs."""

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from background import HANG_S
from providers.fakes import Commands, worker_command

from titan_rl.cluster.providers import slurm
from titan_rl.cluster.providers.spec import ChangingWorkers, ProviderSpec, Submission
from titan_rl.config.hosts import ProviderSettings
from titan_rl.core.errors import ConfigError, ProviderError

SRUN = """
words = argv[next(i for i, word in enumerate(argv[1:], 1) if not word.startswith("-")):]
os.execvp(words[0], words)
"""


SCONTROL = """
hostnames = {"node[1-2]": "127.0.0.1 127.0.0.2", "node[1-3]": "127.0.0.1 127.0.0.2 127.0.0.3"}
if "hostnames" in argv:
    print(hostnames.get(argv[-1], argv[-1]).replace(" ", "\\n"))
elif "job" in argv:
    print("JobId=17 JobName=word_sort ReqNodeList=(null) NodeList=" + pathlib.Path("nodes").read_text())
elif "node" in argv:
    for line in pathlib.Path("states").read_text().splitlines():
        print("NodeName=" + line.split()[0] + " Arch=x86_64 State=" + line.split()[1] + " Reason=hot [root@now]")
"""


@pytest.fixture
def allocation(tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> ProviderSpec:
    """Allocation of two nodes, whose states slurmctld reads from files."""
    commands.make("scontrol", SCONTROL)
    commands.make("srun", SRUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(slurm, "LOOK_S", 0.0)
    slurmctld_says("node[1-2]", "127.0.0.1 ALLOCATED", "127.0.0.2 ALLOCATED")
    return ProviderSpec(ProviderSettings(provider="slurm", command=worker_command(tmp_path), port=700), tmp_path)


def slurmctld_says(nodes: str, *states: str) -> None:
    Path("nodes").write_text(nodes)
    Path("states").write_text("\n".join(states))


async def test_each_node_of_an_allocation_has_a_worker(allocation: ProviderSpec, commands: Commands):
    async with slurm.workers(allocation) as addresses:
        assert list(addresses) == ["127.0.0.1:700", "127.0.0.2:700"]
    assert commands.calls("scontrol") == [(["show", "hostnames", "node[1-2]"], "")]
    nodes = {next(word for word in words if word.startswith("--nodelist")) for words, _ in commands.calls("srun")}
    assert nodes == {"--nodelist=127.0.0.1", "--nodelist=127.0.0.2"}
    assert (allocation.logs / "worker-127.0.0.2.log").read_text().endswith("got SIGTERM\n")


@pytest.mark.parametrize("state", ["ALLOCATED+DRAIN", "DRAINING*", "ALLOCATED+FAIL", "FAILING"])
async def test_drained_node_is_absent_until_resumed(state: str, allocation: ProviderSpec):
    async with slurm.workers(allocation) as workers:
        assert isinstance(workers, ChangingWorkers)
        assert await workers.current() == ["127.0.0.1:700", "127.0.0.2:700"]
        slurmctld_says("node[1-2]", "127.0.0.1 ALLOCATED*", f"127.0.0.2 {state}")
        assert await workers.current() == ["127.0.0.1:700"]
        assert "got SIGTERM" not in (allocation.logs / "worker-127.0.0.2.log").read_text(), (
            "the run moves away from it first"
        )
        slurmctld_says("node[1-2]", "127.0.0.1 ALLOCATED", "127.0.0.2 ALLOCATED")
        assert await workers.current() == ["127.0.0.1:700", "127.0.0.2:700"]


@pytest.mark.parametrize(
    ("nodes", "state"), [("node[1-2]", "DOWN*"), ("node[1-2]", "DOWN+DRAIN"), ("127.0.0.1", "IDLE")]
)
async def test_worker_of_a_failed_or_removed_node_ends(nodes: str, state: str, allocation: ProviderSpec):
    async with slurm.workers(allocation) as workers:
        assert isinstance(workers, ChangingWorkers)
        slurmctld_says(nodes, "127.0.0.1 ALLOCATED", f"127.0.0.2 {state}")
        assert await workers.current() == ["127.0.0.1:700"]
        log = allocation.logs / "worker-127.0.0.2.log"
        async with asyncio.timeout(HANG_S):
            while not log.read_text().endswith("got SIGTERM\n"):  # noqa: ASYNC110  waits for a process
                await asyncio.sleep(0.01)


async def test_node_added_to_the_allocation_gets_a_worker(allocation: ProviderSpec):
    async with slurm.workers(allocation) as workers, asyncio.timeout(HANG_S):
        assert isinstance(workers, ChangingWorkers)
        slurmctld_says("node[1-3]", *[f"127.0.0.{number} ALLOCATED" for number in (1, 2, 3)])
        while len(await workers.current()) < 3:  # noqa: ASYNC110  waits for a process
            await asyncio.sleep(0.01)
        assert await workers.current() == [f"127.0.0.{number}:700" for number in (1, 2, 3)]


async def test_slurmctld_queries_are_rate_limited(
    allocation: ProviderSpec, commands: Commands, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slurm, "LOOK_S", 1000.0)
    async with slurm.workers(allocation) as workers:
        assert isinstance(workers, ChangingWorkers)
        for _ in range(5):
            assert len(await workers.current()) == 2
    asked = [words for words, _ in commands.calls("scontrol") if "job" in words]
    assert asked == [["--oneliner", "show", "job", "17"]]


async def test_error_outside_an_allocation_says_how_to_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    with open(run / "events", "a") as events: events.write("stopped in order\\n")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
with open(run / "events", "a") as events: events.write("resumed\\n" if "--resume" in words else "began\\n")
if pathlib.Path("ends").exists():
    sys.exit(int(pathlib.Path("ends").read_text()))
print("ready", flush=True)
signal.pause()
"""


class Job:
    """Batch script of a run, which Slurm runs again after each requeue with the same job id."""

    def __init__(self, folder: Path, commands: Commands, **settings) -> None:
        self.folder, self._commands = folder, commands
        commands.make("scontrol", "")
        command = commands.make("titan", TITAN_RL)
        given = ProviderSettings(provider="slurm", command=command, **settings)
        self.submission = Submission(given, "word_sort", CONFIG, {}, folder=folder)
        self.script = folder / "script"
        self.script.write_text(slurm.render(self.submission))

    def run_once(self, send: signal.Signals | None = None, ends: int | None = None) -> int:
        """Run the job once, and return its exit code.

        Args:
            send: Signal to send once the run is ready.
            ends: Exit code with which the run ends by itself.
        """
        if ends is not None:
            (self.folder / "ends").write_text(str(ends))
        environment = {**os.environ, "SLURM_JOB_ID": "17", "TMPDIR": str(self.folder)}
        script = subprocess.Popen(["bash", self.script], env=environment, stdout=subprocess.PIPE, text=True)
        assert script.stdout is not None
        if send is not None:
            assert script.stdout.readline() == "ready\n"
            script.send_signal(send)
        return script.wait(HANG_S)

    @property
    def events(self) -> list[str]:
        return (self.folder / "runs" / "20260101-000000-word_sort-17" / "events").read_text().splitlines()

    @property
    def requeued(self) -> list[list[str]]:
        return [arguments for arguments, _ in self._commands.calls("scontrol")]


CONFIG = 'name = "it\'s $HOME `date`"\n# END_OF_SETTINGS\n'


def test_job_at_its_time_limit_is_requeued_and_resumes(tmp_path: Path, commands: Commands):
    job = Job(tmp_path, commands)
    assert job.run_once(signal.SIGUSR1) == 143
    assert job.requeued == [["requeue", "17"]]
    assert job.run_once(ends=0) == 0
    assert job.events == ["began", "stopped in order", "resumed"]
    assert next(tmp_path.glob("runs/*/settings")).read_text() == CONFIG
    assert (tmp_path / "runs" / "word_sort-17.toml").read_text() == CONFIG


def test_cancelled_job_stops_gracefully_without_requeue(tmp_path: Path, commands: Commands):
    job = Job(tmp_path, commands)
    assert job.run_once(signal.SIGTERM) == 143
    assert job.events == ["began", "stopped in order"]
    assert job.requeued == []


def test_job_exits_with_the_runs_code(tmp_path: Path, commands: Commands):
    job = Job(tmp_path, commands)
    assert job.run_once(ends=1) == 1
    assert job.requeued == []


def test_batch_script_has_the_requested_sbatch_options(tmp_path: Path, commands: Commands):
    job = Job(
        tmp_path,
        commands,
        setup=("module load a",),
        drain_s=90,
        count=3,
        options=("--partition=gpu", "--time=1:00:00"),
    )
    asked = re.findall(r"^#SBATCH (.*)$", job.script.read_text(), re.MULTILINE)
    assert {"--nodes=3", "--time=1:00:00", "--partition=gpu", "--signal=B:USR1@150", "--requeue", "--no-kill"} <= set(
        asked
    )
    assert "\nmodule load a\n" in job.script.read_text()
    once = Job(tmp_path / "bin", commands, options=("--no-requeue",)).script.read_text()
    assert "--signal=B:TERM@120" in once
    assert "--no-requeue" in once
    assert "--requeue" not in once


def test_submit_passes_the_script_to_sbatch(tmp_path: Path, commands: Commands):
    commands.make("sbatch", "print('18;cluster')", reads=True)
    job = Job(tmp_path, commands)
    message = slurm.submit(job.submission, job.script.read_text())
    assert message.startswith("job 18 is submitted; its output: runs/word_sort-18.log; ")
    assert commands.calls("sbatch") == [(["--parsable"], job.script.read_text())]
    assert (tmp_path / "runs").is_dir()


def test_sbatch_error_is_reported(tmp_path: Path, commands: Commands):
    commands.make("sbatch", "sys.exit('sbatch: error: invalid partition specified: gpu')", reads=True)
    job = Job(tmp_path, commands)
    with pytest.raises(ProviderError, match=r"sbatch --parsable failed with code 1: .*invalid partition"):
        slurm.submit(job.submission, job.script.read_text())
