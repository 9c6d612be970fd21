"""Plan of an optimizer step: its minibatches, and the micro-batches of each data-parallel rank, balanced by cost.

Ranks gather the parameters of each layer together, so in every micro-batch all wait for the rank whose rows cost most.
Rows with the same number of tokens do not cost the same, because attention costs the square of a document's length.
Families are therefore assigned to the ranks by cost, the most costly first, each to the micro-batch that costs least so
far (LPT: Graham, 1969), and then packed into rows. Families that are too costly to be balanced are split, so that their
prefix is computed again.

Several assignments are tried: the rows of all ranks packed together and dealt in turn, and families dealt by cost, with
more and more of them split. The plan is the assignment that takes the least time, the sum over the micro-batches of the
cost of their slowest rank. The same samples give the same plan.

This file imports no torch: the controller plans, and the ranks compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

from titan_rl.core.calls.parsing import parse_json
from titan_rl.training.data.packing import Family, Packing, find_families, pack
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.settings import TrainingConfig

MicroBatch = list[list[Family]]
"""Rows of families for one forward and backward pass; empty if a rank only takes part in the communication."""


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """One optimizer step as one rank sees it. All ranks have the same number of micro-batches."""

    micro_batches: list[MicroBatch]
    num_samples: int  # number of samples of all ranks
    num_dropped: int  # number of samples of all ranks that are longer than a row


StepPlan = list[MinibatchPlan]
"""The minibatches of one rank in a step."""

PAIR_COST = 4e-5
"""Default cost of a pair of tokens in attention, which is that of Qwen3-8B; see `pair_cost`."""

TRIED = 4
"""Number of micro-batches to compare for each family: those with the least cost so far."""

ROUNDS = 24
"""Maximum number of assignments to try, each with one more family split."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of rows in a forward and backward pass. The unit is the cost of one token outside attention.

    Args:
        pair: Cost of a query-key pair in attention.
    """

    pair: float = PAIR_COST

    @classmethod
    def of_model(cls, folder: Path) -> Costs:
        """Costs of a Hugging Face folder's model; the default ones if its config.json lacks the dimensions."""
        try:
            return cls(pair_cost(parse_json((folder / "config.json").read_text())))
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            return cls()  # loading the model reports what is wrong with its config

    def attention(self, family: Family) -> float:
        """Cost of the attention of a family: a suffix attends to its prefix and, causally, to itself."""
        prefix = family.prefix_length
        suffixes = [len(sample.token_ids) - prefix for sample in family.samples]
        pairs = prefix * prefix / 2 + sum(length * (prefix + length / 2) for length in suffixes)
        return self.pair * pairs

    def family(self, family: Family) -> float:
        return family.num_tokens + self.attention(family)

    def micro_batch(self, rows: MicroBatch) -> float:
        """Cost of rows that are padded to the longest one."""
        if not rows:
            return 0.0
        longest = max(sum(family.num_tokens for family in row) for row in rows)
        return longest * len(rows) + sum(self.attention(family) for row in rows for family in row)


def pair_cost(hf: Mapping[str, Any]) -> float:
    """Cost of a pair of tokens in attention, relative to that of one token in all matrices of a model, in FLOPs. It is
    4 L H / 2 P for L layers whose query heads together have H entries (2 H for the scores, 2 H for the weighted sum)
    and P parameters in the matrices.

    Args:
        hf: Content of the model's config.json. For a mixture of experts, only the experts of one token count.

    Raises:
        KeyError: A dimension is missing.
    """
    width, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or width // heads
    queries = heads * head_dim
    keys = (hf.get("num_key_value_heads") or heads) * head_dim
    experts = hf.get("num_experts_per_tok") or 0
    hidden = experts * hf["moe_intermediate_size"] if "moe_intermediate_size" in hf else hf["intermediate_size"]
    matrices = layers * width * (2 * queries + 2 * keys + 3 * hidden) + width * hf["vocab_size"]
    return 2 * layers * queries / matrices


def plan_step(
    samples: Sequence[TrainingSample], training: TrainingConfig, costs: Costs | None = None
) -> list[StepPlan]:
    """Split samples into minibatches, siblings together and groups in order; pack each minibatch, and deal its rows to
    ranks.

    There are at most as many minibatches as groups.

    Args:
        costs: Costs of the model, by which the ranks are balanced.

    Returns:
        One plan for each of the `training.data_parallel` ranks. Each sample is in one plan, or dropped.
    """
    ranks, row_tokens = training.data_parallel, training.row_tokens
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    count = max(1, min(training.minibatches, len(groups)))
    minibatch_of = {group: index * count // len(groups) for index, group in enumerate(groups)}
    minibatches: list[list[TrainingSample]] = [[] for _ in range(count)]
    for sample in samples:
        minibatches[minibatch_of[sample.group_id]].append(sample)
    plans: list[StepPlan] = [[] for _ in range(ranks)]
    for minibatch in minibatches:
        if training.share_prompts:
            families = find_families(minibatch, row_tokens)
        else:
            families = [Family((sample,)) for sample in minibatch]
        balancer = _Balancer(families, training, costs or Costs())
        for plan, micro_batches in zip(plans, balancer.best(), strict=True):
            plan.append(MinibatchPlan(micro_batches, len(minibatch), len(balancer.packing.dropped)))
    return plans


class _Bin:
    """Families of one micro-batch of one rank, before they are packed into rows."""

    def __init__(self) -> None:
        self.families: list[Family] = []
        self.tokens = self.longest = 0
        self.attention = 0.0

    def add(self, family: Family, attention: float) -> None:
        self.families.append(family)
        self.tokens += family.num_tokens
        self.longest = max(self.longest, family.num_tokens)
        self.attention += attention


class _Balancer:
    """Assignment of the families of a minibatch to the micro-batches of the ranks, so that they cost about the same."""

    def __init__(self, families: Sequence[Family], training: TrainingConfig, costs: Costs) -> None:
        self._ranks = training.data_parallel
        self._row_tokens = training.row_tokens
        self._most_rows = training.rows_per_micro_batch
        self._costs = costs
        self._families = [family for family in families if family.num_tokens <= training.row_tokens]
        self.packing: Packing = pack(families, training.row_tokens, multiple_of=self._ranks)

    def best(self) -> list[list[MicroBatch]]:
        """Micro-batches of each rank."""
        steps = self._round_robin()
        if self._ranks > 1 and steps:
            steps = min([steps, *self._assignments_by_cost(len(steps))], key=self._time)
        return self._to_ranks(steps)

    def _time(self, steps: Sequence[Sequence[MicroBatch]]) -> float:
        return sum(max(map(self._costs.micro_batch, step)) for step in steps)

    def _round_robin(self) -> list[list[MicroBatch]]:
        """Deal the rows of the packing to the ranks in turn. Neighbours in the packing have similar lengths.

        Returns:
            Micro-batches as [number of micro-batches of a rank][ranks].
        """
        rows, at_once = self.packing.rows, self._ranks * self._most_rows
        starts = range(0, len(rows), at_once)
        return [[rows[start + rank : start + at_once : self._ranks] for rank in range(self._ranks)] for start in starts]

    def _assignments_by_cost(self, num_steps: int) -> Iterator[list[list[MicroBatch]]]:
        """Deal families by cost, in several ways. At first, families that cost more than the mean micro-batch are
        split, and then, in each round, one family of the most costly micro-batch."""
        count = self._ranks * num_steps
        families = self._split(sum(map(self._costs.family, self._families)) / count)
        for _ in range(ROUNDS):
            batches = self._by_cost(families, count) if len(families) >= count else None
            if batches is not None:
                yield [batches[start : start + self._ranks] for start in range(0, count, self._ranks)]
            costliest = families if batches is None else [family for row in batches[0] for family in row]
            divisible = [family for family in costliest if len(family.samples) > 1]
            if not divisible:
                return
            split = max(divisible, key=self._costs.family)
            families.remove(split)
            families += split.halves()

    def _by_cost(self, families: Sequence[Family], count: int) -> list[MicroBatch] | None:
        """Deal families to micro-batches, and pack the families of each. The most costly micro-batches come first, so
        that ranks compute similar costs at the same time. None if a micro-batch has too many rows."""
        families = sorted(families, key=self._costs.family, reverse=True)
        bins = [_Bin() for _ in range(count)]
        cheapest = [(0.0, index) for index in range(count)]
        for family in families:
            attention = self._costs.attention(family)
            # A family may begin another row, which costs as much as the longest one or exceeds the limit of rows.
            tried: list[tuple[float, int]] = []
            cost, chosen = inf, 0
            while cheapest and (len(tried) < TRIED or cost == inf):
                tried.append(heappop(cheapest))
                index = tried[-1][1]
                cost, chosen = min((cost, chosen), (self._cost_with(bins[index], family, attention), index))
            if cost == inf:
                return None
            bins[chosen].add(family, attention)
            for each in tried:
                heappush(cheapest, (cost, chosen) if each[1] == chosen else each)
        batches = [pack(each.families, self._row_tokens).rows for each in bins]
        if max(map(len, batches)) > self._most_rows:
            return None
        return sorted(batches, key=self._costs.micro_batch, reverse=True)

    def _cost_with(self, chosen: _Bin, family: Family, attention: float) -> float:
        """Cost of a bin with another family, if rows can be packed without gaps; infinite if that makes too many
        rows."""
        tokens = chosen.tokens + family.num_tokens
        num_rows = -(-tokens // self._row_tokens)
        if num_rows > self._most_rows:
            return inf
        return max(tokens, num_rows * max(chosen.longest, family.num_tokens)) + chosen.attention + attention

    def _split(self, most: float) -> list[Family]:
        """Split families until each costs at most `most` or has a single sample."""
        found: list[Family] = []
        waiting = self._families[::-1]
        while waiting:
            family = waiting.pop()
            if len(family.samples) > 1 and self._costs.family(family) > most:
                waiting += family.halves()[::-1]
            else:
                found.append(family)
        return found

    def _to_ranks(self, steps: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
        """Give the most costly rows of each micro-batch to the rank with the least cost so far."""
        dealt: list[list[MicroBatch]] = [[] for _ in range(self._ranks)]
        so_far = [0.0] * self._ranks
        for step in steps:
            costs = [self._costs.micro_batch(rows) for rows in step]
            costliest = sorted(range(len(step)), key=lambda at: -costs[at])
            cheapest = sorted(range(self._ranks), key=lambda rank: so_far[rank])
            for at, rank in zip(costliest, cheapest, strict=True):
                dealt[rank].append(step[at])
                so_far[rank] += costs[at]
        return dealt
