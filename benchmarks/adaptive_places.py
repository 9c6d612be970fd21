"""Adaptive batch size against the best fixed one, on the workloads of benchmarks/long_tail.py.

One engine in virtual time answers all requests of some steps. There are twice as many requests in flight as places, as
with schedules that stream. The KV cache holds a part of the places at the mean length of a whole context, and at least
the longest context. When it is full, the request that joined last is preempted, and its tokens are computed again.

Costs are those of long_tail.py plus an assumed cost of attention, which none of its sources gives: a step over a full
cache takes the time of one more empty step, as if the cache were as large as the weights. The best fixed value is
searched for each cache separately, because none is best for all.

    python -m benchmarks.adaptive_places              # all, some minutes
    python -m benchmarks.adaptive_places --seeds 1    # quicker and noisier
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

import looptime

from benchmarks.long_tail import Case, apr_160k, apr_gsm8k, equal_lengths, verl_2200, verl_async, verl_colocated
from benchmarks.simulated_replica import SimulatedReplica
from benchmarks.simulation import Workload
from titan_rl.generation.adaptive_batch import AdaptiveLimit
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.types import SamplingParams

CACHES = (0.25, 0.5, 1.0)  # share of the places that the cache holds at the mean length
FIXED = (1.0, 0.5, 0.25, 0.125)  # share of the places
VERL_COST = CostModel(step=5.3e-3, request=5.3e-3 / 256, prompt_token=1e-5)  # result of `long_tail.verl_cost`
REQUESTS_A_PLACE = 4
TARGET = 0.97


@dataclass(frozen=True)
class Served:
    """Time and tokens of one engine over all requests."""

    seconds: float
    preemptions: float  # a request


@dataclass(frozen=True)
class Setup:
    """One engine and its requests."""

    workload: Workload
    cost: CostModel
    most: int
    kv_tokens: int

    @classmethod
    def of(cls, case: Case, cache: float) -> Setup:
        lengths = [case.workload.length(index, 0) for index in range(4000)]
        prompt, most = case.workload.prompt_tokens, case.cluster.max_running
        kv_tokens = max(round(cache * most * (prompt + fmean(lengths))), prompt + 2 * max(lengths))
        cost = replace(case.cluster.cost, context_token=case.cluster.cost.step / kv_tokens)
        return cls(case.workload, cost, most, kv_tokens)

    def serve(self, seeds: int, fixed: int | None) -> Served:
        """Serve all requests of a setup.

        Args:
            fixed: number of places; None lets the engine adapt.
        """
        runs = [self._serve_one(replace(self.workload, seed=seed), fixed) for seed in range(seeds)]
        return Served(fmean(run.seconds for run in runs), fmean(run.preemptions for run in runs))

    def _serve_one(self, workload: Workload, fixed: int | None) -> Served:
        count, adaptive_limit = REQUESTS_A_PLACE * self.most, None
        if fixed is None:
            adaptive_limit = AdaptiveLimit(self.most, self.kv_tokens)
        loop = looptime.new_event_loop()
        replica = SimulatedReplica(
            "engine",
            lambda request_id, context: workload.length(int(request_id), 0) + workload.prompt_tokens - context,
            self.cost,
            max_running=fixed or self.most,
            kv_tokens=self.kv_tokens,
            adaptive_limit=adaptive_limit,
        )
        try:
            loop.run_until_complete(_answer_all(replica, workload.prompt_tokens, range(count), 2 * self.most))
            return Served(loop.time(), replica.num_preemptions / count)
        finally:
            loop.close()


async def _answer_all(replica: SimulatedReplica, prompt_tokens: int, requests: Iterable[int], in_flight: int) -> None:
    permits, prompt = asyncio.Semaphore(in_flight), range(prompt_tokens)

    async def answer(request: int) -> None:
        async with permits:
            await replica.generate(prompt, request_id=str(request), sampling=SamplingParams(max_tokens=1 << 20))

    serving = asyncio.ensure_future(replica.run())
    await asyncio.gather(*map(answer, requests))
    serving.cancel()


def cases() -> dict[str, Case]:
    return {
        "verl_2200": verl_2200(),
        "equal_lengths": equal_lengths(),
        "apr_gsm8k": apr_gsm8k(),
        "apr_160k": apr_160k(),
        "verl_colocated": verl_colocated(VERL_COST),
        "verl_async": verl_async(VERL_COST),
    }


def compare(name: str, case: Case, seeds: int) -> float:
    """Speed of adapting relative to the best fixed value, for the cache with the lowest ratio."""
    ratios: list[float] = []
    for cache in CACHES:
        setup = Setup.of(case, cache)
        fixed = {int(part * setup.most): setup.serve(seeds, int(part * setup.most)) for part in FIXED}
        best = min(fixed, key=lambda limit: fixed[limit].seconds)
        adaptive = setup.serve(seeds, None)
        ratios.append(fixed[best].seconds / adaptive.seconds)
        row = "".join(f"{served.seconds:>9.0f} ({served.preemptions:.2f})" for served in fixed.values())
        print(
            f"{name:<16}{cache:>5.0%}{setup.kv_tokens:>10}{row}{adaptive.seconds:>9.0f} ({adaptive.preemptions:.2f})"
            f"{best:>6}{ratios[-1]:>7.3f}",
            flush=True,
        )
    return min(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of each figure, which is their mean")
    parser.add_argument("--only", choices=list(cases()), help="one workload")
    arguments = parser.parse_args()
    header = "".join(f"{f'{part:g} of places':>16}" for part in FIXED)
    print("seconds (preemptions a request)")
    print(f"{'':<16}{'cache':>5}{'tokens':>10}{header}{'auto':>16}{'best':>6}{'ratio':>7}")
    for name, case in cases().items():
        if arguments.only in (None, name):
            ratio = compare(name, case, arguments.seeds)
            figure = {"name": f"adaptive_vs_best_fixed_{name}", "value": round(ratio, 3), "target": TARGET}
            print(json.dumps(figure | {"unit": "ratio, at least"}), flush=True)


if __name__ == "__main__":
    main()
