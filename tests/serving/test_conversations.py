"""Matching of returned messages to recorded turns, and tokenizing of new ones."""

from __future__ import annotations

from typing import Any

import pytest
from conversation_fakes import SYSTEM, Forgetful, chat_template_renderer, completion, reply, user

from titan_rl.core.errors import RequestError
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.conversations.tree import ConversationTree, MessageNode, TurnNode


@pytest.fixture
def renderer() -> ChatTemplateRenderer:
    return chat_template_renderer()


@pytest.fixture
def tree(renderer: ChatTemplateRenderer) -> ConversationTree:
    return ConversationTree(renderer)


def call(arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def say(
    tree: ConversationTree,
    messages: list[Any],
    message: dict[str, Any],
    token_ids: tuple[int, ...] = (5, 6, 7),
    **more: Any,
) -> TurnNode:
    return tree.add(tree.prompt(messages, **more), completion(token_ids), message)


def test_only_new_messages_are_tokenized(tree: ConversationTree, renderer: ChatTemplateRenderer) -> None:
    opening = [SYSTEM, user("Bo Al")]
    first = say(tree, opening, reply("Al Bo"))
    assert first.prompt_token_ids == renderer.render_ids(opening, add_generation_prompt=True)

    prompt = tree.prompt([*opening, reply("Al Bo"), user("Cy")])
    assert prompt.parent is first
    bridged = renderer.bridge_to_next_turn(first.prompt_token_ids, first.completion.token_ids, [user("Cy")])
    assert prompt.token_ids == bridged.token_ids == [*first.token_ids, *prompt.added_token_ids]

    second = say(tree, [*opening, reply("Al Bo"), user("Cy")], reply("Al Bo Cy"), (8, 9))
    third = tree.prompt([*opening, reply("Al Bo"), user("Cy"), reply("Al Bo Cy"), user("Di"), user("Ed")])
    assert third.parent is second
    assert third.token_ids[: len(second.token_ids)] == second.token_ids == [*prompt.token_ids, 8, 9]
    assert first.children == [second]


def test_prompt_does_not_change_the_tree(tree: ConversationTree) -> None:
    first = say(tree, [user("a")], reply("b"))
    follow = [user("a"), reply("b"), user("c")]
    assert tree.prompt(follow).token_ids == tree.prompt(follow).token_ids
    assert tree.turns == [first]
    assert not first.children
    assert tree.prompt([*follow, reply("d"), user("e")]).parent is first


def test_edit_branches_from_the_last_turn_before_it(tree: ConversationTree, renderer: ChatTemplateRenderer) -> None:
    one = [user("a"), reply("b"), user("c")]
    first = say(tree, one[:1], reply("b"))
    second = say(tree, one, reply("d"))
    edited = [*one, reply("not d"), user("e")]
    branch = tree.prompt(edited)
    assert branch.parent is first
    bridged = renderer.bridge_to_next_turn(first.prompt_token_ids, first.completion.token_ids, edited[2:])
    assert branch.token_ids == bridged.token_ids
    third = say(tree, edited, reply("f"))
    assert first.children == [second, third]
    assert tree.prompt([*edited, reply("f"), user("g")]).parent is third
    assert tree.prompt([*one, reply("d"), user("g")]).parent is second


@pytest.mark.parametrize(
    "messages",
    [[user("A"), reply("b"), user("c")], [SYSTEM, user("a"), reply("b"), user("c")], [user("summary of a and b")]],
    ids=["edited from the start", "another system prompt", "compacted"],
)
def test_different_opening_starts_a_new_conversation(
    tree: ConversationTree, renderer: ChatTemplateRenderer, messages: list[Any]
) -> None:
    say(tree, [user("a")], reply("b"))
    prompt = tree.prompt(messages)
    assert prompt.parent is None
    assert prompt.token_ids == prompt.added_token_ids == renderer.render_ids(messages, add_generation_prompt=True)


def test_sibling_turns_share_a_prompt_and_continue_separately(tree: ConversationTree) -> None:
    prompt = tree.prompt([user("a")])
    turns = [tree.add(prompt, completion([5, n]), reply(f"b{n}")) for n in range(3)]
    for n, turn in enumerate(turns):
        assert tree.prompt([user("a"), reply(f"b{n}"), user("c")]).parent is turn


def test_ambiguous_history_continues_the_least_continued_then_latest_turn(
    tree: ConversationTree,
) -> None:
    one, other = say(tree, [user("a")], reply("b"), (5,)), say(tree, [user("a")], reply("b"), (6,))
    follow = [user("a"), reply("b"), user("c")]
    assert [say(tree, follow, reply(text)).parent for text in "xyz"] == [other, one, other]


def test_tools_identify_the_conversation(tree: ConversationTree) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "x": 1}}}
    same = {"function": {"parameters": {"x": 1, "type": "object"}, "name": "look"}, "type": "function", "strict": None}
    turn = say(tree, [user("a")], reply("b"), tools=[look])
    follow = [user("a"), reply("b"), user("c")]
    assert tree.prompt(follow, tools=[same]).parent is turn
    assert tree.prompt(follow).parent is None
    assert tree.prompt(follow, tools=[look, look]).parent is None


@pytest.mark.parametrize(
    ("given", "comes_back"),
    [
        (reply(" b\n"), reply("b")),
        (reply("b"), reply("b", tool_calls=None, refusal=None, annotations=[], audio=None, name="helper")),
        (reply("b"), reply([{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}])),
        (reply("bb"), reply([{"type": "output_text", "text": "b"}, {"type": "output_text", "text": "b"}])),
        (reply("", tool_calls=[call('{"x": 1, "y": [2.0]}')]), reply(None, tool_calls=[call('{"y":[2],"x":1.0}')])),
        (
            reply("", tool_calls=[call('{"x": 12345678901234567890}')]),
            reply("", tool_calls=[call('{"x": 12345678901234567000}')]),
        ),
        (reply("", tool_calls=[call({"x": 1})]), reply("\n", tool_calls=[{**call('{ "x": 1 }'), "index": 0}])),
        (reply("", tool_calls=[call("{broken")]), reply("", tool_calls=[call("{broken")])),
        (reply("b", reasoning_content="hm"), reply("b")),
        (reply("b", reasoning_content="hm"), reply("b", reasoning=" hm ")),
    ],
)
def test_client_normalization_of_a_reply_still_matches(
    tree: ConversationTree, given: dict[str, Any], comes_back: dict[str, Any]
) -> None:
    turn = say(tree, [user("a")], given)
    assert tree.prompt([user("a"), comes_back, user("c")]).parent is turn


@pytest.mark.parametrize(
    ("given", "comes_back"),
    [
        (reply("b"), reply("B")),
        (reply("b"), user("b")),
        (reply("b c"), reply("b  c")),
        (reply("", tool_calls=[call('{"x": 1}')]), reply("")),
        (reply("", tool_calls=[call('{"x": 1}')]), reply("", tool_calls=[call('{"x": 2}')])),
        (reply("", tool_calls=[call('{"x": ""}')]), reply("", tool_calls=[call("{}")])),
        (reply("", tool_calls=[call('{"x": 1}')]), reply("", tool_calls=[call('{"x": 1}', "c2")])),
        (reply("b", reasoning_content="hm"), reply("b", reasoning_content="ah")),
        (reply("b"), reply("b", reasoning_content="ah")),
    ],
)
def test_changed_reply_does_not_match(
    tree: ConversationTree, given: dict[str, Any], comes_back: dict[str, Any]
) -> None:
    say(tree, [user("a")], given)
    comes_back = {**comes_back, "content": comes_back["content"] or ""}
    assert tree.prompt([user("a"), comes_back, user("c")]).parent is None


def test_replies_differing_in_reasoning_match_by_reasoning_or_later_turns(tree: ConversationTree) -> None:
    ah, hm = (say(tree, [user("a")], reply("b", reasoning_content=thought)) for thought in ("ah", "hm"))
    assert tree.prompt([user("a"), reply("b", reasoning_content="ah"), user("c")]).parent is ah
    after_ah = say(tree, [user("a"), reply("b", reasoning_content="ah"), user("c")], reply("d"))
    assert tree.prompt([user("a"), reply("b"), user("c"), reply("d"), user("e")]).parent is after_ah
    assert tree.prompt([user("a"), reply("b"), user("other")]).parent is hm


def test_whitespace_of_user_messages_is_significant(tree: ConversationTree) -> None:
    say(tree, [user("a")], reply("b"))
    assert tree.prompt([user("a "), reply("b"), user("c")]).parent is None


def test_history_ending_with_a_reply_continues_its_turn(tree: ConversationTree) -> None:
    turn = say(tree, [user("a")], reply("b"))
    prompt = tree.prompt([user("a"), reply("b")])
    assert prompt.parent is turn
    assert prompt.added_token_ids


def test_unrenderable_messages_raise_request_error(tree: ConversationTree) -> None:
    with pytest.raises(RequestError, match="at least one"):
        tree.prompt([])
    with pytest.raises(RequestError, match="cannot be rendered"):
        tree.prompt([{"role": "user"}])
    assert tree.prompt([user("\ud83d")]).token_ids


def test_matching_a_history_compares_each_message_once(tree: ConversationTree, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[Any] = [SYSTEM]
    for n in range(100):
        messages.append(user(f"q{n}"))
        say(tree, messages, reply(f"a{n}"))
        messages.append(reply(f"a{n}"))
    looks = 0
    same = MessageNode.same

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return same(*arguments)

    monkeypatch.setattr("titan_rl.serving.conversations.tree.MessageNode.same", counted)
    assert tree.prompt([*messages, user("last")]).parent is tree.turns[-1]
    assert looks == len(messages) + 1


def test_renders_from_scratch_when_the_renderer_cannot_extend_a_turn() -> None:
    tree = ConversationTree(Forgetful())
    first = say(tree, [user("a")], reply("b", reasoning_content="r"))
    tool = {"role": "tool", "content": "t"}
    assert tree.prompt([user("a"), reply("b"), tool]).parent is first
    follow = [user("a"), reply("b"), user("c")]
    prompt = tree.prompt(follow)
    assert prompt.parent is None
    assert prompt.token_ids == Forgetful().render_ids(follow, add_generation_prompt=True)
    second = say(tree, follow, reply("d", reasoning_content="r"))
    assert tree.prompt([*follow, reply("d"), tool]).parent is second
    assert tree.branches() == [[first], [second]]
    assert [message["content"] for message in tree.transcript()] == ["a", "b", "c", "d"]


def test_renderer_that_drops_sampled_tokens_does_not_extend_the_turn() -> None:
    class Cutting(Forgetful):
        def bridge_to_next_turn(self, previous_prompt_ids: Any, previous_completion_ids: Any, *rest: Any, **more: Any):
            return super().bridge_to_next_turn(previous_prompt_ids, previous_completion_ids[:-1], *rest, **more)

    tree = ConversationTree(Cutting())
    say(tree, [user("a")], reply("b"))
    assert tree.prompt([user("a"), reply("b"), {"role": "tool", "content": "t"}]).parent is None
