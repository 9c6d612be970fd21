"""Message threads: conversations that the server holds, so that a request brings the new messages alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from cachetools import LRUCache

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller
from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.protocols.anthropic.blocks import messages_from_blocks, system_of, tools_from_anthropic
from titan_rl.serving.protocols.anthropic.bodies import MessagesBody


@dataclass(frozen=True, slots=True)
class WholeConversation:
    """
    Args:
        messages: in the form of OpenAI's chat, as are the tools.
    """

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None


class Threads:
    """Conversations by the ID of their last reply. The least recently used are forgotten. Each belongs to its caller,
    and nobody else finds it.

    Any reply that is held may be continued, and more than once: a retry, or a branch. The client gets these error
    codes, which tell Anthropic's clients how to go on:

        thread_not_found             the reply is not held (any more): the whole history under a new thread
        thread_unsupported_request   another kind of thread: the whole history without one
        thread_fingerprint_mismatch  `system` or `tools` of a request that continues are not those of the thread
    """

    def __init__(self, most_bytes: int) -> None:
        self._held: LRUCache[tuple[bytes, str], bytes] = LRUCache(most_bytes, getsizeof=len)
        self._lock = threading.Lock()  # long requests are read in a thread

    def conversation(self, caller: Caller, body: MessagesBody) -> WholeConversation:
        """The whole conversation of a request, with what its thread holds.

        Raises:
            ApiError: 404, the thread is not held; 400, it cannot be continued like this, or a message is wrong.
        """
        asked, messages = body.thread, messages_from_blocks(body)
        tools = tools_from_anthropic(body.tools)
        kind = None if asked is None else asked.get("type")
        if asked is None or kind == "create":
            return WholeConversation(messages, tools)
        if kind != "continue":
            message = "thread.type must be 'create' or 'continue'; send the whole conversation without a thread"
            raise ApiError(400, message, param="thread.type", code="thread_unsupported_request")
        held = self._find(caller, asked.get("previous_message_id"))
        if body.tools is not None and tools != held.tools:
            raise _differs("tools")
        has_system = bool(system_of(body.system))
        if has_system and messages[0] != held.messages[0]:
            raise _differs("system")
        return WholeConversation([*held.messages, *messages[has_system:]], held.tools)

    def hold(self, caller: Caller, message_id: str, conversation: WholeConversation, reply: Message) -> None:
        """Hold a conversation with its reply, so that it can be continued."""
        held = msgspec.json.encode({"messages": [*conversation.messages, reply], "tools": conversation.tools})
        with suppress(ValueError), self._lock:  # one that is larger than all may be
            self._held[caller.name, message_id] = held

    def _find(self, caller: Caller, message_id: Any) -> WholeConversation:
        if not isinstance(message_id, str):
            raise ApiError(400, "thread.previous_message_id must be a string", param="thread.previous_message_id")
        with self._lock:
            held = self._held.get((caller.name, message_id))
        if held is None:
            message = "thread.previous_message_id is of no message that is held here; send the whole conversation"
            raise ApiError(404, message, param="thread.previous_message_id", code="thread_not_found")
        return WholeConversation(**msgspec.json.decode(held))


def _differs(field: str) -> ApiError:
    message = f"{field} is not what the thread was created with; leave it out, or create a new thread"
    return ApiError(400, message, param=field, code="thread_fingerprint_mismatch")
