"""Streamed deltas of a reply, which add up to the whole reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from byte_model import byte_tokenizer, qwen3
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.core.arrays import logprob_array, token_array
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.conversations.reply import Delta, Reply, ReplyForm, ReplyReader
from titan_rl.serving.text import Text
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan

TOKENIZER = byte_tokenizer()
TEXT = Text(TOKENIZER)
RENDERERS = {"qwen3": qwen3(TOKENIZER), "template": ChatTemplateRenderer(TOKENIZER)}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
PROMPT = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)
PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "a", " b", "\n", "ü", "{", "stop", "st"]


def form(renderer: str, *, tools: bool = False, stops: Sequence[str] = (), one_call: bool = False) -> ReplyForm:
    return ReplyForm(RENDERERS[renderer], TEXT, PROMPT, TOOLS if tools else None, one_call, tuple(stops))


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def read(form: ReplyForm, token_ids: Sequence[int], sizes: Sequence[int] = (1,)) -> tuple[list[Delta], Reply]:
    reader, deltas, at, number = ReplyReader(form), [], 0, 0
    end: int | None = None
    while at < len(token_ids) and end is None:
        piece = list(token_ids[at : at + sizes[number % len(sizes)]])
        chunk = TokenChunk("r", token_array(piece), logprob_array([-1.0] * len(piece)), (VersionSpan(0, len(piece)),))
        delta, end = reader.take(chunk)
        deltas.append(delta)
        at, number = at + (len(piece) if end is None else end), number + 1
    kept = list(token_ids[:at])
    rest, reply = reader.end(Completion("r", kept, [-1.0] * at, FinishReason.STOP, (VersionSpan(0, at),)))
    return [*deltas, rest], reply


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[Any]]:
    calls = [call for delta in deltas for call in delta.tool_calls]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), calls


@settings(max_examples=examples(800), deadline=None)
@given(
    st.sampled_from(list(RENDERERS)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("stop",)]),
)
def test_joined_deltas_equal_the_message(
    renderer: str, said: str, sizes: list[int], tools: bool, one_call: bool, stops: tuple[str, ...]
) -> None:
    asked = form(renderer, tools=tools, one_call=one_call, stops=stops)
    deltas, reply = read(asked, [*tokens(said), *tokens("<|im_end|>")], sizes)
    assert joined(deltas) == (reply.reasoning, reply.content, reply.tool_calls)
    assert [token for delta in deltas for token in delta.token_ids] == list(reply.completion.token_ids)
    assert len(reply.tool_calls) <= 1 or not one_call


@pytest.mark.parametrize("renderer", RENDERERS)
def test_reasoning_and_content_are_streamed_incrementally(renderer: str) -> None:
    deltas, reply = read(form(renderer, tools=True), tokens("<think>\none two\n</think>\n\nthree four<|im_end|>"))
    assert (reply.reasoning, reply.content) == ("one two", "three four")
    assert sum(bool(delta.reasoning) for delta in deltas) > 3
    assert sum(bool(delta.content) for delta in deltas) > 3


def test_content_before_a_tool_call_is_streamed_incrementally() -> None:
    deltas, reply = read(form("qwen3", tools=True), tokens(f"I look there.{CALL}<|im_end|>"))
    assert reply.content == "I look there."
    assert [call["function"]["name"] for call in reply.tool_calls] == ["look"]
    assert "".join(delta.content for delta in deltas[:13]) == "I look there."


@pytest.mark.parametrize("sizes", [(1,), (5,), (1000,)])
def test_completion_ends_after_one_tool_call_when_not_parallel(sizes: tuple[int, ...]) -> None:
    said = tokens(f"So.\n{CALL}\n{CALL}<|im_end|>")
    _, reply = read(form("qwen3", tools=True, one_call=True), said, sizes)
    assert len(reply.tool_calls) == 1
    assert TOKENIZER.decode(reply.completion.token_ids) == f"So.\n{CALL}"
    assert reply.finish_reason is FinishReason.TOOL_CALLS


def test_reply_reports_the_stop_string() -> None:
    _, reply = read(form("template", stops=["!", "stop"]), tokens("1, 2, stop, 3!"))
    assert (reply.content, reply.stop) == ("1, 2, ", "stop")


def test_stop_string_in_the_final_flush_is_reported() -> None:
    broken = tokens("aü")[:-1]  # an incomplete character is emitted only at the end
    cut = Completion("r", broken, [-1.0] * len(broken), FinishReason.LENGTH, (VersionSpan(0, len(broken)),))
    for streams in (True, False):
        reader = ReplyReader(form("template", stops=["\ufffd"]))
        if streams:
            assert reader.take(TokenChunk("r", broken, cut.logprobs, cut.version_spans))[1] is None
        reply = reader.end(cut)[1] if streams else reader.read(cut)
        assert (reply.content, reply.stop, reply.finish_reason) == ("a", "\ufffd", FinishReason.STOP)
