"""`POST /v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request

from titan_rl.rollout.renderer.types import Renderer
from titan_rl.serving.conversations.sessions import Conversation, Conversations
from titan_rl.serving.conversations.tree import Prompt
from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.http.body import read
from titan_rl.serving.http.exchange import Answer, Emit, Exchanges
from titan_rl.serving.policy.served_policy import Ask, ServedPolicy
from titan_rl.serving.policy.text import Text
from titan_rl.serving.protocols.openai.bodies import ChatBody
from titan_rl.serving.protocols.openai.chat_choice import ChatChoice
from titan_rl.serving.protocols.openai.messages import messages_from, tools_from
from titan_rl.serving.protocols.wire import check_choices, session_id_of, usage
from titan_rl.types import Completion


class ChatEndpoint:
    def __init__(
        self,
        policy: ServedPolicy,
        exchanges: Exchanges,
        text: Text | None,
        renderer: Renderer | None,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._policy = policy
        self._exchanges = exchanges
        self._text = text
        self._renderer = renderer
        self._stop_token_ids = stop_token_ids
        limits = exchanges.limits
        self._conversations = (
            None
            if renderer is None
            else Conversations(renderer, most=limits.num_conversations, most_turns=limits.conversation_turns)
        )

    async def __call__(self, request: Request) -> Answer:
        if self._text is None or self._renderer is None or self._conversations is None:
            raise ApiError(400, "this server has no renderer for messages; ask /inference/v1/generate")
        body = await read(request, ChatBody)
        self._policy.check_model(body.model)
        num_choices = body.n or 1
        check_choices(num_choices, self._exchanges.limits.num_choices, "n")
        messages, tools = messages_from(body.messages), tools_from(body.tools)
        if body.tool_choice == "none":
            tools = None
        named = session_id_of(request)
        conversation = self._conversations.of(named, messages, tools)
        prompt = conversation.tree.prompt(messages, tools)
        sampling = self._policy.sampling(
            len(prompt.token_ids),
            body.max_completion_tokens or body.max_tokens,
            "messages",
            **body.sampling(self._stop_token_ids),
        )
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        ask = Ask(prompt.token_ids, sampling, num_choices, conversation.session_of(prompt), request_id)
        work = _Work(self._policy, self._renderer, self._text, body, tools, conversation, prompt, ask)
        return Answer(self._exchanges, work, num_places=num_choices, stream=bool(body.stream))


class _Work:
    def __init__(
        self,
        policy: ServedPolicy,
        renderer: Renderer,
        text: Text,
        body: ChatBody,
        tools: list[dict[str, Any]] | None,
        conversation: Conversation,
        prompt: Prompt,
        ask: Ask,
    ) -> None:
        self._policy = policy
        self._renderer = renderer
        self._text = text
        self._body = body
        self._tools = tools
        self._conversation = conversation
        self._prompt = prompt
        self._ask = ask
        self._created = int(time.time())

    async def __call__(self, emit: Emit | None) -> Any:
        choices = [
            ChatChoice(index, self._renderer, self._text, self._body, self._tools, self._prompt.token_ids)
            for index in range(self._ask.num_choices)
        ]
        if emit is None:
            return await self._whole(choices)
        await self._stream(choices, emit)
        return None

    async def _whole(self, choices: list[ChatChoice]) -> dict[str, Any]:
        # Without strings to look for, nobody reads the text before it is whole.
        watch = (lambda index, chunk: choices[index].take(chunk)[1]) if self._body.stops else None
        completions = await self._policy.complete(self._ask, watch)
        told = [choice.whole(completion) for choice, completion in zip(choices, completions, strict=True)]
        self._record(choices, completions)
        envelope = self._envelope("chat.completion")
        if self._body.return_token_ids:
            envelope["prompt_token_ids"] = list(self._prompt.token_ids)
        return {**envelope, "choices": told, "usage": usage(len(self._prompt.token_ids), completions)}

    async def _stream(self, choices: list[ChatChoice], emit: Emit) -> None:
        envelope = self._envelope("chat.completion.chunk")
        prompt = {"prompt_token_ids": list(self._prompt.token_ids)} if self._body.return_token_ids else {}

        def tell(events: list[dict[str, Any]]) -> None:
            for event in events:
                emit({**envelope, **prompt, "choices": [event]})
                prompt.clear()

        def on_tokens(index: int, chunk: Any) -> int | None:
            events, end = choices[index].take(chunk)
            tell(events)
            return end

        completions = await self._policy.complete(self._ask, on_tokens)
        for choice, completion in zip(choices, completions, strict=True):
            tell(choice.end(completion))
        self._record(choices, completions)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            emit({**envelope, "choices": [], "usage": usage(len(self._prompt.token_ids), completions)})

    def _record(self, choices: list[ChatChoice], completions: list[Completion]) -> None:
        for choice, completion in zip(choices, completions, strict=True):
            assert choice.message is not None
            assert self._ask.session_id is not None
            self._conversation.add(self._prompt, completion, choice.message, self._ask.session_id)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._ask.request_id, "object": kind, "created": self._created, "model": self._policy.model}
