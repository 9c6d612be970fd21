"""`POST /v1/messages` with message threads, token counting, and errors in Anthropic's form."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from cachetools import LRUCache
from starlette.requests import Request

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller, caller_of
from titan_rl.serving.conversations.reply import Delta, Reply
from titan_rl.serving.conversations.turn import ServedTurn, TurnAsk, Turns
from titan_rl.serving.http.errors import ApiError, Dialect, named_event
from titan_rl.serving.http.exchange import Answer, Emit, Exchanges, encoded
from titan_rl.serving.http.request import read
from titan_rl.serving.protocols.anthropic.blocks import (
    ConversationBody,
    MessagesBody,
    ReplyBlocks,
    messages_from_blocks,
    system_of,
    tools_from_anthropic,
)
from titan_rl.serving.protocols.wire import (
    Forced,
    constraint_of,
    session_id_of,
    string_in,
    turns_of,
    weight_versions,
)
from titan_rl.types import FinishReason

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error(error: ApiError) -> dict[str, Any]:
    """Make the body of an error. It has no field for the parameter that is wrong, so the message names it. Clients act
    on the code in `details`, for example by leaving out an unsupported feature."""
    message, param = error.message, error.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    fields: dict[str, Any] = {
        "type": _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error"),
        "message": message,
    }
    if error.code is not None:
        fields["details"] = {"error_code": error.code}
    return {"type": "error", "error": fields}


ANTHROPIC = Dialect(_error, named_event, _error, request_id_headers=(b"request-id", b"x-request-id"))


@dataclass(frozen=True, slots=True)
class WholeConversation:
    """Complete conversation of a request, including the part that a thread holds.

    Args:
        messages: Messages in the form of OpenAI's chat, like the tools.
    """

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None


class Threads:
    """Conversations by the id of their last reply. The least recently used are forgotten. Each belongs to its caller,
    and other callers do not find it.

    A reply that is held may be continued any number of times, for retries and branches. These error codes tell
    Anthropic's clients how to proceed:

        thread_not_found             the reply is not held (any more): send the whole history under a new thread
        thread_unsupported_request   another kind of thread: send the whole history without a thread
        thread_fingerprint_mismatch  `system` or `tools` of a request that continues a thread differ from the thread's
    """

    def __init__(self, most_bytes: int) -> None:
        self._held: LRUCache[tuple[bytes, str], bytes] = LRUCache(most_bytes, getsizeof=len)
        self._lock = threading.Lock()  # long requests are read in a thread

    def conversation(self, caller: Caller, body: MessagesBody) -> WholeConversation:
        """Return the whole conversation of a request, including the part that its thread holds.

        Raises:
            ApiError: With status 404 if the thread is not held, 400 if it cannot be continued like this or a message is
                wrong.
        """
        thread, messages = body.thread, messages_from_blocks(body)
        tools = tools_from_anthropic(body.tools)
        kind = None if thread is None else thread.get("type")
        if thread is None or kind == "create":
            return WholeConversation(messages, tools)
        if kind != "continue":
            message = "thread.type must be 'create' or 'continue'; send the whole conversation without a thread"
            raise ApiError(400, message, param="thread.type", code="thread_unsupported_request")
        held = self._find(caller, thread.get("previous_message_id"))
        if body.tools is not None and tools != held.tools:
            raise _differs("tools")
        has_system = bool(system_of(body.system))
        if has_system and messages[0] != held.messages[0]:
            raise _differs("system")
        return WholeConversation([*held.messages, *messages[has_system:]], held.tools)

    def hold(self, caller: Caller, message_id: str, conversation: WholeConversation, reply: Message) -> None:
        """Hold a conversation with its reply, so that it can be continued."""
        held = msgspec.json.encode({"messages": [*conversation.messages, reply], "tools": conversation.tools})
        with suppress(ValueError), self._lock:  # the conversation may be larger than the limit of all together
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


_STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}


@dataclass(frozen=True, slots=True)
class HeldThread:
    """Thread in which the conversation of one request is held once it has its reply."""

    threads: Threads
    caller: Caller
    conversation: WholeConversation


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
        turn_ask = _turn_ask(
            turns,
            body,
            request,
            conversation,
            max_tokens=body.max_tokens,
            sampling=body.sampling(self._stop_token_ids),
            stops=tuple(body.stop_sequences or ()),
            one_call=body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use),
        )
        turn = turns.begin(turn_ask, "msg_")
        held = None if body.thread is None else HeldThread(self._threads, caller, conversation)
        work = _Work(turn, turns.policy.named(body.model).model, held, with_token_ids=body.return_token_ids)
        return Answer(self._exchanges, work, num_completions=1, stream=bool(body.stream), dialect=ANTHROPIC)


class CountTokensEndpoint:
    def __init__(self, turns: Turns | None, exchanges: Exchanges) -> None:
        self._turns = turns
        self._exchanges = exchanges

    def __call__(self, request: Request) -> Answer:
        turns = turns_of(self._turns)
        body = read(request, ConversationBody)
        conversation = WholeConversation(messages_from_blocks(body), tools_from_anthropic(body.tools))
        turn_ask = _turn_ask(turns, body, request, conversation)

        async def work(_: Emit | None) -> dict[str, int]:
            return {"input_tokens": len((await turns.talk(turn_ask)).prompt_token_ids)}

        return Answer(self._exchanges, work, num_completions=1, stream=False, dialect=ANTHROPIC)


def _turn_ask(
    turns: Turns, body: ConversationBody, request: Request, conversation: WholeConversation, **more: Any
) -> TurnAsk:
    policy = turns.policy.named(body.model)
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
        policy=policy,
        **more,
    )


class _Work:
    """Answer of one turn, at once or as events.

    Args:
        held: Thread that will hold the conversation with its reply; None for a request without a thread.
    """

    def __init__(self, turn: ServedTurn, model: str, held: HeldThread | None, *, with_token_ids: bool) -> None:
        self._turn = turn
        self._model = model
        self._held = held
        self._with_token_ids = with_token_ids

    async def __call__(self, emit: Emit | None) -> Any:
        return await self._complete_response() if emit is None else await self._stream(emit)

    async def _complete_response(self) -> Any:
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
        is_started = False

        def begin() -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
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
        if (held := self._held) is not None:
            held.threads.hold(held.caller, self._turn.id, held.conversation, reply.message)

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
        """Report usage. Cached and other prompt tokens are one number, because the cached part is unknown when a stream
        begins, and the end of the stream must report the same as its beginning."""
        return {
            "input_tokens": len(self._turn.prompt_token_ids),
            "cache_read_input_tokens": None,
            "cache_creation_input_tokens": None,
            "output_tokens": num_completion_tokens,
        }

    def _extension(self, reply: Reply) -> dict[str, Any]:
        fields: dict[str, Any] = {"weight_versions": weight_versions(reply.completion)}
        if self._with_token_ids:
            fields["prompt_token_ids"] = list(self._turn.prompt_token_ids)
            fields["token_ids"] = list(reply.completion.token_ids)
        return fields


def _ending(reply: Reply) -> dict[str, Any]:
    reason = _STOP_REASONS.get(reply.finish_reason, "end_turn" if reply.stop is None else "stop_sequence")
    return {"stop_reason": reason, "stop_sequence": reply.stop}
