"""`/v1/messages` with Anthropic's client, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from byte_model import qwen3
from clients import ANSWERS, CALL, TOKENIZER, anthropic_client, chat_server
from pydantic import TypeAdapter
from served import client_of

from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.api_keys import Keys
from titan_rl.serving.app import make_app
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import serve
from titan_rl.types import Completion, FinishReason, VersionSpan

MESSAGES = "/v1/messages"
TOOL: Any = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
TOKENS: Any = {"return_token_ids": True}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def events_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize("make", [qwen3, ChatTemplateRenderer])
async def test_stream_equals_non_streamed_message(name: str, make: Callable[..., Any]) -> None:
    asked = {"messages": [user(name)], "tools": [TOOL], "max_tokens": 100, **TOKENS}
    async with chat_server(make(TOKENIZER)) as stage, client_of(stage.app) as client:
        whole = (await client.post(MESSAGES, json=asked)).json()
        text = (await client.post(MESSAGES, json={**asked, "stream": True})).text
    events = events_in(text)
    Message.model_validate(whole)
    for event in events:
        EVENT.validate_python(event)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert events[-2]["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]
    assert events[0]["message"]["usage"] == {**whole["usage"], "output_tokens": 0}
    assert events[-2]["token_ids"] == whole["token_ids"]
    for at, block in enumerate(whole["content"]):
        mine = [event for event in events if event.get("index") == at]
        assert (mine[0]["type"], mine[-1]["type"]) == ("content_block_start", "content_block_stop")
        assert mine[0]["content_block"]["type"] == block["type"]
        deltas = [event["delta"] for event in mine[1:-1]]
        if block["type"] == "tool_use":
            assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]
        else:
            key = block["type"]
            assert "".join(delta[key] for delta in deltas) == block[key]


async def test_returned_content_blocks_keep_their_tokens() -> None:
    async with chat_server(qwen3(TOKENIZER)) as stage, anthropic_client(stage) as client:
        for stream in (False, True):
            asked: Any = {"model": "policy", "max_tokens": 100, "tools": [TOOL], "extra_body": TOKENS}
            asked["system"] = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
            first = await answered(client, stream, messages=[user("look")], **asked)
            text, use = first.content
            assert (text.text, use.name, use.input, first.stop_reason) == ("I look.", "look", {"at": "ü"}, "tool_use")
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sky"}]}
            content = [block.model_dump(exclude_none=True) for block in first.content]
            history = [user("look"), {"role": "assistant", "content": content}, user([result])]
            then = await answered(client, stream, messages=history, **asked)
            if not stream:  # the client drops what it does not know from the events
                so_far = first.prompt_token_ids + first.token_ids
                assert then.prompt_token_ids[: len(so_far)] == so_far
                count = await client.messages.count_tokens(
                    model="policy", messages=history, tools=[TOOL], system="be brief"
                )
                assert count.input_tokens == len(then.prompt_token_ids)


async def answered(client: anthropic.AsyncAnthropic, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        async for _ in events:
            pass
        return await events.get_final_message()


async def test_stream_reports_the_same_cached_prompt_usage_at_start_and_end() -> None:
    async def cached(request: Any, on_chunk: Any) -> Completion:
        num_prompt = len(request.prompt_token_ids)
        metrics = {"cached_prompt_tokens": float(num_prompt)}
        return Completion(request.request_id, [65], [-1.0], FinishReason.LENGTH, (VersionSpan(0, 1),), metrics=metrics)

    app = make_app(cached, model="policy", max_context=512, tokenizer=TOKENIZER, renderer=qwen3(TOKENIZER))
    asked: Any = {"model": "policy", "max_tokens": 1, "messages": [user("hi")]}
    async with client_of(app) as client:
        counted = (await client.post("/v1/messages/count_tokens", json={"messages": [user("hi")]})).json()
        whole = (await client.post("/v1/messages", json=asked)).json()
        events = events_in((await client.post("/v1/messages", json={**asked, "stream": True})).text)
    usages = [whole["usage"], events[0]["message"]["usage"], events[-2]["usage"]]
    assert [usage["input_tokens"] for usage in usages] == [counted["input_tokens"]] * 3
    assert [usage["cache_read_input_tokens"] for usage in usages] == [None] * 3


def test_sync_client() -> None:
    async def whole() -> None:
        async with chat_server(qwen3(TOKENIZER)) as stage, serve(stage.app) as url:
            await asyncio.to_thread(sync, url)

    def sync(url: str) -> None:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "policy", "max_tokens": 50}
            assert [(model.id, model.type) for model in client.models.list()] == [("policy", "model")]
            assert client.models.retrieve("policy").display_name == "policy"
            done = client.messages.create(messages=[user("think")], **asked)
            assert [block.type for block in done.content] == ["thinking", "text"]
            again = [user("think"), {"role": "assistant", "content": done.content}, user("sky")]
            with client.messages.stream(messages=again, **asked) as stream:
                assert "".join(stream.text_stream) == "blue"
            stopped = client.messages.create(messages=[user("count")], stop_sequences=["stop", "9"], **asked)
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "stop")
            cut = client.messages.create(model="policy", max_tokens=2, messages=[user("sky")])
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
            with pytest.raises(anthropic.NotFoundError, match="no model"):
                client.messages.create(model="claude", max_tokens=2, messages=[user("sky")])

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0].type"),
        ({"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "messages[1].role"),
        ({"messages": [user([{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}, "tools": [{"name": "look", "input_schema": {}}]}, "tool_choice.name"),
        ({"output_config": {"format": {}}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"messages": [user("x" * 3000)]}, "messages"),
    ],
)
async def test_rejects_unsupported_fields_by_name(change: dict[str, Any], param: str) -> None:
    async with chat_server() as stage, client_of(stage.app) as client:
        response = await client.post(MESSAGES, json={"max_tokens": 5, "messages": [user("x")], **change})
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert param in error["error"]["message"]


async def test_accepts_fields_without_effect() -> None:
    neutral = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "me"},
        "tool_choice": {"type": "auto"},
        "service_tier": "auto",
        "stop_sequences": [],
    }
    async with chat_server() as stage, client_of(stage.app) as client:
        response = await client.post(
            f"{MESSAGES}?beta=true", json={"max_tokens": 50, "messages": [user("sky")], **neutral}
        )
    assert response.json()["content"][0]["text"] == "blue"


async def test_errors_have_the_anthropic_format() -> None:
    keys, limits = Keys(api=["secret"]), ServerLimits(body_bytes=100)
    async with chat_server(limits=limits, keys=keys) as stage, serve(stage.app) as url:
        asked: Any = {"model": "policy", "max_tokens": 5}
        async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(messages=[user("x")], **asked)
            assert caught.value.body["error"]["type"] == "authentication_error"
        async with anthropic.AsyncAnthropic(base_url=f"{url}/episodes/e", api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="not this episode's"):
                await client.messages.create(messages=[user("x")], **asked)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0) as client:
            with pytest.raises(anthropic.RequestTooLargeError):
                await client.messages.create(messages=[user("x" * 200)], **asked)
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.batches.retrieve("batch")
            assert missing.value.body["error"]["type"] == "not_found_error"


async def test_failing_stream_ends_with_the_error() -> None:
    limits = ServerLimits(request_s=0.3)
    async with chat_server(limits=limits, engine={"block_at_step": 3}) as stage, anthropic_client(stage) as client:
        with pytest.raises(anthropic.APIStatusError, match="not answered within"):
            await answered(client, True, model="policy", max_tokens=50, messages=[user("hi")])


async def test_parallel_tool_calls_can_be_disabled() -> None:
    async with chat_server(qwen3(TOKENIZER), answers={"look": CALL + CALL}) as stage, client_of(stage.app) as client:
        asked = {"messages": [user("look")], "tools": [TOOL], "max_tokens": 200}
        for disabled, number in ((False, 2), (True, 1)):
            choice = {"type": "auto", "disable_parallel_tool_use": disabled}
            message = (await client.post(MESSAGES, json={**asked, "tool_choice": choice})).json()
            assert [block["type"] for block in message["content"]] == ["tool_use"] * number


async def test_any_model_name_is_accepted_with_any_model() -> None:
    async with chat_server(any_model=True) as stage, anthropic_client(stage) as client:
        done = await client.messages.create(model="claude-opus-9", max_tokens=20, messages=[user("sky")])
        assert (done.content[0].text, done.model) == ("blue", "policy")


@anthropic.beta_async_tool
async def look(at: str) -> str:
    """Look at something."""
    return {"ü": "sky"}[at]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_runner_sends_each_message_once(stream: bool) -> None:
    answers = {"look": CALL, "<tool_response>\nsky\n</tool_response>": "It is blue."}
    async with chat_server(qwen3(TOKENIZER), answers=answers) as stage, anthropic_client(stage) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="policy", max_tokens=200, tools=[look], messages=[user("look")], system="be brief", stream=stream
        )
        said = [await turn.get_final_message() if stream else turn async for turn in runner]
        assert [[block.type for block in message.content] for message in said] == [["tool_use"], ["text"]]
        assert said[1].content[0].text == "It is blue."
        assert runner._thread.previous_message_id == said[1].id
        assert said[1].usage.input_tokens > said[0].usage.input_tokens + said[0].usage.output_tokens


async def test_thread_continues_from_sampled_tokens_and_can_branch() -> None:
    create, asked = {"type": "create"}, {"max_tokens": 100, **TOKENS}
    async with chat_server(qwen3(TOKENIZER)) as stage, client_of(stage.app) as client:
        whole = {**asked, "system": "be brief", "tools": [TOOL], "messages": [user("sky")], "thread": create}
        first = (await client.post(MESSAGES, json=whole)).json()
        on = {"type": "continue", "previous_message_id": first["id"]}
        so_far = first["prompt_token_ids"] + first["token_ids"]
        for said, answer in (("sky", "blue"), ("hi", "Grüße, 世界 🎉!")):
            then = (await client.post(MESSAGES, json={**asked, "messages": [user(said)], "thread": on})).json()
            assert then["content"][0]["text"] == answer
            assert then["prompt_token_ids"][: len(so_far)] == so_far
        same = {"system": "be brief", "tools": [TOOL]}
        response = await client.post(MESSAGES, json={**asked, **same, "messages": [user("sky")], "thread": on})
        assert response.json()["prompt_token_ids"][: len(so_far)] == so_far


async def test_client_recreates_an_evicted_thread() -> None:
    limits = ServerLimits(request_s=30.0, response_bytes=10)
    async with chat_server(qwen3(TOKENIZER), limits=limits) as stage, anthropic_client(stage) as client:
        thread = client.beta.messages.thread(model="policy", max_tokens=50)
        assert [(await thread.send(user(said))).content[-1].text for said in ("sky", "think", "sky")] == [
            "blue", "yes", "blue",
        ]  # fmt: skip
        assert [message["role"] for message in thread.messages] == ["user", "assistant"] * 3


async def test_thread_errors_have_the_codes_that_clients_handle() -> None:
    async with chat_server(keys=Keys(api=["a", "b"])) as stage, serve(stage.app) as url:
        asked: Any = {"model": "policy", "max_tokens": 50, "messages": [user("sky")]}
        codes: list[str | None] = []
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="a", max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=url, api_key="b", max_retries=0) as other,
        ):
            first = await client.beta.messages.create(system="be brief", thread={"type": "create"}, **asked)
            on: Any = {"type": "continue", "previous_message_id": first.id}
            for whose, refusal, more in (
                (other, anthropic.NotFoundError, {"thread": on}),
                (client, anthropic.NotFoundError, {"thread": {**on, "previous_message_id": "msg_1"}}),
                (client, anthropic.BadRequestError, {"thread": on, "system": "be long"}),
                (client, anthropic.BadRequestError, {"thread": on, "tools": [TOOL]}),
                (client, anthropic.BadRequestError, {"thread": {"type": "fork"}}),
                (client, anthropic.BadRequestError, {"thread": {"type": "continue"}}),
            ):
                with pytest.raises(refusal) as caught:
                    await whose.beta.messages.create(**asked, **more)
                codes.append(caught.value.error_code)
    assert codes == ["thread_not_found"] * 2 + ["thread_fingerprint_mismatch"] * 2 + [
        "thread_unsupported_request", None,
    ]  # fmt: skip


async def test_request_errors_have_error_codes() -> None:
    async with chat_server() as stage, anthropic_client(stage) as client:
        for more, code in (
            ({"model": "claude"}, "model_not_found"),
            ({"messages": [user("x" * 3000)]}, "context_length_exceeded"),
        ):
            with pytest.raises(anthropic.APIStatusError) as caught:
                await client.messages.create(**{"model": "policy", "max_tokens": 5, "messages": [user("x")], **more})
            assert caught.value.error_code == code
