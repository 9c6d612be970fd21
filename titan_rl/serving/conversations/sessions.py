"""Which conversation a request belongs to, and which session of the router."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from hashlib import blake2b

from cachetools import LRUCache

from titan_rl.rollout.renderer.types import Renderer, Tools
from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.identity import identity_of, identity_of_tools
from titan_rl.serving.conversations.tree import ConversationTree, Prompt, TurnNode
from titan_rl.types import Completion


class Conversation:
    """A tree of turns, and the session in which each of them was sampled."""

    def __init__(self, renderer: Renderer, session_id: str | None) -> None:
        self.tree = ConversationTree(renderer)
        self._session_id = session_id
        self._sessions: dict[TurnNode, str] = {}

    def session_of(self, prompt: Prompt) -> str:
        """That of the turn it goes on from, whose replica has the KV cache. What begins anew may go to any replica, so
        it has a session of its own, unless the client names one."""
        known = None if prompt.parent is None else self._sessions.get(prompt.parent)
        return self._session_id or known or uuid.uuid4().hex

    def add(self, prompt: Prompt, completion: Completion, message: Message, session_id: str) -> None:
        self._sessions[self.tree.add(prompt, completion, message)] = session_id


class Conversations:
    """The conversations of all clients, by the session they name, else by how they begin.

    The least recently used are forgotten, and those with too many turns begin anew: what comes back of them is
    tokenized again.

    Args:
        most: conversations that are remembered.
        most_turns: of each.
    """

    def __init__(self, renderer: Renderer, *, most: int, most_turns: int) -> None:
        self._renderer = renderer
        self._most_turns = most_turns
        self._conversations: LRUCache[bytes, Conversation] = LRUCache(most)

    def of(self, session_id: str | None, messages: Sequence[Message], tools: Tools | None) -> Conversation:
        key = _opening(messages, tools) if session_id is None else b"session:" + session_id.encode()
        found = self._conversations.get(key)
        if found is None or len(found.tree.turns) >= self._most_turns:
            found = self._conversations[key] = Conversation(self._renderer, session_id)
        return found


def _opening(messages: Sequence[Message], tools: Tools | None) -> bytes:
    """Of what stays as it is while a conversation goes on: its tools, and its messages up to the first of the user."""
    digest = blake2b(identity_of_tools(tools), digest_size=16)
    for message in messages:
        digest.update(identity_of(message).digest)
        if message.get("role") == "user":
            break
    return digest.digest()
