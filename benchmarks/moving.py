"""Gain of moving requests between engines, of separating them by length, and of lending the trainer's devices.

Workloads and costs are those of benchmarks/long_tail.py, in virtual time on the real router and scheduler. A request
that moves is computed again, prompt and tokens. `apart` knows every length in advance, which is impossible in practice,
and keeps long answers on separate engines. `lent` engines wake, pull and take over requests whenever the trainer waits,
and return them with the batch. `free` variants compute prompts, wake and pull in no time; they are upper limits.

    python -m benchmarks.moving                       # all, an hour of one core
    python -m benchmarks.moving --only staleness_0.3  # one workload
    python -m benchmarks.moving --part 4              # a quarter of the engines and of the prompts of a step
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.adaptive_places import VERL_COST
from benchmarks.long_tail import Case, verl_2200, verl_async
from benchmarks.paired import report
from benchmarks.simulation import Cluster, Workload, simulate
from titan_rl.generation.router.strategies import Candidate, LeastLoaded, Strategy
from titan_rl.scheduling.settings import SchedulingConfig

LONG, PART_OF_LONG = 12_000, 1 / 4  # tokens of an answer that is long, and of the engines that take these
COST = replace(VERL_COST, load=1.0)


class Apart(Strategy):
    """Strategy that sends long answers to the first engines and others to the rest, each to the least loaded."""

    def __init__(self, workload: Workload, num_replicas: int) -> None:
        self._workload = workload
        self._num_for_long = round(num_replicas * PART_OF_LONG)
        self._sides = LeastLoaded(), LeastLoaded()
        self._side_of: dict[Candidate, LeastLoaded] = {}

    def admit(self, candidate: Candidate) -> None:
        side = self._sides[len(self._side_of) < self._num_for_long]
        self._side_of.setdefault(candidate, side).admit(candidate)

    def withdraw(self, candidate: Candidate) -> None:
        self._side_of[candidate].withdraw(candidate)

    def released(self, candidate: Candidate) -> None:
        self._side_of[candidate].released(candidate)

    def choose(self, session_id: str | None, cost: int) -> Candidate:
        assert session_id is not None
        index, sibling = map(int, session_id.split("/")[:2])
        return self._sides[self._workload.length(index, sibling) > LONG].choose(session_id, cost)


@dataclass(frozen=True)
class Way:
    """Variant of the distribution of requests over engines."""

    change: Callable[[Cluster], Cluster]
    apart: bool = False


def free(cluster: Cluster) -> Cluster:
    return replace(cluster, cost=replace(cluster.cost, prompt_token=0.0, load=0.0), wake_s=0.0)


def lending(cluster: Cluster, *, wake_s: float) -> Cluster:
    """The same number of engines on the trainer's devices as on the others."""
    return replace(cluster, num_lent=cluster.num_replicas, move_below=0.9, wake_s=wake_s)


PLACED = Way(lambda cluster: cluster)
MOVING = {
    f"moved below {below}": Way(lambda cluster, below=below: replace(cluster, move_below=below)) for below in (0.5, 0.9)
}
OTHERS = {
    "long answers apart": Way(lambda cluster: cluster, apart=True),
    "as many lent, moved below 0.9": Way(lambda cluster: lending(cluster, wake_s=2.0)),
    "free: placed": Way(free),
    "free: moved below 0.9": Way(lambda cluster: replace(free(cluster), move_below=0.9)),
    "free: as many lent, moved below 0.9": Way(lambda cluster: lending(free(cluster), wake_s=0.0)),
}


def workloads() -> dict[str, tuple[Case, str, dict[str, Way]]]:
    """Cases, one schedule of each, and the variants to compare."""
    of: defaultdict[str, dict[str, Way]] = defaultdict(dict, {"staleness 0.3": OTHERS})
    asynchronous, alone = verl_async(COST), verl_2200()
    schedules = ["staleness 0.1", "staleness 0.3", "staleness 0.5"]
    return {
        **{name.replace(" ", "_"): (asynchronous, name, {**MOVING, **of[name]}) for name in schedules},
        "verl_2200_synchronous": (alone, "synchronous", MOVING),
        "verl_2200_streaming": (alone, "streaming", MOVING),
    }


def part_of(case: Case, part: int) -> Case:
    """The same number of requests per engine, on fewer engines."""
    cluster = replace(case.cluster, num_replicas=case.cluster.num_replicas // part)
    return replace(case, cluster=cluster, groups_per_step=case.groups_per_step // part)


def seconds_of(case: Case, schedule: str, way: Way, steps: int) -> float:
    settings = SchedulingConfig.model_validate({"groups_per_step": case.groups_per_step, **case.schedules[schedule]})
    cluster = way.change(case.cluster)
    result = simulate(
        case.workload,
        cluster,
        settings,
        num_steps=steps * case.steps_per_row,
        warmup=settings.age_bound + 2,
        strategy=Apart(case.workload, cluster.num_replicas) if way.apart else None,
    )
    seconds = result.mean_step_s * case.steps_per_row
    print(
        f"{seconds:>9.1f} s/step, trainer idle {result.trainer_idle:.0%}, engines idle {result.generators_idle:.0%}, "
        f"{result.moved} moved, length bias {result.length_bias:.3f}",
        flush=True,
    )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each way")
    parser.add_argument("--part", type=int, default=1, help="of the cluster, one of so many")
    parser.add_argument("--only", choices=list(workloads()), help="one workload")
    arguments = parser.parse_args()
    for name, (case, schedule, ways) in workloads().items():
        if arguments.only in (None, name):
            for how, way in {"placed": PLACED, **ways}.items():
                print(f"{name:<24}{how:<34}", end="", flush=True)
                report(
                    f"{name}_{how.replace(' ', '_')}",
                    seconds_of(part_of(case, arguments.part), schedule, way, arguments.steps),
                    "s",
                )


if __name__ == "__main__":
    main()
