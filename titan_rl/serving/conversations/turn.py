"""A turn of a conversation: from its messages to the replies, whichever protocol asks."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachetools import LRUCache

from titan_rl.core.errors import UnsupportedSamplingError
from titan_rl.rollout.renderer.registry import with_template_kwargs
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller, Talk
from titan_rl.serving.conversations.constraint import Constraining, Constraint
from titan_rl.serving.conversations.identity import identity_of_kwargs
from titan_rl.serving.conversations.reply import Delta, Reply, ReplyForm, ReplyReader
from titan_rl.serving.conversations.tree import Style
from titan_rl.serving.http.errors import NOT_HONOURED, UNSUPPORTED_VALUE, ApiError
from titan_rl.serving.policy import ServedPolicy
from titan_rl.serving.text import Text, Tokenizing
from titan_rl.types import SamplingParams, TokenChunk

_MOST_VARIANTS = 16

_PER_MESSAGE = 64
"""Characters whose tokenizing takes as long as the remaining work on a message."""

OnDelta = Callable[[int, Delta], None]
"""Called with the index of a reply and its next part."""


@dataclass(frozen=True, slots=True)
class TurnAsk:
    """
    Args:
        caller: Whose conversation it is.
        messages: The whole conversation, in the form of OpenAI's chat.
        sampling: Fields of `SamplingParams`, without the budget and the model's own stop tokens.
        max_tokens: None is all the room there is.
        one_call: A reply ends with the first call of a tool.
        may_call: Whether a reply may call tools. Where it may not they are in the prompt all the same, which goes on
            from the turns before, and what looks like a call is text.
        param: The field that the messages are from.
        constraint: What the replies have to be.
        template_kwargs: Of the chat template.
        begun: A reply that the client has begun, which the completion goes on with.
        policy: What generates; by default the server's policy.
    """

    caller: Caller
    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    one_call: bool = False
    may_call: bool = True
    session_id: str | None = None
    param: str = "messages"
    constraint: Constraint | None = None
    template_kwargs: Mapping[str, Any] | None = None
    begun: str | None = None
    policy: ServedPolicy | None = None


class Turns:
    """Turns of the conversations of all callers."""

    def __init__(self, policy: ServedPolicy, text: Text, renderer: Renderer, tokenizing: Tokenizing) -> None:
        self.policy = policy
        self.text = text
        self._renderer = renderer
        self._tokenizing = tokenizing
        self._constraining = Constraining(renderer, text)
        self._of_thread = threading.local()  # renderers by the keywords of their template, of its own tokenizer each

    def begin(self, asked: TurnAsk, id_prefix: str) -> ServedTurn:
        """The turn that is asked for. Nothing is tokenized, generated or kept before its `replies`."""
        return ServedTurn(self, asked, f"{id_prefix}{uuid.uuid4().hex}")

    async def talk(self, asked: TurnAsk) -> Talk:
        """
        Raises:
            RequestError: The renderer refuses the messages, or the caller's episode is over.
        """
        num_characters = sum(_PER_MESSAGE + len(message.get("content") or "") for message in asked.messages)
        return await self._tokenizing(
            lambda: asked.caller.talk(asked.messages, asked.tools, asked.session_id, self._style(asked)),
            num_characters,
        )

    def _style(self, asked: TurnAsk) -> Style:
        """
        Raises:
            RequestError: The renderer takes no such keywords.
        """
        begun = () if asked.begun is None else self.text.encode(asked.begun, add_special_tokens=False)
        if not asked.template_kwargs:
            return Style(begun=begun)
        key = identity_of_kwargs(asked.template_kwargs)
        return Style(self._renderer_of(asked), key, begun)

    def _renderer_of(self, asked: TurnAsk) -> Renderer:
        if not asked.template_kwargs:
            return self._renderer
        key = identity_of_kwargs(asked.template_kwargs)
        variants: LRUCache[bytes, Renderer] = vars(self._of_thread).setdefault("variants", LRUCache(_MOST_VARIANTS))
        if (found := variants.get(key)) is None:
            held = self._tokenizing.held
            found = with_template_kwargs(held(self._renderer), asked.template_kwargs, held(self.text.tokenizer))
            variants[key] = found
        return found

    def sampling(self, asked: TurnAsk, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Sampling parameters of the replies to a prompt.

        Raises:
            ApiError: 400, the conversation fills the context, two values do not go together, or the replies cannot be
                held to what is wanted.
        """
        given = asked.sampling
        if asked.constraint is not None:
            given = {**given, "constraint": self._constraining.tag(asked.constraint, asked.tools, prompt_token_ids)}
        return self.policy.sampling(len(prompt_token_ids), asked.max_tokens, asked.param, **given)

    def form(self, asked: TurnAsk, prompt_token_ids: Sequence[int]) -> ReplyForm:
        """Form in which the replies to a prompt are read."""
        tools = asked.tools if asked.may_call else None
        return ReplyForm(self._renderer_of(asked), self.text, prompt_token_ids, tools, asked.one_call, asked.stops)


class ServedTurn:
    """
    Attributes:
        id: Of the request, for its client.
        prompt_token_ids: What is generated from; empty before it is.  # [num_prompt_tokens]
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
            RequestError: The renderer refuses the messages, or the caller's episode is over.
            ApiError: 400, the conversation fills the context, or two values do not go together.
        """
        asked = self._asked
        policy = asked.policy or self._turns.policy
        self._talk = talk = await self._turns.talk(asked)
        self.prompt_token_ids = prompt_token_ids = talk.prompt_token_ids
        sampling = self._turns.sampling(asked, prompt_token_ids)
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
        try:
            completions = await policy.complete(ask, on_tokens if is_watched else None)
        except UnsupportedSamplingError as error:
            if error.parameter != "constraint" or asked.constraint is None:
                raise
            param = asked.constraint.param
            raise ApiError(400, f"{param}: {NOT_HONOURED}", param=param, code=UNSUPPORTED_VALUE) from None
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
            EpisodeEndedError: The client must not be given them.
        """
        assert self._talk is not None, "there are no replies before they are generated"
        for index, reply in enumerate(replies):
            message = reply.message
            if self._asked.begun is not None:
                message = {**message, "content": self._asked.begun + (message["content"] or "")}
            self._talk.record(index, reply.completion, message)
