"""A turn of a conversation: from its messages to the replies, whichever protocol asks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller, Talk
from titan_rl.serving.conversations.reply import Delta, Reply, ReplyForm, ReplyReader
from titan_rl.serving.policy.served_policy import ServedPolicy
from titan_rl.serving.policy.text import Text
from titan_rl.serving.policy.tokenizing import Tokenizing
from titan_rl.types import TokenChunk

_PER_MESSAGE = 64
"""Characters whose tokenizing takes as long as what else there is to do with a message."""

OnDelta = Callable[[int, Delta], None]
"""Told of what the reply of this index says next."""


@dataclass(frozen=True, slots=True)
class TurnAsk:
    """
    Args:
        caller: whose conversation it is.
        messages: the whole conversation, in the form of OpenAI's chat.
        sampling: fields of `SamplingParams`, without the budget and the model's own stop tokens.
        max_tokens: None is all the room there is.
        one_call: a reply ends with the first call of a tool.
        param: the field that the messages are from.
    """

    caller: Caller
    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    one_call: bool = False
    session_id: str | None = None
    param: str = "messages"


class Turns:
    """Turns of the conversations of all callers."""

    def __init__(self, policy: ServedPolicy, text: Text, renderer: Renderer, tokenizing: Tokenizing) -> None:
        self.policy = policy
        self.text = text
        self._renderer = renderer
        self._tokenizing = tokenizing

    def begin(self, asked: TurnAsk, id_prefix: str) -> ServedTurn:
        """The turn that is asked for. Nothing is tokenized, generated or kept before its `replies`."""
        return ServedTurn(self, asked, f"{id_prefix}{uuid.uuid4().hex}")

    async def talk(self, asked: TurnAsk) -> Talk:
        """
        Raises:
            RequestError: the renderer refuses the messages, or the caller's episode is over.
        """
        num_characters = sum(_PER_MESSAGE + len(message.get("content") or "") for message in asked.messages)
        return await self._tokenizing(
            lambda: asked.caller.talk(asked.messages, asked.tools, asked.session_id), num_characters
        )

    def form(self, asked: TurnAsk, prompt_token_ids: Sequence[int]) -> ReplyForm:
        """What the replies to a prompt are read with."""
        return ReplyForm(self._renderer, self.text, prompt_token_ids, asked.tools, asked.one_call, asked.stops)


class ServedTurn:
    """
    Attributes:
        id: of the request, for its client.
        prompt_token_ids: what is generated from; empty before it is.  # [num_prompt_tokens]
    """

    def __init__(self, turns: Turns, asked: TurnAsk, request_id: str) -> None:
        self.id = request_id
        self.prompt_token_ids: Sequence[int] = ()
        self._turns = turns
        self._asked = asked
        self._talk: Talk | None = None

    async def replies(self, on_delta: OnDelta | None = None) -> list[Reply]:
        """Generate. None of it is remembered before `keep`.

        Returns:
            [num_choices]

        Raises:
            RequestError: the renderer refuses the messages, or the caller's episode is over.
            ApiError: 400, the conversation fills the context, or two values do not go together.
        """
        asked, policy = self._asked, self._turns.policy
        self._talk = talk = await self._turns.talk(asked)
        self.prompt_token_ids = prompt_token_ids = talk.prompt_token_ids
        sampling = policy.sampling(len(prompt_token_ids), asked.max_tokens, asked.param, **asked.sampling)
        ask = talk.ask(sampling, asked.num_choices, self.id)
        form = self._turns.form(asked, prompt_token_ids)
        readers = [ReplyReader(form) for _ in range(asked.num_choices)]

        def on_tokens(index: int, chunk: TokenChunk) -> int | None:
            delta, end = readers[index].take(chunk)
            if delta and on_delta is not None:
                on_delta(index, delta)
            return end

        # Nobody reads the text before it is whole, unless there is something in it to look for.
        is_watched = on_delta is not None or form.may_cut
        completions = await policy.complete(ask, on_tokens if is_watched else None)
        replies: list[Reply] = []
        for index, (reader, completion) in enumerate(zip(readers, completions, strict=True)):
            if on_delta is None:
                replies.append(reader.whole(completion))
                continue
            rest, reply = reader.end(completion)
            if rest:
                on_delta(index, rest)
            replies.append(reply)
        return replies

    def keep(self, replies: Sequence[Reply]) -> None:
        """Remember the replies: what a client was told is what the turn is known by when it comes back. Called when all
        of it is encoded, since what cannot be sent must not be remembered, and before the client is told that it is
        whole.

        Raises:
            EpisodeEndedError: the client must not be given them.
        """
        assert self._talk is not None, "there are no replies before they are generated"
        for index, reply in enumerate(replies):
            self._talk.record(index, reply.completion, reply.message)
