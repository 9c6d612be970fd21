"""`titan-rl launch` on a real Slurm cluster with two nodes, in namespaces of this machine. Four jobs run: one completes
although a node is drained, one is requeued at its time limit, resumes and is cancelled, one has all its workers
signalled to end, and the nodes of one come and go.

    python tests/hosts/slurm/two_nodes.py [CONFIG.toml]

Run it as root, with Debian's slurmctld, slurmd, slurm-client and munge. It takes about eight minutes. It is not part of
the test suite, which installs no scheduler. The model of the config must exist.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).parents[3]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests"), str(PROJECT / "tests" / "hosts")]

from slurm.changing_nodes import nodes_come_and_go  # noqa: E402
from slurm.cluster import SlurmCluster, slurm_cluster  # noqa: E402

LIMIT_S = 240.0
SMALL = {
    "generation.num_generators": 1,
    "scheduling.groups_per_step": 4,
    "rollout.group_size": 4,
    "validation.num_prompts": 0,
    "hosts.provider": "slurm",
    "hosts.count": 2,
}
BEGAN = time.monotonic()


def main() -> None:
    config = sys.argv[1] if sys.argv[1:] else str(PROJECT / "examples" / "alphabet_sort" / "cpu.toml")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    with slurm_cluster(folder) as cluster:
        show(cluster.run("sinfo", "--version") + cluster.run("sinfo"))
        comes_to_its_end(cluster, config, folder / "first")
        is_requeued_and_cancelled(cluster, config, folder / "second")
        ends_with_its_workers(cluster, config, folder / "third")
        nodes_come_and_go(cluster, folder / "fourth", show)
        left = {node.name: [line for line in node.processes() if "slurmd" not in line] for node in cluster.nodes}
        show(f"left on the nodes: {left}")
        assert not any(left.values())


def comes_to_its_end(cluster: SlurmCluster, config: str, runs: Path) -> None:
    job = launched(cluster, config, runs, {"training.steps": 20})
    cluster.wait_until(lambda: steps(runs) > 0, "the run has trained a step", LIMIT_S)
    is_drained(cluster, job, runs, cluster.nodes[1].name)
    wait_for(cluster, job, "COMPLETED")
    assert cluster.job(job)["ExitCode"] == "0:0"
    show_end(runs)
    run = run_of(runs)
    assert (run / "export").is_dir()
    assert status(runs)["state"] == "finished"
    show("logs: " + ", ".join(sorted(path.name for path in (run / "logs").iterdir())))


def is_drained(cluster: SlurmCluster, job: str, runs: Path, node: str) -> None:
    """Drain a node with a signal to the step of its worker."""
    listed = cluster.run("squeue", "--steps", f"--job={job}", "--noheader", "--format=%i %N").splitlines()
    (step,) = [words[0] for line in listed if (words := line.split())[1:] == [node] and words[0][-1].isdigit()]
    cluster.run("scancel", "--ctld", "--signal=TERM", step)
    show(f"scancel --ctld --signal=TERM {step}")
    drained = f"host {node} is drained: its worker got SIGTERM"
    took = cluster.wait_until(lambda: drained in log_of(runs).read_text(), drained, LIMIT_S)
    show(f"{drained}, after {took:.1f} s")


def is_requeued_and_cancelled(cluster: SlurmCluster, config: str, runs: Path) -> None:
    """Slurm counts a job's time in minutes, and may signal up to a minute early."""
    settings = {"training.steps": 500, "hosts.options": '["--time=4"]'}
    job = launched(cluster, config, runs, settings)
    cluster.wait_until(lambda: cluster.job(job)["Restarts"] == "1", "its time is up, and it is requeued", LIMIT_S)
    before = steps(runs)
    show(f"job {job} is requeued after {before} steps: {cluster.job(job)['JobState']}")
    wait_for(cluster, job, "RUNNING")
    cluster.wait_until(lambda: steps(runs) > before, "the run continues", LIMIT_S)
    show(f"its run continues: {steps(runs)} steps")
    is_cancelled(cluster, job, runs)
    assert len(runs_of(runs)) == 1


def is_cancelled(cluster: SlurmCluster, job: str, runs: Path) -> None:
    """The controller saves; the workers, also signalled, stay until it has."""
    cluster.run("scancel", job)
    show(f"scancel {job}")
    wait_for(cluster, job, "CANCELLED")
    took = cluster.wait_until(lambda: not cluster.run("squeue", "--noheader").strip(), "nothing of it is left", LIMIT_S)
    show(f"nothing of job {job} is left after {took:.1f} s more")
    show_end(runs)
    shows_that_it_was_saved(runs)


def shows_that_it_was_saved(runs: Path) -> None:
    """Check that the run was stopped and has saved its last step."""
    assert status(runs)["state"] == "stopped"
    saved = max(path.name for path in (run_of(runs) / "checkpoints").glob("step-*"))
    show(f"{steps(runs)} steps are trained, the newest checkpoint is {saved}")
    assert saved == f"step-{steps(runs):06}"


def ends_with_its_workers(cluster: SlurmCluster, config: str, runs: Path) -> None:
    """Slurm signals every step but not the batch script, whose run still stops gracefully."""
    job = launched(cluster, config, runs, {"training.steps": 500})
    cluster.wait_until(lambda: steps(runs) > 0, "the run has trained a step", LIMIT_S)
    cluster.run("scancel", "--signal=TERM", job)
    show(f"scancel --signal=TERM {job}")
    wait_for(cluster, job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "143:0"
    show_end(runs)
    assert "all hosts of the run were asked to leave (its worker got SIGTERM)" in log_of(runs).read_text()
    shows_that_it_was_saved(runs)


def launched(cluster: SlurmCluster, config: str, runs: Path, settings: dict[str, object]) -> str:
    """Submit a job, and return its id."""
    options = [
        word for key, value in {**SMALL, **settings, "run_dir": runs}.items() for word in (f"--{key}", str(value))
    ]
    command = [sys.executable, "-m", "titan_rl.cli.main", "launch", config, *options]
    show(f"$ titan-rl launch {' '.join(command[4:])}")
    output = cluster.run(*command)
    show(output)
    (number,) = re.findall(r"job (\d+) is submitted", output)
    return number


def wait_for(cluster: SlurmCluster, job: str, state: str) -> None:
    def there() -> bool:
        found = cluster.job(job)["JobState"]
        assert found in (state, "PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), cluster.job(job)
        return found == state

    took = cluster.wait_until(there, f"job {job} is {state}", LIMIT_S)
    found = cluster.job(job)
    show(f"job {job} is {state} after {took:.0f} s on {found['NodeList']}, ExitCode={found['ExitCode']}")


def runs_of(runs: Path) -> list[Path]:
    return [path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()] if runs.is_dir() else []


def run_of(runs: Path) -> Path:
    return runs_of(runs)[0]


def steps(runs: Path) -> int:
    """Number of the last step in the metrics."""
    found = [path / "metrics.jsonl" for path in runs_of(runs)]
    lines = [line for path in found if path.exists() for line in path.read_text().splitlines()]
    return max((int(json.loads(line)["step"]) for line in lines), default=0)


def status(runs: Path) -> dict[str, object]:
    return json.loads((run_of(runs) / "status.json").read_text())


def log_of(runs: Path) -> Path:
    """Log file of the job."""
    (log,) = runs.glob("*.log")
    return log


def show_end(runs: Path) -> None:
    show(f"status.json: {json.dumps(status(runs))}")
    log = log_of(runs)
    show(f"{log.name}:\n" + "\n".join(f"    {line}" for line in log.read_text().splitlines()))


def show(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.1f} s] {text.strip()}", flush=True)


if __name__ == "__main__":
    main()
