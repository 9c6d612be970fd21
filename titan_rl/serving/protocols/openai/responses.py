"""`POST /v1/responses`: items in, items out, and the server may remember them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from cachetools import LRUCache
from starlette.requests import Request

from titan_rl.rollout.types import Message
from titan_rl.serving.conversations.caller import Caller, caller_of
from titan_rl.serving.conversations.reply import Delta, Reply
from titan_rl.serving.conversations.turn import ServedTurn, TurnAsk, Turns
from titan_rl.serving.http.api_error import ApiError
from titan_rl.serving.http.body import read
from titan_rl.serving.http.dialect import OPENAI, named_event
from titan_rl.serving.http.exchange import Answer, Emit, Exchanges, encoded
from titan_rl.serving.protocols.openai.bodies import ResponsesBody
from titan_rl.serving.protocols.openai.response_items import OutputItems, messages_from_input, tools_from_responses
from titan_rl.serving.protocols.wire import session_id_of, token_logprobs, turns_of, weight_versions
from titan_rl.types import FinishReason

_LOGPROBS = "message.output_text.logprobs"


class StoredResponses:
    """The conversations of responses that were given, by their ids, as JSON; the least recently used are forgotten.
    Each is its caller's, and is found by nobody else."""

    def __init__(self, most_bytes: int) -> None:
        self._messages: LRUCache[tuple[bytes, str], bytes] = LRUCache(most_bytes, getsizeof=len)

    def find(self, caller: Caller, response_id: str | None) -> Sequence[Message]:
        """
        Raises:
            ApiError: 400, there is none of this id, or it was forgotten.
        """
        if response_id is None:
            return ()
        if (found := self._messages.get((caller.name, response_id))) is None:
            message = "previous_response_id is of no response that is stored here; send the whole input"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        return msgspec.json.decode(found)

    def add(self, caller: Caller, response_id: str, messages: Sequence[Message]) -> None:
        with suppress(ValueError):  # one that is larger than all may be
            self._messages[caller.name, response_id] = msgspec.json.encode(messages)


class ResponsesEndpoint:
    def __init__(self, turns: Turns | None, exchanges: Exchanges, stop_token_ids: Sequence[int]) -> None:
        self._turns = turns
        self._exchanges = exchanges
        self._stop_token_ids = stop_token_ids
        self._stored = StoredResponses(exchanges.limits.response_bytes)

    def __call__(self, request: Request) -> Answer:
        turns = turns_of(self._turns)
        body = read(request, ResponsesBody)
        turns.policy.check_model(body.model)
        caller = caller_of(request)
        said = [*self._stored.find(caller, body.previous_response_id), *messages_from_input(body.input)]
        instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        tools = tools_from_responses(body.tools)
        turn = turns.begin(
            TurnAsk(
                caller,
                [*instructions, *said],
                None if body.tool_choice == "none" else tools,
                body.max_output_tokens,
                body.sampling(self._stop_token_ids),
                one_call=body.parallel_tool_calls is False,
                session_id=session_id_of(request),
                param="input",
            ),
            "resp_",
        )
        keep = None if body.store is False else partial(self._stored.add, caller)
        work = _Work(turns, turn, body, said, keep)
        dialect = replace(OPENAI, event=named_event, stream_error=work.error_event, last=b"")
        return Answer(self._exchanges, work, num_places=1, stream=bool(body.stream), dialect=dialect)


class _Work:
    """How one turn is told of."""

    def __init__(
        self,
        turns: Turns,
        turn: ServedTurn,
        body: ResponsesBody,
        said: Sequence[Message],
        keep: Callable[[str, Sequence[Message]], None] | None,
    ) -> None:
        self._turns = turns
        self._turn = turn
        self._body = body
        self._said = said
        self._keep = keep
        self._created = int(time.time())
        self._num_events = 0
        self._emit: Emit | None = None
        self._with_logprobs = _LOGPROBS in (body.include or ())

    async def __call__(self, emit: Emit | None) -> Any:
        self._emit = emit
        output = OutputItems(self._turn.id, self._tell, with_logprobs=self._with_logprobs)

        def on_delta(_: int, delta: Delta) -> None:
            self._begin()
            output.take(delta, self._logprobs(delta))

        (reply,) = await self._turn.replies(None if emit is None else on_delta)
        self._begin()
        if emit is None:
            kept = reply.completion
            delta = Delta(reply.reasoning, reply.content, reply.tool_calls, kept.token_ids, kept.logprobs)
            output.take(delta, self._logprobs(delta))
        status = "incomplete" if reply.finish_reason is FinishReason.LENGTH else "completed"
        output.end(status)
        response = encoded({**self._response(status, output.items), **self._ending(reply)})
        self._turn.keep([reply])
        if self._keep is not None:
            self._keep(self._turn.id, [*self._said, reply.message])
        self._tell(f"response.{status}", {"response": response})
        return response

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """The clients of OpenAI raise what is under `error`; the rest is the event as it is documented."""
        told = error.body()["error"]
        return {"type": "error", "sequence_number": self._num_events, **told, "error": told}

    def _begin(self) -> None:
        if not self._num_events:
            for kind in ("created", "in_progress"):
                self._tell(f"response.{kind}", {"response": self._response("in_progress", [])})

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        if self._emit is not None:
            self._emit({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        told = token_logprobs(self._turns.text, delta.token_ids, delta.logprobs)
        return [{**each, "bytes": each["bytes"] or []} for each in told]

    def _ending(self, reply: Reply) -> dict[str, Any]:
        num_prompt, num_completion = len(self._turn.prompt_token_ids), len(reply.completion.token_ids)
        cached = int(reply.completion.metrics.get("cached_prompt_tokens", 0))
        thought = len(self._turns.text.encode(reply.reasoning)) if reply.reasoning else 0
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            more = {"prompt_token_ids": list(self._turn.prompt_token_ids), "token_ids": reply.completion.token_ids}
        return {
            "completed_at": int(time.time()),
            "weight_versions": weight_versions(reply.completion),
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": min(num_prompt, cached), "cache_write_tokens": 0},
                "output_tokens": num_completion,
                "output_tokens_details": {"reasoning_tokens": min(num_completion, thought)},
                "total_tokens": num_prompt + num_completion,
            },
            **more,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._turn.id,
            "object": "response",
            "created_at": self._created,
            "model": self._turns.policy.model,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "tools": [{"strict": None, **tool} for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "background": False,
            "store": self._keep is not None,
            "metadata": body.metadata or {},
            "usage": None,
        }
