"""`POST /v1/messages`: blocks in, blocks out; and how many tokens a conversation has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import caller_of
from titan_rl.serving.conversations.reply import Delta, Reply
from titan_rl.serving.conversations.turn import ServedTurn, TurnAsk, Turns
from titan_rl.serving.http.body import read
from titan_rl.serving.http.exchange import Answer, Emit, Exchanges, encoded
from titan_rl.serving.protocols.anthropic.blocks import ReplyBlocks, messages_from_blocks, tools_from_anthropic
from titan_rl.serving.protocols.anthropic.bodies import ConversationBody, MessagesBody
from titan_rl.serving.protocols.anthropic.errors import ANTHROPIC
from titan_rl.serving.protocols.anthropic.threads import Threads, WholeConversation
from titan_rl.serving.protocols.wire import (
    Forced,
    constraint_of,
    session_id_of,
    string_in,
    turns_of,
    weight_versions,
)
from titan_rl.types import FinishReason

_STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}


class MessagesEndpoint:
    def __init__(
        self, turns: Turns | None, exchanges: Exchanges, threads: Threads, stop_token_ids: Sequence[int]
    ) -> None:
        self._turns = turns
        self._exchanges = exchanges
        self._threads = threads
        self._stop_token_ids = stop_token_ids

    def __call__(self, request: Request) -> Answer:
        turns = turns_of(self._turns)
        body, caller = read(request, MessagesBody), caller_of(request)
        conversation = self._threads.conversation(caller, body)
        asked = _asked(
            turns,
            body,
            request,
            conversation,
            max_tokens=body.max_tokens,
            sampling=body.sampling(self._stop_token_ids),
            stops=tuple(body.stop_sequences or ()),
            one_call=body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use),
        )
        turn = turns.begin(asked, "msg_")
        hold = None if body.thread is None else partial(self._threads.hold, caller, turn.id, conversation)
        work = _Work(turn, turns.policy.model, hold, with_token_ids=body.return_token_ids)
        return Answer(self._exchanges, work, num_places=1, stream=bool(body.stream), dialect=ANTHROPIC)


class CountTokensEndpoint:
    def __init__(self, turns: Turns | None, exchanges: Exchanges) -> None:
        self._turns = turns
        self._exchanges = exchanges

    def __call__(self, request: Request) -> Answer:
        turns = turns_of(self._turns)
        body = read(request, ConversationBody)
        conversation = WholeConversation(messages_from_blocks(body), tools_from_anthropic(body.tools))
        asked = _asked(turns, body, request, conversation)

        async def work(_: Emit | None) -> dict[str, int]:
            return {"input_tokens": len((await turns.talk(asked)).prompt_token_ids)}

        return Answer(self._exchanges, work, num_places=1, stream=False, dialect=ANTHROPIC)


def _asked(
    turns: Turns, body: ConversationBody, request: Request, conversation: WholeConversation, **more: Any
) -> TurnAsk:
    turns.policy.check_model(body.model)
    choice, output = body.tool_choice, body.output_config
    is_none = choice is not None and choice.type == "none"
    forced: Forced = None
    if choice is not None and choice.type in ("any", "tool"):
        forced = string_in({"name": choice.name}, "name", "tool_choice") if choice.type == "tool" else True
    schema = None if output is None or output.format is None else output.format.json_schema
    return TurnAsk(
        caller_of(request),
        conversation.messages,
        conversation.tools,
        may_call=not is_none,
        session_id=session_id_of(request),
        constraint=constraint_of(
            conversation.tools,
            forced,
            schema,
            one_call=bool(more.get("one_call")),
            params=("tool_choice", "output_config.format"),
        ),
        template_kwargs=body.chat_template_kwargs,
        **more,
    )


class _Work:
    """How one turn is told of.

    Args:
        hold: called with the reply's message once that is kept.
    """

    def __init__(
        self, turn: ServedTurn, model: str, hold: Callable[[Message], None] | None, *, with_token_ids: bool
    ) -> None:
        self._turn = turn
        self._model = model
        self._hold = hold
        self._with_token_ids = with_token_ids

    async def __call__(self, emit: Emit | None) -> Any:
        return await self._whole() if emit is None else await self._stream(emit)

    async def _whole(self) -> Any:
        (reply,) = await self._turn.replies()
        blocks = ReplyBlocks(lambda event: None)
        blocks.take(Delta(reply.reasoning, reply.content, reply.tool_calls))
        message = {
            **self._message(blocks.blocks),
            **_ending(reply),
            "usage": self._usage(len(reply.completion.token_ids)),
        }
        body = encoded({**message, **self._extension(reply)})
        self._keep(reply)
        return body

    async def _stream(self, emit: Emit) -> None:
        blocks = ReplyBlocks(emit)
        begun = False

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                emit({"type": "message_start", "message": self._message([])})

        def on_delta(_: int, delta: Delta) -> None:
            begin()
            blocks.take(delta)

        (reply,) = await self._turn.replies(on_delta)
        begin()
        self._keep(reply)
        blocks.end()
        usage = self._usage(len(reply.completion.token_ids))
        emit({"type": "message_delta", "delta": _ending(reply), "usage": usage, **self._extension(reply)})
        emit({"type": "message_stop"})

    def _keep(self, reply: Reply) -> None:
        self._turn.keep([reply])
        if self._hold is not None:
            self._hold(reply.message)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._turn.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }

    def _usage(self, num_completion_tokens: int) -> dict[str, Any]:
        """The prompt is counted as one, however much of it is cached: that is not known when a stream begins, and its
        end must tell what its beginning told."""
        return {
            "input_tokens": len(self._turn.prompt_token_ids),
            "cache_read_input_tokens": None,
            "cache_creation_input_tokens": None,
            "output_tokens": num_completion_tokens,
        }

    def _extension(self, reply: Reply) -> dict[str, Any]:
        told: dict[str, Any] = {"weight_versions": weight_versions(reply.completion)}
        if self._with_token_ids:
            told["prompt_token_ids"] = list(self._turn.prompt_token_ids)
            told["token_ids"] = list(reply.completion.token_ids)
        return told


def _ending(reply: Reply) -> dict[str, Any]:
    reason = _STOP_REASONS.get(reply.finish_reason, "end_turn" if reply.stop is None else "stop_sequence")
    return {"stop_reason": reason, "stop_sequence": reply.stop}
