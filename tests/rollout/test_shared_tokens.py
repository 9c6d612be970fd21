"""Turns with shared storage equal turns that store their whole contexts, in memory, when pickled, and on disk."""

import pickle
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, SamplingParams, Turn, VersionSpan, build_samples
from titan_rl.rollout.shared_tokens import num_shared, share_tokens
from titan_rl.run.journal.records import GroupRecord, decode, encode, group_record
from titan_rl.scheduling.task_mix import Assigned
from titan_rl.training.data.sample_builder import count_branches

TOKENS = st.lists(st.integers(0, 3), max_size=4)


def turn(number: int, prompt: list[int], said: list[int]) -> Turn:
    logprobs = [-0.25 * (number + 1)] * len(said)
    completion = Completion(f"g/0/{number}", said, logprobs, FinishReason.STOP, [VersionSpan(number, len(said))])
    return Turn(prompt, completion, sampling=SamplingParams(max_tokens=8))


@st.composite
def histories(draw: st.DrawFn) -> list[Turn]:
    """Turns that continue any earlier turn, a part of it, or nothing."""
    contexts: list[list[int]] = [[]]
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 8))):
        before = draw(st.sampled_from(contexts))
        kept = before[: draw(st.integers(0, len(before)))] if draw(st.booleans()) else before
        prompt, said = [*kept, *draw(TOKENS)], draw(TOKENS)
        turns.append(turn(number, prompt, said))
        contexts.append(prompt + said)
    return turns


@given(histories())
def test_shared_turns_equal_the_original_turns(turns: list[Turn]) -> None:
    whole = Rollout("g/0", "g", 0, None, turns=turns, advantage=1.0)
    kept = replace(whole, turns=share_tokens(turns))
    record = decode(encode(group_record(Assigned(0, "task", 0), RolloutGroup("g", None, [kept]))))
    assert isinstance(record, GroupRecord)
    for other in (kept, pickle.loads(pickle.dumps(kept)), record.rollouts[0]):
        assert [list(turn.prompt_token_ids) for turn in other.turns] == [turn.prompt_token_ids for turn in turns]
        assert [turn.completion.token_ids for turn in other.turns] == [turn.completion.token_ids for turn in turns]
        assert other == whole
        assert count_branches(other) == count_branches(whole)
        assert build_samples(RolloutGroup("g", None, [other])) == build_samples(RolloutGroup("g", None, [whole]))
        pairs = zip([None, *other.turns], other.turns, [None, *turns], turns, strict=False)
        assert all(num_shared(a, b) == num_shared(c, d) for a, b, c, d in pairs)


def agent_in_two_conversations(num_turns: int, added: int) -> tuple[list[Turn], int]:
    """Turns of two conversations in alternation, and the number of tokens that they add."""
    contexts: list[list[int]] = [[1], [2]]
    turns: list[Turn] = []
    for number in range(num_turns):
        context = contexts[number % 2]
        context += [number] * added
        turns.append(turn(number, list(context), [9] * added))
        context += [9] * added
    return turns, 2 + 2 * added * num_turns


def test_shared_turns_store_only_the_tokens_they_add() -> None:
    turns, num_tokens = agent_in_two_conversations(60, 50)
    kept = share_tokens(turns)
    assert kept == turns
    lines = {id(window[0]): window[0] for turn in kept if (window := turn.completion.token_ids.window())}  # pyright: ignore
    assert sum(map(len, lines.values())) == num_tokens
    rollout = Rollout("g/0", "g", 0, None, turns=kept)
    of_turns = 300 * len(turns)  # names, sampling
    assert len(pickle.dumps(rollout)) < 12 * num_tokens + of_turns
    assert (
        len(encode(group_record(Assigned(0, "task", 0), RolloutGroup("g", None, [rollout]))))
        < 12 * num_tokens + of_turns
    )
