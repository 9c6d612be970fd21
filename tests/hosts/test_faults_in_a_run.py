"""A run of the example on three hosts over links of 100 Mbit/s, during which faults happen one after the other. Its
result is bitwise equal to that of an undisturbed run on one host."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from depth import on_more_hosts
from e2e.runs import QUICK, run_training
from hosts.namespaces import HostProcess, NamespaceHost, Namespaces
from hosts.scripted import GATE
from hosts.waiting import until
from hosts.whole_runs import TESTS_AS_CODE, Computed, HeldRun, pid_of, run_on

pytestmark = on_more_hosts

SETTINGS: dict[str, Any] = {
    "scheduling__max_staleness": 0,
    "training__steps": 16,
    "checkpoint__interval": 2,
    "validation__num_prompts": 1,
    "logging__transcripts_per_step": QUICK["scheduling.groups_per_step"],
}
SETTINGS_ON_HOSTS: dict[str, Any] = {
    "generation__num_generators": 2,  # on the last two hosts
    "generation__engine": "hosts.brakes:make",
    "rollout__num_workers": 2,
    "training__loss": "e2e.slow_loss:slow_grpo",
    "pythonpath": TESTS_AS_CODE,
    "statedict__anchor_interval": 1,  # versions are sent whole, which takes 0.3 s
    "hosts__hang_timeout_s": 8,
    "hosts__max_respawns": 2,  # one process is stopped, one is killed; lost hosts do not count
}

moments = pytest.mark.parametrize(
    "until_moment",
    [HeldRun.continue_until_generating, HeldRun.continue_until_pulling],
    ids=["during requests", "during a pull"],
)
UntilMoment = Callable[[HeldRun, NamespaceHost], None]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    """Result of a run on one host."""
    with run_training(tmp_path_factory.mktemp("one"), **SETTINGS) as run:
        assert run.wait() == 0, run.output
        return Computed.by(run)


@pytest.fixture(scope="module")
def held(
    hosts: Namespaces, workers: list[HostProcess], gate: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeldRun]:
    for host in hosts:
        host.cap(100)
    (gate / "hold").touch()
    with run_on(hosts, tmp_path_factory.mktemp("three"), **SETTINGS, **SETTINGS_ON_HOSTS) as run:
        yield HeldRun(run, hosts, gate)


@pytest.fixture
def in_a_step(held: HeldRun) -> HeldRun:
    """The run, whose trainer is held within a step."""
    held.until_held()
    return held


@moments
def test_link_down_for_two_seconds_loses_no_host(until_moment: UntilMoment, in_a_step: HeldRun) -> None:
    host, begin = in_a_step.host_of("generator-0"), len(in_a_step.run.output)
    until_moment(in_a_step, host)
    host.link_down()
    time.sleep(2.0)
    host.link_up()
    in_a_step.until_held()
    assert "is lost" not in in_a_step.run.output[begin:]
    assert "is gone" not in in_a_step.run.output[begin:]


@moments
def test_host_rejoins_after_its_link_was_down_longer_than_the_lease(
    until_moment: UntilMoment, in_a_step: HeldRun
) -> None:
    host = in_a_step.host_of("generator-0")
    until_moment(in_a_step, host)
    with in_a_step.expects(f"host {host.name} is lost: ", f"host {host.name} at {host.worker_address} has joined with"):
        host.link_down()
        until(lambda: not host.pids("bootstrap_main"), "the host's processes end by themselves")
        host.link_up()


def test_host_killed_during_a_pull_rejoins(in_a_step: HeldRun, tmp_path: Path) -> None:
    host = in_a_step.host_of("generator-0")
    in_a_step.continue_until_pulling(host)
    with in_a_step.expects(f"host {host.name} is lost: ", f"host {host.name} at {host.worker_address} has joined with"):
        host.kill()
        host.start()
        host.cap(100)
        host.start_worker(tmp_path / "worker.txt", env={GATE: str(in_a_step.gate)})


def test_sigstopped_rollout_worker_is_replaced(in_a_step: HeldRun) -> None:
    in_a_step.continue_until_generating(in_a_step.host_of("generator-0"))
    with in_a_step.expects(
        "rollout-worker-1 died: it has been stopped by a signal", "rollout-worker-1 is running again after"
    ):
        os.kill(in_a_step.run.child("rollout-worker-1"), signal.SIGSTOP)


def test_trainer_recovers_when_its_replacement_is_killed_too(in_a_step: HeldRun) -> None:
    stopped = in_a_step.run.child("trainer")
    os.kill(stopped, signal.SIGSTOP)
    in_a_step.run.wait_for(lambda: pid_of(in_a_step.run, "trainer") not in {stopped, 0})
    os.kill(in_a_step.run.child("trainer"), signal.SIGKILL)
    in_a_step.continue_until_printed("trainer is running again after")


@pytest.mark.parametrize(
    ("until_moment", "generator"),
    [(HeldRun.continue_until_generating, "generator-1"), (HeldRun.continue_until_pulling, "generator-0")],
    ids=["during requests", "during a pull"],
)
def test_link_that_stays_down_loses_the_host(until_moment: UntilMoment, generator: str, in_a_step: HeldRun) -> None:
    """The first time the other generator continues alone; the second time a generator starts on the remaining host."""
    host = in_a_step.host_of(generator)
    until_moment(in_a_step, host)
    with in_a_step.expects(f"host {host.name} is lost: "):
        host.link_down()
    until(lambda: not host.pids("bootstrap_main"), "the host's processes end by themselves")


def test_hosts_rejoin_when_their_links_return(in_a_step: HeldRun) -> None:
    trains = in_a_step.host_of("trainer")
    back = [host for host in in_a_step.hosts if host is not trains]
    with in_a_step.expects(*[f"host {host.name} at {host.worker_address} has joined with generator-" for host in back]):
        for host in back:
            host.link_up()


def test_cut_off_training_host_is_replaced_and_rejoins(in_a_step: HeldRun) -> None:
    host = in_a_step.host_of("trainer")
    host.link_down()
    in_a_step.continue_until_printed("trainer is running again after")
    until(lambda: not host.pids("bootstrap_main"), "the host's processes end by themselves")
    assert in_a_step.host_of("trainer") is not host
    with in_a_step.expects(f"host {host.name} at {host.worker_address} has joined"):
        host.link_up()


def test_final_result_is_bitwise_equal_despite_the_faults(in_a_step: HeldRun, undisturbed: Computed) -> None:
    trains = in_a_step.host_of("trainer")
    next(host for host in in_a_step.hosts if host is not trains).link_down()
    (in_a_step.gate / "hold").unlink()
    assert in_a_step.run.wait() == 0, in_a_step.run.output
    assert Computed.by(in_a_step.run) == undisturbed
