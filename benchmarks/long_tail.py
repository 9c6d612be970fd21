"""Gain of scheduling when lengths have a long tail: published workloads in virtual time.

The router, rollouter and scheduler are the real ones; engines and trainer are simulated. No source gives a histogram of
its lengths. If lengths differ, 97% are therefore log-normal and 3% are within a tenth of the cap; the longest answer
then takes as long as the synchronous step. Medians, the cost of a request in a batch, and the trainer's share of a step
are assumptions, stated with each workload. `--sensitivity` runs each published comparison with other values of these
assumptions, and prints the figure for each: a figure means no more than the range of these values.

No figure is of a schedule that drops answers: all train on everything that they admit. `length bias` is the mean length
trained on divided by the mean length generated.

    python benchmarks/long_tail.py                # all, some minutes
    python benchmarks/long_tail.py --steps 6      # quicker and noisier
    python benchmarks/long_tail.py --sensitivity  # dependence of each figure on its assumptions
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field, replace

from benchmarks.simulation import Cluster, SimulationResult, Workload, equal, log_normal_with_tail, simulate
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.scheduling.settings import SchedulingConfig

Knobs = dict[str, object]


@dataclass(frozen=True)
class Case:
    """One workload on one cluster, under several schedules."""

    title: str
    workload: Workload
    cluster: Cluster
    groups_per_step: int
    schedules: dict[str, Knobs] = field(default_factory=dict[str, Knobs])
    steps_per_row: int = 1  # optimizer steps in what the source calls a step

    def only(self, schedule: str) -> Case:
        """The same case with one schedule and the synchronous one."""
        return replace(self, schedules={name: self.schedules[name] for name in ("synchronous", schedule)})

    def run(self, steps: int) -> dict[str, SimulationResult]:
        print(f"\n{self.title}")
        print(
            f"  {'schedule':<22}{'s/step':>9}{'trainer idle':>14}{'engines idle':>14}{'wasted':>8}"
            f"{'length bias':>13}{'bound':>7}  age histogram"
        )
        results: dict[str, SimulationResult] = {}
        for name, knobs in self.schedules.items():
            settings = SchedulingConfig.model_validate({"groups_per_step": self.groups_per_step, **knobs})
            result = simulate(
                self.workload,
                self.cluster,
                settings,
                num_steps=steps * self.steps_per_row,
                warmup=settings.age_bound + 2,
            )
            oldest = max(result.ages)
            assert oldest <= settings.age_bound, f"{name}: a token of age {oldest}, the bound is {settings.age_bound}"
            assert result.wasted_tokens == 0 or settings.drop_age is not None, (
                f"{name} wasted {result.wasted_tokens} tokens"
            )
            results[name] = result
            ages = " ".join(f"{age}:{count / result.ages.total():.0%}" for age, count in sorted(result.ages.items()))
            print(
                f"  {name:<22}{result.mean_step_s * self.steps_per_row:>9.1f}{result.trainer_idle:>14.0%}"
                f"{result.generators_idle:>14.0%}{result.wasted_tokens:>8}{result.length_bias:>13.3f}"
                f"{settings.age_bound:>7}  {ages}",
                flush=True,
            )
        return results


SYNCHRONOUS: Knobs = {"max_staleness": 0}
STREAMING: Knobs = {"max_staleness": 0, "oversample": 1.0}
PARTIAL_ABORT: Knobs = {"max_staleness": 1, "oversample": 1.0, "on_batch_ready": "abort"}
PARTIAL_KEEP: Knobs = {"max_staleness": 1, "oversample": 1.0, "on_batch_ready": "keep"}
ASYNCHRONOUS: Knobs = {"max_staleness": 3, "window": 256}
ALL: dict[str, Knobs] = {
    "synchronous": SYNCHRONOUS,
    "streaming": STREAMING,
    "partial (abort)": PARTIAL_ABORT,
    "partial (keep)": PARTIAL_KEEP,
    "fully asynchronous": ASYNCHRONOUS,
}
DROPPING: Knobs = {**STREAMING, "tail": "drop"}
COLOCATED = {name: knobs for name, knobs in ALL.items() if "partial" in name or name == "synchronous"}


def verl_2200(median: float = 300, full_batch: float = 2.0) -> Case:
    """Rollout only: 16k cap, 8 engines, 128 prompts x 8.

    An engine holds 128 requests, as many as a synchronous step gives it.

    Args:
        median: length of an answer, in tokens; assumed, because the source does not give it.
        full_batch: cost of a step of a full batch divided by that of one request; assumed.
    """
    workload = Workload(log_normal_with_tail(median=median, sigma=0.5, cap=16384), group_size=8)
    cost = CostModel(step=0.02, request=0.02 * (full_batch - 1) / 128, prompt_token=1e-5, load=1.0)
    schedules = {**ALL, "dropping the tail": DROPPING}  # for what it does to the lengths, not for its speed
    return Case("verl #2200, rollout alone", workload, Cluster(8, cost, max_running=128), 128, schedules)


def equal_lengths() -> Case:
    """The same engines with equal lengths, where nothing can be gained."""
    cost = CostModel(step=0.02, request=0.02 / 128, prompt_token=1e-5, load=1.0)
    return Case(
        "equal lengths, rollout alone", Workload(equal(1000), group_size=8), Cluster(8, cost, max_running=128), 128, ALL
    )


def apr_gsm8k(median: float = 300, full_batch: float = 2.0) -> Case:
    """128 x 8, colocated, 2k cap; training takes as long as the synchronous rollout, 44 s.

    Args:
        median, full_batch: assumed, as in `verl_2200`.
    """
    workload = Workload(log_normal_with_tail(median=median, sigma=0.5, cap=2048), group_size=8)
    cost = CostModel(step=0.02, request=0.02 * (full_batch - 1) / 128, prompt_token=1e-5, load=1.0)
    cluster = Cluster(8, cost, max_running=128, train_s=44.0, colocated=True)
    return Case("APR, GSM8K", workload, cluster, 128, COLOCATED)


def apr_160k(median: float = 8000, full_batch: float = 2.0) -> Case:
    """128 x 8, colocated, 160k cap; training takes 300 s of a synchronous step of about 3,700 s.

    Args:
        median, full_batch: assumed, as in `verl_2200`.
    """
    workload = Workload(log_normal_with_tail(median=median, sigma=0.6, cap=160_000), group_size=8)
    cost = CostModel(step=0.02, request=0.02 * (full_batch - 1) / 128, prompt_token=1e-5, load=1.0)
    cluster = Cluster(8, cost, max_running=128, train_s=300.0, colocated=True)
    return Case("APR, 160k tails", workload, cluster, 128, COLOCATED)


VERL_ASYNC_PUBLISHED = {0.0: 231.0, 0.1: 171.0, 0.3: 146.0, 0.5: 151.0}
VERL_GEN_S, VERL_LOGPROB_S, VERL_UPDATE_S = 178.0, 54.0, 114.0
VERL_STEP_PROMPTS, VERL_BATCH = 512, 128  # a step is four batches of four mini-batches of 32
VERL_WAKE_S = 2.0  # assumed: mapping 80 GB again; the pull has the cost of the model
VERL_MAX_RUNNING = 512  # all 8,192 answers of a step fit the 16 engines of the asynchronous run, as 256 each fit 32


def verl_lengths(median: float = 3000) -> Workload:
    return Workload(log_normal_with_tail(median=median, sigma=0.6, cap=28_672), group_size=16)


def verl_cost(lengths: Workload) -> CostModel:
    """Cost model in which a full batch of 256 costs twice an empty one.

    It is scaled so that the synchronous generation of 512 x 16 answers on 32 engines takes the published 178 s.
    """
    unit = CostModel(step=1e-3, request=1e-3 / 256, prompt_token=0.0)
    alone = simulate(
        lengths,
        Cluster(32, unit, max_running=VERL_MAX_RUNNING),
        SchedulingConfig(groups_per_step=VERL_STEP_PROMPTS, max_staleness=0),
        num_steps=2,
    )
    scale = VERL_GEN_S / alone.mean_step_s
    return CostModel(step=unit.step * scale, request=unit.request * scale, prompt_token=1e-5, load=1.0)


def verl_colocated(cost: CostModel) -> Case:
    cluster = Cluster(
        32,
        cost,
        max_running=VERL_MAX_RUNNING,
        train_s=VERL_UPDATE_S,
        logprob_s=VERL_LOGPROB_S,
        wake_s=VERL_WAKE_S,
        colocated=True,
    )
    schedules: dict[str, Knobs] = {
        "synchronous": SYNCHRONOUS,
        "synchronous (sleep)": {**SYNCHRONOUS, "on_batch_ready": "sleep"},
        "partial (sleep)": {**PARTIAL_ABORT, "oversample": 0.5, "on_batch_ready": "sleep"},
    }
    return Case("verl, 7B, 28k: colocated", verl_lengths(), cluster, VERL_STEP_PROMPTS, schedules)


def verl_async(cost: CostModel, lengths: Workload | None = None) -> Case:
    """Half of the devices generate, half train.

    In the source's figures the update takes as long on half of the devices, and logprobs are not recomputed. The source
    trains four batches between two syncs, while titan_rl pulls after each: its staleness of 0 is up to 3 versions here,
    and a staleness above 0 up to 7. Finished groups overtake as far as that allows.
    """
    parts = VERL_STEP_PROMPTS // VERL_BATCH
    cluster = Cluster(16, cost, max_running=VERL_MAX_RUNNING, train_s=VERL_UPDATE_S / parts)
    schedules: dict[str, Knobs] = {
        f"staleness {staleness}": {
            "max_staleness": parts - 1,
            "oversample": staleness * parts,
            "max_group_age": 2 * parts - 1 if staleness else parts - 1,
        }
        for staleness in VERL_ASYNC_PUBLISHED
    }
    title = "verl fully asynchronous, 7B, 28k, 64 + 64 devices (published 231, 171, 146, 151 s)"
    return Case(title, lengths or verl_lengths(), cluster, VERL_BATCH, schedules, steps_per_row=parts)


def speedup(results: dict[str, SimulationResult], name: str) -> float:
    return results["synchronous"].mean_step_s / results[name].mean_step_s


def sensitivity(steps: int) -> None:
    """The published comparisons, over a range of values of their assumptions."""
    for median in (300, 1000, 2000, 4000):
        value = speedup(verl_2200(median).only("streaming").run(steps), "streaming")
        tell(f"verl_2200_streaming_speedup_median_{median}", value, 2.0, "ratio, at least")
    for full_batch in (1.5, 4.0):
        value = speedup(verl_2200(full_batch=full_batch).only("streaming").run(steps), "streaming")
        tell(f"verl_2200_streaming_speedup_full_batch_{full_batch}", value, 2.0, "ratio, at least")
    for name, case, medians, target in (
        ("apr_gsm8k", apr_gsm8k, (150, 300, 600, 1000), 0.117),
        ("apr_160k", apr_160k, (4000, 8000, 16_000, 32_000), 0.511),
    ):
        for median in medians:
            value = 1 - 1 / speedup(case(median).only("partial (abort)").run(steps), "partial (abort)")
            tell(f"{name}_time_reduction_median_{median}", value, target, "share, at least")
        for full_batch in (1.5, 4.0):
            results = case(full_batch=full_batch).only("partial (abort)").run(steps)
            value = 1 - 1 / speedup(results, "partial (abort)")
            tell(f"{name}_time_reduction_full_batch_{full_batch}", value, target, "share, at least")
    for median in (1500, 6000):
        lengths = verl_lengths(median)
        case = verl_async(verl_cost(lengths), lengths)
        results = case.run(max(2, steps // 2))
        for staleness, published in VERL_ASYNC_PUBLISHED.items():
            seconds = results[f"staleness {staleness}"].mean_step_s * case.steps_per_row
            tell(f"verl_async_staleness_{staleness}_step_median_{median}", seconds, published, "s, at most")


def tell(name: str, value: float, target: float, unit: str) -> None:
    print(json.dumps({"name": name, "value": round(value, 3), "target": target, "unit": unit}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each schedule")
    parser.add_argument("--sensitivity", action="store_true", help="vary what the sources leave out, instead")
    arguments = parser.parse_args()
    if arguments.sensitivity:
        sensitivity(arguments.steps)
        return
    steps = arguments.steps
    began = time.perf_counter()
    figures: list[tuple[str, float, float, str]] = []

    results = verl_2200().run(steps)
    figures.append(("verl_2200_streaming_speedup", speedup(results, "streaming"), 2.0, "ratio, at least"))
    results = apr_gsm8k().run(steps)
    figures.append(("apr_gsm8k_time_reduction", 1 - 1 / speedup(results, "partial (abort)"), 0.117, "share, at least"))
    results = apr_160k().run(steps)
    figures.append(("apr_160k_time_reduction", 1 - 1 / speedup(results, "partial (abort)"), 0.511, "share, at least"))
    cost = verl_cost(verl_lengths())
    results = verl_colocated(cost).run(max(2, steps // 4))
    slept = results["synchronous (sleep)"].mean_step_s - results["synchronous"].mean_step_s
    figures.append(("verl_colocated_sleep_cost", slept, 3.0, "s, at most"))
    case = verl_async(cost)
    results = case.run(steps)
    for staleness, published in VERL_ASYNC_PUBLISHED.items():
        seconds = results[f"staleness {staleness}"].mean_step_s * case.steps_per_row
        figures.append((f"verl_async_staleness_{staleness}_step", seconds, published, "s, at most"))
    results = equal_lengths().run(steps)
    figures.append(("equal_lengths_speedup", speedup(results, "streaming"), 1.1, "ratio, at most"))

    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)
    for name, value, target, unit in figures:
        tell(name, value, target, unit)


if __name__ == "__main__":
    main()
