"""Assignment of rows to ranks: no sample is lost or trained twice, and ranks are balanced."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import PAIR_COST, Costs, StepPlan, pair_cost, plan_step
from titan_rl.training.settings import TrainingConfig


def sample(index: int, length: int, group: int, prompt: int = 0) -> TrainingSample:
    """A sample of `length` tokens, of which the first `prompt` are untrained."""
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
    """Rows of a rank, by minibatch."""
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
def test_rank_tokens_exceed_the_mean_by_at_most_one_sample(lengths: list[int], ranks: int) -> None:
    plans = planned([sample(i, length, 0) for i, length in enumerate(lengths)], ranks=ranks, row_tokens=64, rows=99)
    tokens = [sum(family.num_tokens for family in families([plan])) for plan in plans]
    assert max(tokens) <= sum(tokens) / ranks + max(lengths)


def test_families_are_split_when_fewer_than_ranks() -> None:
    samples = [sample(4 * group + i, 40, group, prompt=32) for group in range(3) for i in range(4)]
    plans = planned(samples, ranks=4, row_tokens=128)
    assert [len(row) for plan in plans for row in rows_of(plan)] == [1, 1, 1, 1]
    assert sorted(len(family.samples) for family in families(plans)) == [2, 2, 4, 4]


prompted = st.lists(st.tuples(st.integers(10, 30), st.lists(st.integers(1, 30), min_size=1, max_size=9)), max_size=6)


@given(prompted, st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_no_rank_idles_while_work_can_be_split(
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
    trained = Counter(s.rollout_id for family in families(plans) for s in family.samples)
    assert trained == Counter(s.rollout_id for s in samples if len(s.token_ids) <= 48)
    for minibatch in zip(*map(rows_of, plans), strict=True):
        assert all(sum(family.num_tokens for family in row) <= 48 for part in minibatch for row in part)
        num_rows = [len(part) for part in minibatch]
        num_samples = [sum(len(family.samples) for row in part for family in row) for part in minibatch]
        if min(num_rows) == 0:  # then every family is already split into single samples
            assert num_samples == num_rows


def imbalance(plans: list[StepPlan], costs: Costs) -> float:
    """Relative excess cost of the slowest rank over the mean."""
    by_rank = [sum(costs.micro_batch(rows) for part in plan for rows in part.micro_batches) for plan in plans]
    return max(by_rank) * len(by_rank) / sum(by_rank) - 1


def long_tailed(seed: int) -> list[TrainingSample]:
    """Rollouts of 8 prompts, whose answers have lognormal lengths."""
    rng = random.Random(seed)
    answers = [min(1200, 1 + int(rng.lognormvariate(0, 1) * 120)) for _ in range(64)]
    return [sample(i, 40 + answer, i // 8, prompt=40) for i, answer in enumerate(answers)]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
def test_rank_costs_are_equal_for_long_tailed_lengths(rows: int, share_prompts: bool) -> None:
    costs = Costs(pair=4e-4)  # attention is half of the cost of the longest answers
    for seed in range(5):
        plans = plan_step(
            long_tailed(seed),
            TrainingConfig(row_tokens=4096, rows_per_micro_batch=rows, data_parallel=4, share_prompts=share_prompts),
            costs,
        )
        assert imbalance(plans, costs) <= 0.05


def test_rank_with_a_long_answer_gets_fewer_short_ones() -> None:
    lengths = [1000, *[100] * 30]  # a thousand tokens cost 1000 + 1000^2 / 2 / 500, a hundred 110
    plans = plan_step(
        [sample(i, length, i) for i, length in enumerate(lengths)],
        TrainingConfig(row_tokens=4096, data_parallel=2, rows_per_micro_batch=1),
        Costs(pair=1 / 500),
    )
    tokens = sorted(sum(family.num_tokens for family in families([plan])) for plan in plans)
    assert tokens == [1600, 2400]


def test_family_is_split_only_if_the_step_gets_shorter() -> None:
    even = [sample(i, 50, i // 4, prompt=30) for i in range(8)]
    assert all(len(family.samples) == 4 for family in families(planned(even, ranks=2, row_tokens=256)))
    uneven = [sample(i, 400, 0, prompt=30) for i in range(8)] + [sample(9, 100, 1)]
    assert len(families(planned(uneven, ranks=2, row_tokens=4096))) > 2


def families(plans: list[StepPlan]) -> list[Family]:
    return [family for plan in plans for rows in rows_of(plan) for row in rows for family in row]


@given(samples, st.integers(2, 4), st.booleans())
def test_equal_samples_give_equal_plans(samples: list[TrainingSample], ranks: int, share_prompts: bool) -> None:
    plans = [planned(samples, ranks=ranks, row_tokens=64, share_prompts=share_prompts) for _ in range(2)]
    assert plans[0] == plans[1]


def test_attention_pair_cost_reflects_model_flops(tmp_path: Path) -> None:
    qwen3_8b = {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    }  # fmt: skip
    assert pair_cost(qwen3_8b) == pytest.approx(PAIR_COST, rel=0.05)
    experts = {**qwen3_8b, "moe_intermediate_size": 1536, "num_experts_per_tok": 8}
    assert pair_cost(experts) == pair_cost(qwen3_8b)
    (tmp_path / "config.json").write_text(json.dumps(qwen3_8b))
    assert Costs.of_model(tmp_path) == Costs(pair_cost(qwen3_8b))
    assert Costs.of_model(tmp_path / "missing") == Costs()
