"""Tokenized demonstrations equal those of a rollout with the same conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from byte_tokenizer import byte_tokenizer

from titan_rl import (
    ChatTemplateRenderer,
    Completion,
    Demonstration,
    FinishReason,
    Message,
    MessageObservation,
    MessageStep,
    MessageTokenEnv,
    Reward,
    Rollout,
    Rollouter,
    RolloutStatus,
    Rubric,
    SamplingParams,
    VersionSpan,
    build_samples,
)
from titan_rl.core.errors import DataError
from titan_rl.training.data.sft_tokens import encode

TOKENIZER: Any = byte_tokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Script:
    """An environment that asks the questions in turn."""

    def __init__(self, questions: Sequence[str]) -> None:
        self._questions = list(questions)

    async def reset(self) -> MessageObservation:
        return MessageObservation([user(self._questions.pop(0))])

    async def step(self, message: Message) -> MessageStep:
        if not self._questions:
            return MessageStep(status=RolloutStatus.COMPLETED)
        return MessageStep([user(self._questions.pop(0))])

    async def close(self) -> None: ...


def len_of(rollout: Rollout) -> float:
    return float(len(rollout.turns))


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)


@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
async def test_demonstration_tokens_match_an_equivalent_rollout(turns: list[tuple[str, str]]) -> None:
    answers = [answer for _, answer in turns]
    left = list(answers)

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        ids = TOKENIZER.encode(left.pop(0) + "<|im_end|>", add_special_tokens=False)
        return Completion(request_id, ids, [-1.0] * len(ids), FinishReason.STOP, [VersionSpan(0, len(ids))])

    rollouter = Rollouter(
        lambda sample: MessageTokenEnv(Script(sample), RENDERER), Rubric([Reward(len_of)]), max_context=10_000
    )
    sampling = SamplingParams(max_tokens=1000)
    questions = [question for question, _ in turns]
    group = await rollouter.run_group(generate, questions, group_id="g", group_size=1, sampling=sampling)
    group.rollouts[0].advantage = 1.0
    (sample,) = build_samples(group)
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    found = encode(RENDERER, Demonstration(messages))
    assert list(found.token_ids) == list(sample.token_ids)
    assert list(found.loss_mask) == list(sample.loss_mask)


def learned(demonstration: Demonstration, renderer: Any = RENDERER) -> str:
    tokens = encode(renderer, demonstration)
    return TOKENIZER.decode([t for t, learn in zip(tokens.token_ids, tokens.loss_mask, strict=True) if learn])


def test_assistant_text_and_end_token_are_trained() -> None:
    turns = [{"role": "system", "content": "Add."}, user("2 + 3?"), assistant("5"), user("4 + 4?"), assistant("8")]
    assert learned(Demonstration(turns)) == "5<|im_end|>8<|im_end|>"
    assert learned(Demonstration([*turns, user("Thanks.")])) == "5<|im_end|>8<|im_end|>"


def test_tool_calls_are_trained_in_the_model_format() -> None:
    qwen3 = pytest.importorskip("renderers.qwen3").Qwen3Renderer(TOKENIZER)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    turns = [user("2 + 3?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "5"}, assistant("It is 5.")]
    demonstration = Demonstration(turns, tools)
    assert learned(demonstration, qwen3).replace("<think>\n\n</think>\n\n", "") == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>It is 5.<|im_end|>'
    )
    shown = TOKENIZER.decode(encode(qwen3, demonstration).token_ids)
    assert '"name": "add", "parameters"' in shown
    assert "<tool_response>\n5\n</tool_response>" in shown


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([user("a")], "it has no assistant message"),
        ([assistant("a")], "begins with the assistant"),
        ([user("a"), assistant("b"), assistant("c")], r"messages\[1\] and \[2\] are both from the assistant"),
        ([user("a"), assistant("b<|im_end|>c")], r"messages\[1\] contains a stop token in its text"),
        ([user("a"), {"role": "assistant"}], r"messages\[1\] cannot be rendered"),
        ([{"role": "user"}, assistant("b")], r"before messages\[1\] cannot be rendered"),
    ],
)
def test_rejects_conversations_that_no_rollout_can_produce(messages: list[Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        encode(RENDERER, Demonstration(messages))


def test_rejects_a_renderer_that_drops_reasoning() -> None:
    qwen3 = pytest.importorskip("renderers.qwen3").Qwen3Renderer(TOKENIZER)
    turns = [user("a"), {**assistant("b"), "reasoning_content": "Hm."}, user("c"), assistant("d")]
    with pytest.raises(DataError, match="without changing earlier tokens"):
        encode(qwen3, Demonstration(turns))


def test_answer_with_weight_zero_is_context_and_not_trained() -> None:
    chat = [user("2 + 2?"), assistant("5"), user("No."), assistant("4")]
    whole = encode(RENDERER, Demonstration(chat))
    part = encode(RENDERER, Demonstration([chat[0], {**chat[1], "weight": 0}, *chat[2:]]))
    assert list(part.token_ids) == list(whole.token_ids)
    learned = [token for token, is_learned in zip(part.token_ids, part.loss_mask, strict=True) if is_learned]
    assert TOKENIZER.decode(learned[:-1]) == "4"
