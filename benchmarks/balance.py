"""Balance of a long-tailed batch over data-parallel ranks.

    python -m benchmarks.balance

`dp_imbalance` is the cost of the rank with the most, over the mean of the ranks, minus 1; `dp_step_imbalance` adds the
waiting in each micro-batch: the sum of its slowest ranks, over the mean of the ranks, minus 1. Costs are those of
`titan_rl.training.data.step_plan`, in FLOPs of Qwen3-8B, padding included; nothing is trained. 256 rollouts, 8 of each
prompt of 300 tokens, have answers of lognormal lengths, of median 1,000 and sigma 1, cut at 16,000 tokens. There are 8
ranks, and rows of 32,768 tokens. The values are medians over ten batches; `before` deals packed rows in turn.

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.paired import Spread, report
from titan_rl.training.data.packing import find_families, pack
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import Costs, MicroBatch, plan_step
from titan_rl.training.settings import TrainingConfig

RANKS, GROUPS, GROUP_SIZE = 8, 32, 8
PROMPT, MEDIAN, LONGEST, ROW = 300, 1000, 16_000, 32_768
TARGET = 0.05


def long_tailed(seed: int) -> list[TrainingSample]:
    rng = random.Random(seed)
    return [
        _sample(group, index, min(LONGEST, max(1, int(MEDIAN * rng.lognormvariate(0, 1)))))
        for group in range(GROUPS)
        for index in range(GROUP_SIZE)
    ]


def _sample(group: int, index: int, answer: int) -> TrainingSample:
    ids = [1] * PROMPT + [2 + index] * answer
    mask, zeros = [False] * PROMPT + [True] * answer, [0.0] * len(ids)
    return TrainingSample(f"{group}", f"{group}-{index}", ids, mask, zeros, zeros, [0] * len(ids), 1.0)


def in_turn(samples: Sequence[TrainingSample], rows_at_once: int) -> list[list[MicroBatch]]:
    """Micro-batches of each rank, of rows that are packed together and dealt in turn."""
    rows = pack(find_families(samples, ROW), ROW, multiple_of=RANKS).rows
    starts = range(0, len(rows), RANKS * rows_at_once)
    return [[rows[start + rank : start + RANKS * rows_at_once : RANKS] for start in starts] for rank in range(RANKS)]


def imbalances(by_rank: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
    """(`dp_imbalance`, `dp_step_imbalance`)"""
    costs = [[Costs().micro_batch(rows) for rows in batches] for batches in by_rank]
    mean = sum(map(sum, costs)) / RANKS
    return max(map(sum, costs)) / mean - 1, sum(map(max, zip(*costs, strict=True))) / mean - 1


def report_balance() -> None:
    training = TrainingConfig(data_parallel=RANKS, row_tokens=ROW, rows_per_micro_batch=1)
    after: list[tuple[float, float]] = []
    before: list[tuple[float, float]] = []
    for seed in range(10):
        samples = long_tailed(seed)
        before.append(imbalances(in_turn(samples, 1)))
        after.append(imbalances([plan[0].micro_batches for plan in plan_step(samples, training)]))
    for at, name in enumerate(("dp_imbalance", "dp_step_imbalance")):
        dealt = Spread([each[at] for each in before]).median, "packed rows dealt to the ranks in turn"
        report(name, Spread([each[at] for each in after]), "ratio", TARGET, dealt)


if __name__ == "__main__":
    report_balance()
