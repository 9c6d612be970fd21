"""Callers of the server, and the conversations that are remembered for them."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Protocol

from starlette.requests import Request

from titan_rl.core.errors import RequestError
from titan_rl.rollout.renderer.types import Renderer, Tools
from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.identity import identity_of, identity_of_tools
from titan_rl.serving.conversations.tree import USUAL, ConversationTree, Prompt, Style, TurnNode
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.policy import CompletionRequest
from titan_rl.types import Completion, SamplingParams


class Conversation:
    """Tree of turns, with the session in which each turn was sampled.

    Args:
        key: Key by which it is found.
    """

    def __init__(self, key: bytes, renderer: Renderer, session_id: str | None) -> None:
        self.key = key
        self.tree = ConversationTree(renderer)
        self._session_id = session_id
        self._sessions: dict[TurnNode, str] = {}

    def session_of(self, prompt: Prompt) -> str:
        """Return the session of the turn that a prompt extends, because its replica has the KV cache. A new
        conversation may go to any replica, so it gets a new session, unless the client names one."""
        known = None if prompt.parent is None else self._sessions.get(prompt.parent)
        return self._session_id or known or uuid.uuid4().hex

    def add(self, prompt: Prompt, completion: Completion, message: Message, session_id: str) -> None:
        self._sessions[self.tree.add(prompt, completion, message)] = session_id


class Conversations:
    """Conversations of all clients. Each client has its own, found by the session that it names or else by their
    beginning.

    The least recently used conversations are evicted. A conversation with too many turns starts over, which tokenizes
    its history again.

    Args:
        limits: Limits of the server, of which `num_conversations`, `conversation_turns` and `conversation_bytes` apply.
    """

    def __init__(self, renderer: Renderer, limits: ServerLimits) -> None:
        self._renderer = renderer
        self._limits = limits
        self._found: OrderedDict[bytes, Conversation] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def of(
        self, client: bytes, session_id: str | None, messages: Sequence[Message], tools: Tools | None
    ) -> Conversation:
        """Return the conversation that these messages continue, or a new one, which is remembered once it has a turn.

        Args:
            client: Owner of the conversation. Requests of other clients do not find it.
        """
        how = (b"opening", _opening(messages, tools)) if session_id is None else (b"session", session_id.encode())
        key = blake2b(b"\0".join((client, *how)), digest_size=16).digest()
        found = self._found.get(key)
        if found is None or len(found.tree.turns) >= self._limits.conversation_turns:
            return Conversation(key, self._renderer, session_id)
        with suppress(KeyError):  # if this runs in a thread, it may have been evicted
            self._found.move_to_end(key)
        return found

    def add(
        self, conversation: Conversation, prompt: Prompt, completion: Completion, message: Message, session_id: str
    ) -> None:
        """Record a turn of a conversation."""
        found = self._forget(conversation.key)
        if found is not None and prompt.after is None and len(found.tree.turns) < self._limits.conversation_turns:
            conversation = found  # several requests began it at the same time
        conversation.add(prompt, completion, message, session_id)
        self._found[conversation.key] = conversation
        self._num_bytes += conversation.tree.num_bytes
        limits = self._limits
        while self._found and (
            len(self._found) > limits.num_conversations or self._num_bytes > limits.conversation_bytes
        ):
            self._forget(next(iter(self._found)))

    def _forget(self, key: bytes) -> Conversation | None:
        if (found := self._found.pop(key, None)) is not None:
            self._num_bytes -= found.tree.num_bytes
        return found


def _opening(messages: Sequence[Message], tools: Tools | None) -> bytes:
    """Digest of the fixed beginning of a conversation: its tools, and its messages up to the first user message."""
    digest = blake2b(identity_of_tools(tools), digest_size=16)
    for message in messages:
        digest.update(identity_of(message).digest)
        if message.get("role") == "user":
            break
    return digest.digest()


NO_RENDERER = (
    "this server has no renderer for messages: add a chat_template.jinja to the model's folder, or set model.renderer"
)

Show = Callable[[Sequence[int]], str]
"""Function that returns the text of tokens for people."""


class CallerPrompt(Protocol):
    """Prompt of a caller, and the recording of its completions.

    Example:

        prompt = caller_of(request).prompt(messages, tools, session_id)
        completion_request = prompt.request(sampling, num_choices=1, request_id="chatcmpl-17")
        (completion,) = await policy.complete(completion_request)
        prompt.record(0, completion, {"role": "assistant", "content": "a b"})
    """

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    def request(
        self, sampling: SamplingParams, num_choices: int, request_id: str, first_index: int = 0
    ) -> CompletionRequest:
        """Make the request to send to the policy. Called once.

        Args:
            sampling: Sampling parameters that the client asks for.
            request_id: Id by which the client knows the answer.
            first_index: Index of the first choice, in an answer that has the choices of other prompts before it.
        """
        ...

    def record(self, index: int, completion: Completion, message: Message) -> None:
        """Record one of the completions. Called before the client learns that it is complete.

        Args:
            index: Index among the completions of this prompt.
            message: The completion as the client receives it, with everything that it may send back.

        Raises:
            EpisodeEndedError: The client must not receive it.
        """
        ...


class Caller(Protocol):
    """Client or episode for which requests are answered.

    Attributes:
        name: Unique name.
    """

    name: bytes

    def prompt(
        self, messages: Sequence[Message], tools: Tools | None, session_id: str | None, style: Style = USUAL
    ) -> CallerPrompt:
        """Make the prompt of a conversation.

        Raises:
            RequestError: The messages cannot be rendered.
        """
        ...

    def prompt_of_tokens(self, token_ids: Sequence[int], show: Show, session_id: str | None) -> CallerPrompt: ...


def caller_of(request: Request) -> Caller:
    return request.scope["caller"]


class Client:
    """Client with a key of the server, or any client of a server without keys.

    Args:
        name: Unique name.
        conversations: Conversations of all clients. Without it messages are refused.
    """

    def __init__(self, name: bytes, conversations: Conversations | None) -> None:
        self.name = name
        self._conversations = conversations

    def prompt(
        self, messages: Sequence[Message], tools: Tools | None, session_id: str | None, style: Style = USUAL
    ) -> CallerPrompt:
        if self._conversations is None:
            raise RequestError(NO_RENDERER)
        conversation = self._conversations.of(self.name, session_id, messages, tools)
        return _RememberedPrompt(self._conversations, conversation, conversation.tree.prompt(messages, tools, style))

    def prompt_of_tokens(self, token_ids: Sequence[int], show: Show, session_id: str | None) -> CallerPrompt:
        return _ClientPrompt(token_ids, session_id)


class _ClientPrompt:
    """Prompt of a client that keeps the tokens itself. Nothing is remembered."""

    def __init__(self, token_ids: Sequence[int], session_id: str | None) -> None:
        self.prompt_token_ids = token_ids
        self._session_id = session_id

    def request(
        self, sampling: SamplingParams, num_choices: int, request_id: str, first_index: int = 0
    ) -> CompletionRequest:
        return CompletionRequest(self.prompt_token_ids, sampling, num_choices, self._session_id, request_id)

    def record(self, index: int, completion: Completion, message: Message) -> None:
        pass


class _RememberedPrompt(_ClientPrompt):
    def __init__(self, conversations: Conversations, conversation: Conversation, prompt: Prompt) -> None:
        self._conversations = conversations
        self._conversation = conversation
        self._prompt = prompt
        self._session = conversation.session_of(prompt)
        super().__init__(prompt.token_ids, self._session)

    def record(self, index: int, completion: Completion, message: Message) -> None:
        self._conversations.add(self._conversation, self._prompt, completion, message, self._session)
