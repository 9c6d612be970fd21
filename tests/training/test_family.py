"""Families of samples: a common prefix is stored once, is untrained and predicts no trained token."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.training.data.packing import SHORTEST, Family, find_families
from titan_rl.training.data.sample import TrainingSample


def sample(name: str, prompt: list[int], answer: list[int], group: str = "g") -> TrainingSample:
    ids, mask = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
    zeros = [0.0] * len(ids)
    return TrainingSample(group, name, ids, mask, zeros, zeros, [0] * len(ids), 1.0)


PROMPT = list(range(20))


def test_siblings_share_all_but_the_last_prompt_token() -> None:
    (family,) = find_families([sample("a", PROMPT, [1, 2]), sample("b", PROMPT, [3])], row_tokens=100)
    assert family.prefix_length == 19
    assert family.num_tokens == 19 + 3 + 2


def test_different_groups_or_prompts_are_not_joined() -> None:
    samples = [sample("a", PROMPT, [1]), sample("b", PROMPT, [2], group="other"), sample("c", [9, *PROMPT], [3])]
    assert [family.prefix_length for family in find_families(samples, row_tokens=100)] == [0, 0, 0]


def test_family_longer_than_a_row_is_split_between_samples() -> None:
    samples = [sample(str(index), PROMPT, [1] * 9) for index in range(4)] + [sample("long", PROMPT, [1] * 90)]
    families = find_families(samples, row_tokens=40)
    assert [(family.prefix_length, len(family.samples)) for family in families] == [(0, 1), (19, 2), (19, 2)]
    assert max(family.num_tokens for family in families[1:]) <= 40


tokens = st.lists(st.integers(0, 1), max_size=24)


@given(st.lists(st.tuples(st.integers(0, 2), tokens, tokens), max_size=12), st.integers(4, 60))
def test_shared_prefix_is_identical_and_predicts_no_trained_token(
    drawn: list[tuple[int, list[int], list[int]]], row_tokens: int
) -> None:
    samples = [
        sample(str(index), prompt, answer, group=f"g{group}")
        for index, (group, prompt, answer) in enumerate(drawn)
        if prompt or answer
    ]
    families = find_families(samples, row_tokens)
    assert Counter(s.rollout_id for family in families for s in family.samples) == Counter(
        s.rollout_id for s in samples
    )
    for family in families:
        check(family, row_tokens)


def check(family: Family, row_tokens: int) -> None:
    length = family.prefix_length
    if len(family.samples) == 1:
        assert length == 0
        return
    assert length >= SHORTEST
    assert family.num_tokens <= row_tokens
    assert len({s.group_id for s in family.samples}) == 1
    assert len({tuple(s.token_ids[:length]) for s in family.samples}) == 1
    for s in family.samples:
        assert not any(s.loss_mask[: length + 1])
