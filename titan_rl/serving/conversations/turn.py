"""Turn of a conversation, from its messages to the replies, in any protocol."""

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
"""Number of characters whose tokenizing takes as long as the other work on a message."""

OnDelta = Callable[[int, Delta], None]
"""Callback with the index of a reply and its next part."""


@dataclass(frozen=True, slots=True)
class TurnAsk:
    """Request for the replies of one turn.

    Args:
        caller: Owner of the conversation.
        messages: Whole conversation, in the form of OpenAI's chat.
        sampling: Fields of `SamplingParams`, without the budget.
        max_tokens: Budget of tokens. None takes all the room in the context.
        one_call: Whether a reply ends with the first tool call.
        may_call: Whether a reply may call tools. If not, the prompt contains the tools all the same, because it extends
            earlier turns, and text that looks like a call is text.
        param: Name of the request's field that contains the messages.
        constraint: Constraint on the replies.
        template_kwargs: Keyword arguments of the chat template.
        prefill: Beginning of the reply, given by the client; the completion continues it.
        policy: Policy that generates. Defaults to the server's policy.
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
    prefill: str | None = None
    policy: ServedPolicy | None = None


class Turns:
    """Turns of the conversations of all callers."""

    def __init__(self, policy: ServedPolicy, text: Text, renderer: Renderer, tokenizing: Tokenizing) -> None:
        self.policy = policy
        self.text = text
        self._renderer = renderer
        self._tokenizing = tokenizing
        self._constraining = Constraining(renderer, text)
        self._of_thread = threading.local()  # renderers by the keywords of their template, each with its own tokenizer

    def begin(self, turn_ask: TurnAsk, id_prefix: str) -> ServedTurn:
        """Make a turn for a request. Nothing is tokenized, generated or kept before its `replies` is called."""
        return ServedTurn(self, turn_ask, f"{id_prefix}{uuid.uuid4().hex}")

    async def talk(self, turn_ask: TurnAsk) -> Talk:
        """Make the prompt of a turn.

        Raises:
            RequestError: The renderer refuses the messages, or the caller's episode is over.
        """
        num_characters = sum(_PER_MESSAGE + len(message.get("content") or "") for message in turn_ask.messages)
        return await self._tokenizing(
            lambda: turn_ask.caller.talk(turn_ask.messages, turn_ask.tools, turn_ask.session_id, self._style(turn_ask)),
            num_characters,
        )

    def _style(self, turn_ask: TurnAsk) -> Style:
        """Make the style of a turn's prompt.

        Raises:
            RequestError: The renderer does not support such keywords.
        """
        prefill = () if turn_ask.prefill is None else self.text.encode(turn_ask.prefill, add_special_tokens=False)
        if not turn_ask.template_kwargs:
            return Style(prefill=prefill)
        key = identity_of_kwargs(turn_ask.template_kwargs)
        return Style(self._renderer_of(turn_ask), key, prefill)

    def _renderer_of(self, turn_ask: TurnAsk) -> Renderer:
        if not turn_ask.template_kwargs:
            return self._renderer
        key = identity_of_kwargs(turn_ask.template_kwargs)
        variants: LRUCache[bytes, Renderer] = vars(self._of_thread).setdefault("variants", LRUCache(_MOST_VARIANTS))
        if (found := variants.get(key)) is None:
            held = self._tokenizing.held
            found = with_template_kwargs(held(self._renderer), turn_ask.template_kwargs, held(self.text.tokenizer))
            variants[key] = found
        return found

    def sampling(self, turn_ask: TurnAsk, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Make the sampling parameters of the replies to a prompt.

        Raises:
            ApiError: With status 400 if the conversation fills the context, two values contradict each other, or the
                constraint cannot be enforced.
        """
        given = turn_ask.sampling
        if turn_ask.constraint is not None:
            given = {
                **given,
                "constraint": self._constraining.tag(turn_ask.constraint, turn_ask.tools, prompt_token_ids),
            }
        return self.policy.sampling(len(prompt_token_ids), turn_ask.max_tokens, turn_ask.param, **given)

    def form(self, turn_ask: TurnAsk, prompt_token_ids: Sequence[int]) -> ReplyForm:
        """Make the rules for reading the replies to a prompt."""
        tools = turn_ask.tools if turn_ask.may_call else None
        return ReplyForm(
            self._renderer_of(turn_ask), self.text, prompt_token_ids, tools, turn_ask.one_call, turn_ask.stops
        )


class ServedTurn:
    """Turn of a conversation that is being served. Made by `Turns.begin`.

    Attributes:
        id: Id of the request, for its client.
        prompt_token_ids: Tokens of the prompt; empty before it is made.  # [num_prompt_tokens]
    """

    def __init__(self, turns: Turns, turn_ask: TurnAsk, request_id: str) -> None:
        self.id = request_id
        self.prompt_token_ids: Sequence[int] = ()
        self._turns = turns
        self._turn_ask = turn_ask
        self._talk: Talk | None = None

    async def replies(self, on_delta: OnDelta | None = None) -> list[Reply]:
        """Generate the replies. None of them is remembered before `keep`.

        Returns:
            Replies.  # [num_choices]

        Raises:
            RequestError: The renderer refuses the messages, or the caller's episode is over.
            ApiError: With status 400 if the conversation fills the context, or two values contradict each other.
        """
        turn_ask = self._turn_ask
        policy = turn_ask.policy or self._turns.policy
        self._talk = talk = await self._turns.talk(turn_ask)
        self.prompt_token_ids = prompt_token_ids = talk.prompt_token_ids
        sampling = self._turns.sampling(turn_ask, prompt_token_ids)
        ask = talk.ask(sampling, turn_ask.num_choices, self.id)
        form = self._turns.form(turn_ask, prompt_token_ids)
        readers = [ReplyReader(form) for _ in range(turn_ask.num_choices)]

        def on_tokens(index: int, chunk: TokenChunk) -> int | None:
            delta, end = readers[index].take(chunk)
            if delta and on_delta is not None:
                on_delta(index, delta)
            return end

        # Without a stream, the text is read only at the end, unless a completion may have to be cut.
        is_watched = on_delta is not None or form.may_cut
        try:
            completions = await policy.complete(ask, on_tokens if is_watched else None)
        except UnsupportedSamplingError as error:
            if error.parameter != "constraint" or turn_ask.constraint is None:
                raise
            param = turn_ask.constraint.param
            raise ApiError(400, f"{param}: {NOT_HONOURED}", param=param, code=UNSUPPORTED_VALUE) from None
        replies: list[Reply] = []
        for index, (reader, completion) in enumerate(zip(readers, completions, strict=True)):
            if on_delta is None:
                replies.append(reader.read(completion))
                continue
            rest, reply = reader.end(completion)
            if rest:
                on_delta(index, rest)
            replies.append(reply)
        return replies

    def keep(self, replies: Sequence[Reply]) -> None:
        """Remember the replies as the client receives them, because it will send them back in this form. Called once
        the answer is encoded, because an answer that cannot be sent must not be remembered, and before the client
        learns that it is complete.

        Raises:
            EpisodeEndedError: The client must not receive the replies.
        """
        assert self._talk is not None, "there are no replies before they are generated"
        for index, reply in enumerate(replies):
            message = reply.message
            if self._turn_ask.prefill is not None:
                message = {**message, "content": self._turn_ask.prefill + (message["content"] or "")}
            self._talk.record(index, reply.completion, message)
