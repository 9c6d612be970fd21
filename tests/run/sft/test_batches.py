"""Assignment of demonstrations to training steps."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.run.sft.train import batches, hold_out


@given(count=st.integers(0, 300), most=st.integers(0, 100), seed=st.integers(0, 3))
def test_hold_out_splits_demonstrations_and_limits_held_out(count: int, most: int, seed: int) -> None:
    learned, held_out = hold_out(count, most, seed)
    assert sorted(learned + held_out) == list(range(count))
    assert learned == sorted(learned)
    assert len(held_out) == min(most, count // 10)
    assert (learned, held_out) == hold_out(count, most, seed)


SIZES = st.integers(1, 20)


@given(count=st.integers(1, 60), batch_size=SIZES, epochs=st.integers(1, 4), shuffle=st.booleans())
def test_every_epoch_contains_each_demonstration_once(count: int, batch_size: int, epochs: int, shuffle: bool) -> None:
    steps = batches(range(count), batch_size=batch_size, steps=None, epochs=epochs, shuffle=shuffle, seed=0)
    stream = [item for step in steps for item in step]
    for epoch in range(epochs):
        order = stream[epoch * count : (epoch + 1) * count]
        assert sorted(order) == list(range(count))
        assert shuffle or order == list(range(count))
    assert len(stream) == epochs * count
    assert {len(step) for step in steps[:-1]} <= {batch_size}


@given(count=st.integers(1, 30), batch_size=SIZES, steps=st.integers(1, 20))
def test_step_count_repeats_the_data_as_needed(count: int, batch_size: int, steps: int) -> None:
    made = batches(range(count), batch_size=batch_size, steps=steps, epochs=1, shuffle=True, seed=3)
    assert [len(step) for step in made] == [batch_size] * steps
    taken = Counter(item for step in made for item in step)
    assert max(taken.values()) - min(taken[item] for item in range(count)) <= 1


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), most=st.integers(1, 100))
def test_token_batches_are_full_or_hold_one_demonstration(lengths: list[int], most: int) -> None:
    count = len(lengths)
    made = batches(
        range(count), batch_size=1, steps=None, epochs=1, shuffle=False, seed=0, lengths=lengths, batch_tokens=most
    )
    assert [item for step in made for item in step] == list(range(count))
    tokens = [sum(lengths[item] for item in step) for step in made]
    assert all(total <= most or len(step) == 1 for total, step in zip(tokens, made, strict=True))
    assert all(total + lengths[after[0]] > most for total, after in zip(tokens, made[1:], strict=False))
