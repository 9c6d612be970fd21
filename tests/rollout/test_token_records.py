"""Token records of transcripts: the text of each token, and the tokens that are trained on."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, SamplingParams, Turn, VersionSpan
from titan_rl.rollout.group.transcript import TokenRecords, transcript
from titan_rl.rollout.renderer.tokenizer import TokenTexts
from titan_rl.training.data.sample_builder import build_samples


def decode(token_ids: Any) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


TEXTS = TokenTexts(decode)


@given(st.text())
def test_joined_pieces_equal_the_text(text: str) -> None:
    tokens = list(text.encode("utf-8", "surrogatepass"))
    pieces = TEXTS.of(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == decode(tokens)


def test_character_belongs_to_its_last_token() -> None:
    assert TEXTS.of(list("aé🙂".encode())) == ["a", "", "é", "", "", "", "🙂"]


def rollout_of(*turns: Turn, advantage: float | None = 0.5, status: RolloutStatus = RolloutStatus.COMPLETED) -> Rollout:
    return Rollout("g/0", "g", 0, sample=None, status=status, turns=list(turns), advantage=advantage)


def turn(prompt: list[int], answer: list[int], *spans: VersionSpan, own: list[float] | None = None) -> Turn:
    completion = Completion("r", answer, [-0.123456] * len(answer), FinishReason.STOP, spans)
    return Turn(prompt, completion, token_advantages=own, sampling=SamplingParams(max_tokens=8))


def test_prompt_is_recorded_from_its_first_new_token() -> None:
    first = turn([72, 105], [33], VersionSpan(0, 1))
    grown = turn([72, 105, 33, 63], [46], VersionSpan(0, 1))
    edited = turn([72, 111], [46], VersionSpan(0, 1))
    records = TokenRecords(TEXTS).of(rollout_of(first, grown, edited), trained_at=0)
    assert [record["shared"] for record in records] == [0, 3, 1]
    assert [record["prompt"]["text"] for record in records] == [["H", "i"], ["?"], ["o"]]
    assert records[0]["completion"] == {"ids": [33], "text": ["!"], "logprobs": [-0.1235]}


@pytest.mark.parametrize("status", RolloutStatus)
@pytest.mark.parametrize("advantage", [None, -1.0])
@pytest.mark.parametrize("max_age", [None, 0, 1])
def test_trained_tokens_match_the_training_samples(
    status: RolloutStatus, advantage: float | None, max_age: int | None
) -> None:
    rollout = rollout_of(
        turn([1], [2, 3, 4], VersionSpan(3, 2), VersionSpan(4, 1), own=[0.0, 0.25, 0.5]),
        turn([1, 2, 3, 4, 5], [6], VersionSpan(4, 1)),
        advantage=advantage,
        status=status,
    )
    records = TokenRecords(None, max_age).of(rollout, trained_at=4)
    recorded: list[float] = []
    for record, length in zip(records, (3, 1), strict=True):
        trained, advantages = record["trained"], record["advantages"]
        each = trained if isinstance(trained, list) else [trained] * length
        values = advantages if isinstance(advantages, list) else [advantages] * length
        recorded += [value for value, is_trained in zip(values, each, strict=True) if is_trained]
    samples = build_samples(RolloutGroup("g", None, [rollout]), oldest_version=0 if max_age is None else 4 - max_age)
    given = [
        value for sample in samples for value, mask in zip(sample.advantages, sample.loss_mask, strict=True) if mask
    ]
    assert recorded == given


def test_validation_is_untrained_and_undecodable_tokens_have_no_text() -> None:
    rollout = rollout_of(turn([1, 300], [2], VersionSpan(0, 1)))
    (record,) = TokenRecords(TEXTS).of(rollout, trained_at=None)
    assert record["trained"] is False
    assert record["prompt"] == {"ids": [1, 300], "text": None}
    assert record["completion"]["text"] == ["\x02"]


def test_transcript_includes_token_records_when_given() -> None:
    rollout = rollout_of(turn([72], [33], VersionSpan(0, 1)))
    (with_tokens,) = transcript(rollout, TokenRecords(TEXTS).of(rollout, 0))["turns"]
    (without,) = transcript(rollout)["turns"]
    tokens = with_tokens.pop("tokens")
    assert with_tokens == without
    assert tokens["completion"]["text"] == ["!"]
