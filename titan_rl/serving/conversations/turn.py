"""Turn of a conversation, from its messages to the replies, in any protocol."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachetools import LRUCache

from titan_rl.core.errors import DataError, RequestError, UnsupportedSamplingError
from titan_rl.rollout.renderer.registry import with_template_kwargs
from titan_rl.rollout.renderer.text import prefix_ids
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller, CallerPrompt
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
class TurnRequest:
    """Request for the replies of one turn, in the same form for all protocols.

    Args:
        caller: Owner of the conversation.
        policy: Policy that generates.
        messages: Whole conversation, in the form of OpenAI's chat.
        max_tokens: Budget of tokens. None takes all the room in the context.
        sampling: Fields of `SamplingParams`, without the budget.
        one_call: Whether a reply ends with the first tool call.
        may_call: Whether a reply may call tools. If not, the prompt contains the tools all the same, because it extends
            earlier turns, and text that looks like a call is text.
        param: Name of the request's field that contains the messages.
        constraint: Constraint on the replies.
        template_kwargs: Keyword arguments of the chat template.
        prefill: Beginning of the reply, given by the client; the completion continues it.
    """

    caller: Caller
    policy: ServedPolicy
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


class Turns:
    """Conversion of turns to prompts and sampling parameters, and the rules for reading their replies."""

    def __init__(self, text: Text, renderer: Renderer, tokenizing: Tokenizing) -> None:
        self.text = text
        self._renderer = renderer
        self._tokenizing = tokenizing
        self._constraining = Constraining(renderer, text)
        self._of_thread = threading.local()  # renderers by the keywords of their template, each with its own tokenizer

    async def prompt(self, request: TurnRequest) -> CallerPrompt:
        """Make the prompt of a turn.

        Raises:
            RequestError: The renderer refuses the messages or the keywords, or the caller's episode is over.
        """
        num_characters = sum(_PER_MESSAGE + len(message.get("content") or "") for message in request.messages)
        return await self._tokenizing(
            lambda: request.caller.prompt(request.messages, request.tools, request.session_id, self._style(request)),
            num_characters,
        )

    def _style(self, request: TurnRequest) -> Style:
        renderer, prefill = self._renderer_of(request), request.prefill
        try:
            tokens = () if prefill is None else prefix_ids(self._tokenizing.held(renderer), {"content": prefill})
        except DataError as error:
            raise RequestError(str(error)) from None
        if not request.template_kwargs:
            return Style(prefill=tokens)
        return Style(renderer, identity_of_kwargs(request.template_kwargs), tokens)

    def _renderer_of(self, request: TurnRequest) -> Renderer:
        if not request.template_kwargs:
            return self._renderer
        key = identity_of_kwargs(request.template_kwargs)
        variants: LRUCache[bytes, Renderer] = vars(self._of_thread).setdefault("variants", LRUCache(_MOST_VARIANTS))
        if (found := variants.get(key)) is None:
            held = self._tokenizing.held
            found = with_template_kwargs(held(self._renderer), request.template_kwargs, held(self.text.tokenizer))
            variants[key] = found
        return found

    def sampling(self, request: TurnRequest, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Make the sampling parameters of the replies to a prompt.

        Raises:
            ApiError: With status 400 if the conversation fills the context, two values contradict each other, or the
                constraint cannot be enforced.
        """
        given = request.sampling
        if request.constraint is not None:
            given = {**given, "constraint": self._constraining.tag(request.constraint, request.tools, prompt_token_ids)}
        return request.policy.sampling(len(prompt_token_ids), request.max_tokens, request.param, **given)

    def form(self, request: TurnRequest, prompt_token_ids: Sequence[int]) -> ReplyForm:
        """Make the rules for reading the replies to a prompt."""
        tools = request.tools if request.may_call else None
        return ReplyForm(
            self._renderer_of(request), self.text, prompt_token_ids, tools, request.one_call, request.stops
        )


class ServedTurn:
    """Turn of a conversation that is being served. Nothing is tokenized, generated or kept before `replies` is called.

    Attributes:
        id: Id of the request, for its client.
        prompt_token_ids: Tokens of the prompt; empty before it is made.  # [num_prompt_tokens]
    """

    def __init__(self, turns: Turns, request: TurnRequest, id_prefix: str) -> None:
        self.id = f"{id_prefix}{uuid.uuid4().hex}"
        self.request = request
        self.text = turns.text
        self.prompt_token_ids: Sequence[int] = ()
        self._turns = turns
        self._prompt: CallerPrompt | None = None

    async def replies(self, on_delta: OnDelta | None = None) -> list[Reply]:
        """Generate the replies. None of them is remembered before `keep`.

        Returns:
            Replies.  # [num_choices]

        Raises:
            RequestError: The renderer refuses the messages, or the caller's episode is over.
            ApiError: With status 400 if the conversation fills the context, or two values contradict each other.
        """
        request = self.request
        self._prompt = prompt = await self._turns.prompt(request)
        self.prompt_token_ids = prompt_token_ids = prompt.prompt_token_ids
        sampling = self._turns.sampling(request, prompt_token_ids)
        completion_request = prompt.request(sampling, request.num_choices, self.id)
        form = self._turns.form(request, prompt_token_ids)
        readers = [ReplyReader(form) for _ in range(request.num_choices)]

        def on_tokens(index: int, chunk: TokenChunk) -> int | None:
            delta, end = readers[index].take(chunk)
            if delta and on_delta is not None:
                on_delta(index, delta)
            return end

        # Without a stream, the text is read only at the end, unless a completion may have to be cut.
        is_watched = on_delta is not None or form.may_cut
        try:
            completions = await request.policy.complete(completion_request, on_tokens if is_watched else None)
        except UnsupportedSamplingError as error:
            if error.parameter != "constraint" or request.constraint is None:
                raise
            param = request.constraint.param
            raise ApiError(400, f"{param}: {NOT_HONOURED}", param=param, code=UNSUPPORTED_VALUE) from None
        if on_delta is None:
            return [reader.read(completion) for reader, completion in zip(readers, completions, strict=True)]
        replies: list[Reply] = []
        for index, (reader, completion) in enumerate(zip(readers, completions, strict=True)):
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
        assert self._prompt is not None, "there are no replies before they are generated"
        for index, reply in enumerate(replies):
            message = reply.message
            if self.request.prefill is not None:
                message = {**message, "content": self.request.prefill + (message["content"] or "")}
            self._prompt.record(index, reply.completion, message)
