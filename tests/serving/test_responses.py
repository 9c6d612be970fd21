"""`/v1/responses` with OpenAI's client, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from byte_model import qwen3
from clients import ANSWERS, CALL, TOKENIZER, chat_server, openai_client
from openai.lib.responses_tool_runner import AsyncRegisteredFunction, AsyncResponsesToolRunner
from openai.types.responses import Response, ResponseErrorEvent, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from served import client_of

from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import serve

RESPONSES = "/v1/responses"
TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOKENS: Any = {"return_token_ids": True}


def events_in(text: str) -> list[dict[str, Any]]:
    blocks = [block.splitlines() for block in text.split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": None, "call_id": None} for item in response["output"]]
    return {**response, "output": output, "id": None, "created_at": None, "completed_at": None}


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize("make", [qwen3, ChatTemplateRenderer])
async def test_stream_equals_non_streamed_response(name: str, make: Callable[..., Any]) -> None:
    asked = {"input": name, "tools": [TOOL], "include": ["message.output_text.logprobs"], **TOKENS}
    async with chat_server(make(TOKENIZER)) as stage, client_of(stage.app) as client:
        whole = (await client.post(RESPONSES, json=asked)).json()
        events = events_in((await client.post(RESPONSES, json={**asked, "stream": True})).text)
    Response.model_validate(whole)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert (events[-1]["type"], whole["status"]) == ("response.completed", "completed")
    last = events[-1]["response"]
    for at, item in enumerate(last["output"]):
        mine = [event for event in events if event.get("output_index") == at]
        assert (mine[0]["type"], mine[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert mine[-1]["item"] == item
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    if name not in ("hi", "think"):  # trailing white space is streamed differently there
        assert without_ids(last) == without_ids(whole)


async def test_returned_items_keep_their_tokens() -> None:
    async with chat_server(qwen3(TOKENIZER)) as stage, openai_client(stage) as client:
        said: Any = [{"role": "user", "content": "look"}]
        for stream in (False, True):
            asked: Any = {"model": "policy", "instructions": "be brief", "tools": [TOOL], "extra_body": TOKENS}
            first = await answered(client, stream, input=said, **asked)
            message, call = first.output
            assert (message.content[0].text, call.name, json.loads(call.arguments)) == ("I look.", "look", {"at": "ü"})
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "sky"}
            items = [item.model_dump(exclude_unset=True) for item in first.output]
            then = await answered(client, stream, input=[*said, *items, output], **asked)
            so_far = first.prompt_token_ids + first.token_ids
            assert then.prompt_token_ids[: len(so_far)] == so_far
            by_id = await answered(client, stream, input=[output], previous_response_id=first.id, **asked)
            assert by_id.prompt_token_ids == then.prompt_token_ids


async def answered(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        async for _ in events:
            pass
        return await events.get_final_response()


def test_sync_client() -> None:
    async def whole() -> None:
        async with chat_server(qwen3(TOKENIZER)) as stage, serve(stage.app) as url:
            await asyncio.to_thread(sync, url)

    def sync(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            done = client.responses.create(model="policy", input="think")
            assert (done.output[0].type, done.output_text) == ("reasoning", "yes")
            assert done.usage is not None
            assert done.usage.output_tokens_details.reasoning_tokens == 2
            with client.responses.stream(model="policy", input="think") as stream:
                kinds = {event.type for event in stream}
            assert "response.reasoning_text.delta" in kinds
            cut = client.responses.create(model="policy", input="sky", max_output_tokens=2)
            assert (cut.status, cut.output_text) == ("incomplete", "bl")
            assert cut.incomplete_details is not None
            assert cut.incomplete_details.reason == "max_output_tokens"
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model="policy", input="x", tools=[{"type": "web_search"}])
            assert caught.value.param == "tools[0].type"

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "look", "arguments": "{}"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
    ],
)
async def test_rejects_unsupported_fields_by_name(change: dict[str, Any], param: str) -> None:
    async with chat_server() as stage, client_of(stage.app) as client:
        response = await client.post(RESPONSES, json={"input": "x", **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_unstored_or_evicted_previous_response_is_a_400() -> None:
    async with chat_server(limits=ServerLimits(response_bytes=100)) as stage, client_of(stage.app) as client:

        async def ask(**more: Any) -> Any:
            return (await client.post(RESPONSES, json={"input": "sky", **more})).json()

        first, unstored = await ask(), await ask(store=False)
        for gone in (unstored["id"], (await ask()) and first["id"]):
            assert (await ask(previous_response_id=gone))["error"]["code"] == "previous_response_not_found"


async def test_failing_stream_ends_with_the_error() -> None:
    limits = ServerLimits(request_s=0.3)
    async with chat_server(limits=limits, engine={"block_at_step": 3}) as stage, openai_client(stage) as client:
        stream = await client.responses.create(model="policy", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="not answered within"):
            async for _ in stream:
                pass


async def test_stream_error_is_a_protocol_event() -> None:
    limits = ServerLimits(request_s=0.3)
    async with chat_server(limits=limits, engine={"block_at_step": 3}) as stage, client_of(stage.app) as client:
        text = (await client.post(RESPONSES, json={"input": "hi", "stream": True})).text
    last = events_in(text)[-1]
    assert isinstance(EVENT.validate_python(last), ResponseErrorEvent)
    assert (last["type"], last["code"]) == ("error", "timeout")
    assert "\nevent: error\n" in text


async def test_parallel_tool_calls_can_be_disabled() -> None:
    answers = {"look": CALL + CALL}
    async with chat_server(qwen3(TOKENIZER), answers=answers) as stage, client_of(stage.app) as client:
        for parallel, number in ((True, 2), (False, 1)):
            asked = {"input": "look", "tools": [TOOL], "parallel_tool_calls": parallel}
            response = (await client.post(RESPONSES, json=asked)).json()
            assert [item["type"] for item in response["output"]] == ["function_call"] * number


async def test_stored_response_can_be_retrieved_and_deleted() -> None:
    async with chat_server() as stage, openai_client(stage) as client:
        for stream in (False, True):
            given = await answered(client, stream, model="policy", input="sky")
            again = await client.responses.retrieve(given.id)
            assert (again.id, again.status, again.output_text, again.usage) == (
                *(given.id, "completed", "blue"),
                given.usage,
            )
            others = client.with_options(api_key="another's")
            with pytest.raises(openai.NotFoundError):
                await others.responses.retrieve(given.id)
            await client.responses.delete(given.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(given.id)
            with pytest.raises(openai.BadRequestError, match="names no stored response"):
                await client.responses.create(model="policy", input="sky", previous_response_id=given.id)
        unstored = await client.responses.create(model="policy", input="sky", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(unstored.id)
        kept = await client.responses.create(model="policy", input="sky")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.retrieve(kept.id, stream=True)
        assert caught.value.param == "stream"


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_runner_completes_a_conversation(stream: bool) -> None:
    class At(BaseModel):
        at: str

    async def look(given: At) -> str:
        return {"ü": "sky"}[given.at]

    answers = {"look": CALL, "<tool_response>\nsky\n</tool_response>": "It is blue."}
    async with chat_server(qwen3(TOKENIZER), answers=answers) as stage, openai_client(stage) as client:
        tool = openai.pydantic_function_tool(At, name="look")["function"]
        function: Any = AsyncRegisteredFunction({"type": "function", **tool}, lambda given: look(At(**given)))
        runner = AsyncResponsesToolRunner(functions=[function])
        done = await runner.run(client, {"model": "policy", "input": "look"}, stream=stream)
        assert done.output_text == "It is blue."
