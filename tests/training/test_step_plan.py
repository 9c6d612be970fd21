"""Which rank trains which rows: nothing twice, nothing lost, and nobody idle for longer than it must be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.training.data.packing import Family, StepPlan, plan_step
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import TrainingConfig


def sample(index: int, length: int, group: int, prompt: int = 0) -> TrainingSample:
    """One whose first `prompt` of `length` tokens are not trained, and those of its group."""
    zeros, mask = [0.0] * length, [t >= prompt for t in range(length)]
    return TrainingSample(f"g{group}", f"r{index}", [1] * length, mask, zeros, zeros, [0] * length, 1.0)


def planned(
    samples: list[TrainingSample],
    *,
    ranks: int,
    row_tokens: int,
    rows: int = 8,
    minibatches: int = 1,
    share_prompts: bool = True,
) -> list[StepPlan]:
    training = TrainingConfig(
        row_tokens=row_tokens,
        rows_per_micro_batch=rows,
        minibatches=minibatches,
        data_parallel=ranks,
        share_prompts=share_prompts,
    )
    return plan_step(samples, training)


def rows_of(plan: StepPlan) -> list[list[list[Family]]]:
    """For each minibatch the rows of a rank."""
    return [[row for micro_batch in minibatch.micro_batches for row in micro_batch] for minibatch in plan]


samples = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), max_size=40).map(
    lambda drawn: [sample(i, length, group) for i, (length, group) in enumerate(sorted(drawn, key=lambda d: d[1]))]
)


@given(samples, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_every_sample_is_trained_once_or_dropped(
    samples: list[TrainingSample], ranks: int, minibatches: int, rows: int
) -> None:
    plans = planned(samples, ranks=ranks, minibatches=minibatches, row_tokens=32, rows=rows)
    assert len(plans) == ranks
    assert len({tuple(len(minibatch.micro_batches) for minibatch in plan) for plan in plans}) == 1
    trained: Counter[str] = Counter()
    homes: dict[str, set[int]] = {}
    for plan in plans:
        for number, minibatch in enumerate(plan):
            for micro_batch in minibatch.micro_batches:
                assert len(micro_batch) <= rows
                for row in micro_batch:
                    assert sum(family.num_tokens for family in row) <= 32
                    for s in (sample for family in row for sample in family.samples):
                        trained[s.rollout_id] += 1
                        homes.setdefault(s.group_id, set()).add(number)
    fitting = [s.rollout_id for s in samples if len(s.token_ids) <= 32]
    assert trained == Counter(fitting)
    assert all(len(numbers) == 1 for numbers in homes.values())  # siblings are trained in one optimizer step
    assert sum(minibatch.num_samples for minibatch in plans[0]) == len(samples)
    assert sum(minibatch.num_dropped for minibatch in plans[0]) == len(samples) - len(fitting)


@given(st.lists(st.integers(8, 32), min_size=16, max_size=64), st.integers(2, 4))
def test_rows_are_dealt_evenly(lengths: list[int], ranks: int) -> None:
    plans = planned([sample(i, length, 0) for i, length in enumerate(lengths)], ranks=ranks, row_tokens=64, rows=2)
    rows = [sum(len(micro_batch) for minibatch in plan for micro_batch in minibatch.micro_batches) for plan in plans]
    assert len(set(rows)) == 1


def test_families_are_split_where_there_are_fewer_than_ranks() -> None:
    samples = [sample(4 * group + i, 40, group, prompt=32) for group in range(3) for i in range(4)]
    plans = planned(samples, ranks=4, row_tokens=128)
    assert [len(row) for plan in plans for row in rows_of(plan)] == [1, 1, 1, 1]
    assert sorted(
        len(family.samples) for plan in plans for rows in rows_of(plan) for row in rows for family in row
    ) == [
        2,
        2,
        4,
        4,
    ]


prompted = st.lists(st.tuples(st.integers(10, 30), st.lists(st.integers(1, 30), min_size=1, max_size=9)), max_size=6)


@given(prompted, st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_no_rank_idles_while_another_has_what_could_be_split(
    groups: list[tuple[int, list[int]]], ranks: int, minibatches: int, rows: int, share_prompts: bool
) -> None:
    samples = [
        sample(10 * group + i, prompt + answer, group, prompt)
        for group, (prompt, answers) in enumerate(groups)
        for i, answer in enumerate(answers)
    ]
    plans = planned(
        samples, ranks=ranks, minibatches=minibatches, row_tokens=48, rows=rows, share_prompts=share_prompts
    )
    trained = Counter(
        s.rollout_id
        for plan in plans
        for part in rows_of(plan)
        for row in part
        for family in row
        for s in family.samples
    )
    assert trained == Counter(s.rollout_id for s in samples if len(s.token_ids) <= 48)
    for minibatch in zip(*map(rows_of, plans), strict=True):
        assert all(sum(family.num_tokens for family in row) <= 48 for part in minibatch for row in part)
        num_rows = [len(part) for part in minibatch]
        num_samples = [sum(len(family.samples) for row in part for family in row) for part in minibatch]
        assert max(num_rows) - min(num_rows) <= 1
        if min(num_rows) < max(num_rows):  # not for want of splitting
            assert num_samples == num_rows
