"""On whose behalf requests are answered, and what is remembered of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.requests import Request

from titan_rl.core.errors import RequestError
from titan_rl.rollout.renderer.types import Tools
from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.sessions import Conversation, Conversations
from titan_rl.serving.conversations.tree import Prompt, Style
from titan_rl.serving.policy.served_policy import Ask
from titan_rl.types import Completion, SamplingParams

NO_RENDERER = (
    "this server has no renderer for messages: its model needs a chat_template.jinja in its folder, or the server "
    "the setting model.renderer"
)

Show = Callable[[Sequence[int]], str]
"""The text of tokens, for people."""


class Talk(Protocol):
    """One prompt of a caller, on its way to its completions.

    Example:

        talk = caller_of(request).talk(messages, tools, session_id)
        ask = talk.ask(sampling, num_choices=1, request_id="chatcmpl-17")
        (completion,) = await policy.complete(ask)
        talk.record(0, completion, {"role": "assistant", "content": "a b"})
    """

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    def ask(self, sampling: SamplingParams, num_choices: int, request_id: str, first_index: int = 0) -> Ask:
        """What to ask the policy for. Called once.

        Args:
            sampling: as the client wants it.
            request_id: what the client knows the answer by.
            first_index: of its choices, in an answer that has those of other prompts before them.
        """
        ...

    def record(self, index: int, completion: Completion, message: Message) -> None:
        """Keep one of the completions, before the client is told that it is whole.

        Args:
            index: among those of this prompt.
            message: the completion as the client is given it, with all that it may send back.

        Raises:
            EpisodeEndedError: the client must not be given it.
        """
        ...


class Caller(Protocol):
    """Whose requests these are.

    Attributes:
        name: nobody else's.
    """

    name: bytes

    def talk(
        self, messages: Sequence[Message], tools: Tools | None, session_id: str | None, style: Style | None = None
    ) -> Talk:
        """
        Raises:
            RequestError: the messages cannot be rendered.
        """
        ...

    def talk_in_tokens(self, token_ids: Sequence[int], show: Show, session_id: str | None) -> Talk: ...


def caller_of(request: Request) -> Caller:
    return request.scope["caller"]


class Client:
    """Who has a key of the server, or any client of a server without keys.

    Args:
        name: nobody else's.
        conversations: of all clients. Without it there are none in messages.
    """

    def __init__(self, name: bytes, conversations: Conversations | None) -> None:
        self.name = name
        self._conversations = conversations

    def talk(
        self, messages: Sequence[Message], tools: Tools | None, session_id: str | None, style: Style | None = None
    ) -> Talk:
        if self._conversations is None:
            raise RequestError(NO_RENDERER)
        conversation = self._conversations.of(self.name, session_id, messages, tools)
        return _RememberedTalk(
            self._conversations, conversation, conversation.tree.prompt(messages, tools, style or Style())
        )

    def talk_in_tokens(self, token_ids: Sequence[int], show: Show, session_id: str | None) -> Talk:
        return _ForgottenTalk(token_ids, session_id)


class _RememberedTalk:
    def __init__(self, conversations: Conversations, conversation: Conversation, prompt: Prompt) -> None:
        self.prompt_token_ids = prompt.token_ids
        self._conversations = conversations
        self._conversation = conversation
        self._prompt = prompt
        self._session_id = conversation.session_of(prompt)

    def ask(self, sampling: SamplingParams, num_choices: int, request_id: str, first_index: int = 0) -> Ask:
        return Ask(self.prompt_token_ids, sampling, num_choices, self._session_id, request_id)

    def record(self, index: int, completion: Completion, message: Message) -> None:
        self._conversations.add(self._conversation, self._prompt, completion, message, self._session_id)


class _ForgottenTalk:
    """A client that keeps tokens itself needs nobody to remember them."""

    def __init__(self, token_ids: Sequence[int], session_id: str | None) -> None:
        self.prompt_token_ids = token_ids
        self._session_id = session_id

    def ask(self, sampling: SamplingParams, num_choices: int, request_id: str, first_index: int = 0) -> Ask:
        return Ask(self.prompt_token_ids, sampling, num_choices, self._session_id, request_id)

    def record(self, index: int, completion: Completion, message: Message) -> None:
        pass
