"""OpenAI's chat and text completions with OpenAI's client, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from byte_model import qwen3
from clients import ANSWERS, TOKENIZER, TOOL, chat_server, openai_client
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from served import client_of, served, until

from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.app import make_app
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import serve
from titan_rl.types import Completion, FinishReason, VersionSpan

CHAT = "/v1/chat/completions"


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def chat(client: httpx.AsyncClient, said: str, **more: Any) -> httpx.Response:
    return await client.post(CHAT, json={"messages": [user(said)], **more})


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_conversation_keeps_its_sampled_tokens() -> None:
    async with chat_server() as stage, openai_client(stage) as client:
        ask = client.chat.completions.create
        more: Any = {"return_token_ids": True}
        messages = [{"role": "developer", "content": "be brief"}, user("hi")]
        first: Any = await ask(model="policy", messages=messages, extra_body=more)
        assert first.choices[0].message.content == ANSWERS["hi"]
        assert first.choices[0].finish_reason == "stop"
        assert first.usage.total_tokens == len(first.prompt_token_ids) + len(first.choices[0].token_ids)
        messages += [first.choices[0].message.model_dump(), user("sky")]
        second: Any = await ask(model="policy", messages=messages, extra_body=more)
        so_far = first.prompt_token_ids + first.choices[0].token_ids
        assert second.prompt_token_ids[: len(so_far)] == so_far
        assert second.choices[0].message.content == "blue"
        assert second.choices[0].weight_versions[0]["version"] == "0"


def test_sync_client() -> None:
    async def whole() -> None:
        async with chat_server() as stage, serve(stage.app) as url:
            await asyncio.to_thread(sync, url)

    def sync(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            done = client.chat.completions.create(model="policy", messages=[user("sky")])
            assert done.choices[0].message.content == "blue"
            with client.chat.completions.stream(model="policy", messages=[user("hi")]) as stream:
                for _ in stream:
                    pass
                assert stream.get_final_completion().choices[0].message.content == ANSWERS["hi"]
            with pytest.raises(openai.NotFoundError, match="no model"):
                client.chat.completions.create(model="other", messages=[user("hi")])
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="policy", messages=[user("hi")], frequency_penalty=1)
            assert caught.value.param == "frequency_penalty"
            assert "frequency_penalty: not supported by the engine behind this server" in caught.value.message
            with pytest.raises(openai.BadRequestError, match="response_format: not supported by the engine"):
                client.chat.completions.create(
                    model="policy", messages=[user("hi")], response_format={"type": "json_object"}
                )
            text = client.completions.create(model="policy", prompt="<|im_start|>assistant\n", max_tokens=3)
            assert len(text.choices[0].text) == 3

    asyncio.run(whole())


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize("make", [qwen3, ChatTemplateRenderer])
@pytest.mark.parametrize("with_tools", [False, True])
async def test_stream_equals_non_streamed_completion(name: str, make: Callable[..., Any], with_tools: bool) -> None:
    more: Any = {"return_token_ids": True, "logprobs": True, "n": 2, **({"tools": [TOOL]} if with_tools else {})}
    async with chat_server(make(TOKENIZER)) as stage, client_of(stage.app) as client:
        whole = (await chat(client, name, **more)).json()
        events = chunks((await chat(client, name, stream=True, stream_options={"include_usage": True}, **more)).text)
    ChatCompletion.model_validate(whole, strict=True)
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert events.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        message = choice["message"]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [token for one in mine for token in one.get("token_ids", [])] == choice["token_ids"]
        logprobs = [entry for one in mine if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert joined(events, choice["index"]) == (message["content"] or "")
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        reasoning = "".join(one["delta"].get("reasoning_content", "") for one in mine)
        assert reasoning == message.get("reasoning_content", "")
        calls = [call for one in mine for call in one["delta"].get("tool_calls", [])]
        functions = [call["function"] for call in message.get("tool_calls", [])]
        assert [call["function"] for call in calls] == functions


async def test_text_is_streamed_incrementally() -> None:
    async with chat_server() as stage, client_of(stage.app) as client:
        events = chunks((await chat(client, "hi", stream=True)).text)
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert len(pieces) > 5
    assert "\ufffd" not in "".join(pieces)


async def test_tool_call_round_trip() -> None:
    async with chat_server(qwen3(TOKENIZER)) as stage, openai_client(stage) as client:
        messages: Any = [user("look")]
        more: Any = {"return_token_ids": True}
        for stream in (False, True):
            if stream:
                async with client.chat.completions.stream(
                    model="policy", messages=messages, tools=[TOOL], extra_body=more
                ) as events:
                    async for _ in events:
                        pass
                    done: Any = await events.get_final_completion()
            else:
                done = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL], extra_body=more
                )
            choice = done.choices[0]
            (call,) = choice.message.tool_calls
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
            assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "ü"})
            reply = {"role": "tool", "tool_call_id": call.id, "content": "sky"}
            follow = [*messages, choice.message.model_dump(exclude_unset=True), reply]
            then: Any = await client.chat.completions.create(
                model="policy", messages=follow, tools=[TOOL], extra_body=more
            )
            end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
            assert end in then.prompt_token_ids
            if not stream:
                so_far = done.prompt_token_ids + choice.token_ids
                assert then.prompt_token_ids[: len(so_far)] == so_far


async def test_stop_string_ends_text_and_tokens() -> None:
    async with chat_server() as stage, client_of(stage.app) as client:
        for stream in (False, True):
            response = await chat(client, "count", stop=["stop", "never"], return_token_ids=True, stream=stream)
            if stream:
                events = chunks(response.text)
                content, reason = joined(events), events[-1]["choices"][0]["finish_reason"]
                token_ids = [t for e in events for c in e["choices"] for t in c.get("token_ids", [])]
            else:
                (choice,) = response.json()["choices"]
                content, reason, token_ids = choice["message"]["content"], choice["finish_reason"], choice["token_ids"]
            assert (content, reason) == ("1, 2, 3, ", "stop")
            assert TOKENIZER.decode(token_ids) == "1, 2, 3, stop"
        await until(lambda: not any(replica.num_requests for replica in stage.router.replicas))


async def test_text_completions_stream_equals_whole() -> None:
    asked = {"prompt": ["<|im_start|>sky<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>assistant\n"]}
    async with chat_server() as stage, client_of(stage.app) as client:
        request = {**asked, "max_tokens": 12, "n": 2, "logprobs": 0, "return_token_ids": True}
        whole = (await client.post("/v1/completions", json=request)).json()
        events = chunks((await client.post("/v1/completions", json={**request, "stream": True})).text)
    TextCompletion.model_validate(whole, strict=True)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for choice in whole["choices"]:
        mine = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [t for one in mine for t in one.get("token_ids", [])] == choice["token_ids"]
        logprobs = [one["logprobs"] for one in mine if one["logprobs"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for one in logprobs for value in one[name]] == choice["logprobs"][name]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [user("x"), {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"audio": {}}, "audio"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 129}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [user("x" * 3000)]}, "messages"),
    ],
)
async def test_rejects_unsupported_fields_by_name(change: dict[str, Any], param: str) -> None:
    async with chat_server() as stage, client_of(stage.app) as client:
        response = await client.post(CHAT, json={"messages": [user("x")], **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_union_field_error_describes_the_given_type() -> None:
    async with chat_server() as stage, client_of(stage.app) as client:
        response = await client.post(CHAT, json={"messages": [user("x")], "stop": ["a"] * 17})
    assert response.json()["error"]["message"] == "stop: List should have at most 16 items after validation, not 17"


async def test_accepts_fields_without_effect() -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "user": "me",
        "store": False,
        "metadata": {},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "seed": None,
    }
    async with chat_server() as stage, client_of(stage.app) as client:
        assert (await chat(client, "sky", **neutral)).json()["choices"][0]["message"]["content"] == "blue"


async def test_chat_without_a_renderer_error_gives_the_fix() -> None:
    async with served() as stage, client_of(stage.app) as client:
        refused = await chat(client, "hi")
        assert refused.status_code == 400
        assert "add a chat_template.jinja to the model's folder, or set model.renderer" in refused.text
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 400


async def test_turns_of_a_conversation_share_a_session_id() -> None:
    asked: list[str | None] = []

    async def stream(request: Any, on_chunk: Any) -> Any:
        asked.append(request.session_id)
        token_ids = [*TOKENIZER.encode("a"), TOKENIZER.eos_token_id]
        return Completion("r", token_ids, [-1.0, -1.0], FinishReason.STOP, (VersionSpan(0, 2),))

    renderer = ChatTemplateRenderer(TOKENIZER)
    app = make_app(stream, model="policy", max_context=999, tokenizer=TOKENIZER, renderer=renderer)
    async with client_of(app) as client:
        first = (await chat(client, "hi")).json()["choices"][0]["message"]
        await client.post(CHAT, json={"messages": [user("hi"), first, user("sky")]})
        await client.post(CHAT, json={"messages": [user("hi"), {**first, "content": "b"}, user("sky")]})
        await chat(client, "hi")
        await client.post(CHAT, json={"messages": [user("hi")]}, headers={"x-session-id": "mine"})
    opened, extended, rewritten, repeated, named = asked
    assert opened == extended
    assert len({opened, rewritten, repeated}) == 3
    assert named == "mine"


async def test_conversation_exceeding_the_turn_limit_starts_over() -> None:
    limits = ServerLimits(conversation_turns=1)
    async with chat_server(limits=limits) as stage, client_of(stage.app) as client:
        more: Any = {"return_token_ids": True}
        messages = [user("hi")]
        for said in ("sky", "count", "sky"):
            answered = (await client.post(CHAT, json={"messages": messages, **more})).json()
            messages += [answered["choices"][0]["message"], user(said)]
            assert answered["choices"][0]["finish_reason"] == "stop"
        assert len(messages) == 7


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_tool_choice_none_keeps_tools_in_the_prompt(path: str) -> None:
    """A turn that may not call tools then extends earlier turns, and text that looks like a call stays text."""
    tools: Any = [TOOL]
    none: Any = "none"
    if path == "/v1/messages":
        tools, none = [{"name": "look", "input_schema": TOOL["function"]["parameters"]}], {"type": "none"}
    elif path == "/v1/responses":
        tools = [{"type": "function", **TOOL["function"]}]
    field = "input" if path == "/v1/responses" else "messages"
    async with chat_server(qwen3(TOKENIZER)) as stage, client_of(stage.app) as client:

        async def ask(messages: list[Any], **more: Any) -> dict[str, Any]:
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            asked = {field: messages, "tools": tools, limit: 100, "return_token_ids": True, **more}
            answer = await client.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            return {**body, **(body["choices"][0] if "choices" in body else {})}

        begin = {"role": "user", "content": "sky"}
        first = await ask([begin])
        history = [begin, {"role": "assistant", "content": "blue"}, {"role": "user", "content": "look"}]
        then = await ask(history, tool_choice=none)
    so_far = first["prompt_token_ids"] + first["token_ids"]
    assert then["prompt_token_ids"][: len(so_far)] == so_far
    assert TOKENIZER.decode(then["token_ids"]).startswith("I look.")
    said = json.dumps(then.get("message") or then.get("content") or then.get("output"))
    assert "<tool_call>" in said
    assert "tool_use" not in said
    assert "function_call" not in said
    assert not (then.get("message") or {}).get("tool_calls")
