"""Conversations of clients: isolation, eviction, and memory limits."""

from __future__ import annotations

from typing import Any

from conversation_fakes import chat_template_renderer, completion, reply, user

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Client, Conversations
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.types import SamplingParams


def conversations(**limits: Any) -> Conversations:
    small = {"num_conversations": 10, "conversation_turns": 10, "conversation_bytes": 1 << 20}
    return Conversations(chat_template_renderer(), ServerLimits(**{**small, **limits}))


def say(client: Client, messages: list[Message], text: str, session_id: str | None = None) -> list[Message]:
    """Record a reply, and return the continued conversation."""
    prompt = client.prompt(messages, None, session_id)
    prompt.request(SamplingParams(max_tokens=4), 1, "r")
    prompt.record(0, completion(), reply(text))
    return [*messages, reply(text), user("more")]


def keeps_tokens(client: Client, messages: list[Message], session_id: str | None = None) -> bool:
    """Return whether the prompt contains the sampled tokens, instead of tokens of their text."""
    ids = list(client.prompt(messages, None, session_id).prompt_token_ids)
    return any(ids[at : at + 3] == [5, 6, 7] for at in range(len(ids)))


def test_conversations_are_private_to_their_client() -> None:
    known = conversations()
    one, other = (Client(name, known) for name in (b"one", b"other"))
    for session_id in (None, "mine"):
        messages = say(one, [user("b a")], "a b", session_id)
        assert keeps_tokens(one, messages, session_id)
        assert not keeps_tokens(other, messages, session_id)
    assert len(known) == 2


def test_failed_requests_leave_no_state() -> None:
    known = conversations()
    client = Client(b"one", known)
    for number in range(20):
        client.prompt([user(f"never answered {number}")], None, None)
    assert len(known) == 0
    tree = known.of(b"one", None, [user("a")], None).tree
    for number in range(20):
        tree.prompt([user("a")], [{"type": "function", "function": {"name": f"tool{number}"}}])
    assert not tree._roots  # pyright: ignore[reportPrivateUsage]


def test_concurrent_identical_openings_share_one_conversation() -> None:
    known = conversations()
    client = Client(b"one", known)
    prompts = [client.prompt([user("b a")], None, None) for _ in range(3)]
    for number, prompt in enumerate(prompts):
        prompt.record(0, completion(request_id=f"r{number}"), reply(f"a b {number}"))
    assert all(keeps_tokens(client, [user("b a"), reply(f"a b {number}"), user("more")]) for number in range(3))


def test_conversation_memory_is_bounded_in_bytes() -> None:
    known = conversations(conversation_bytes=100_000)
    client = Client(b"one", known)
    long = [say(client, [user(f"{number} " + "x " * 500)], "a") for number in range(9)]
    assert 0 < len(known) < 9
    assert keeps_tokens(client, long[-1])
    assert not keeps_tokens(client, long[0])
    say(client, [user("y " * 5_000)], "a")  # more than the limit
    assert len(known) == 0
    short = say(client, [user("b a")], "a b")
    assert keeps_tokens(client, short)


def test_conversation_exceeding_the_turn_limit_starts_over() -> None:
    known = conversations(conversation_turns=2)
    client = Client(b"one", known)
    messages: list[Message] = [user("b a")]
    for _ in range(2):
        messages = say(client, messages, "a b")
    assert not keeps_tokens(client, messages)
    assert keeps_tokens(client, say(client, messages, "a b c"))
