"""Forced tool calls, schemas and other sampling settings, from each protocol to the engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import xgrammar
from byte_model import VOCAB, byte_tokenizer, qwen3, script
from served import client_of, served

from titan_rl.generation.continuation import request_fn
from titan_rl.generation.engine import TokenDelta
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.serving.app import make_app
from titan_rl.serving.conversations.constraint import CallForm, Constraining
from titan_rl.serving.episode_store import EpisodeStore
from titan_rl.serving.text import Text
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.types import EXTRA_SAMPLING, Completion, FinishReason, SamplingParams, VersionSpan

TOKENIZER = byte_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD, STOP = ({"name": "add", "parameters": SCHEMA}, {"name": "stop"})
ANSWER = '{"a": 3}'
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


class ConstrainedEngine(ScriptedEngine):
    """Scripted engine that records sampling parameters. Its constraints leave a logprob of -0.5 at each token."""

    extra_sampling = EXTRA_SAMPLING

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: list[SamplingParams] = []

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.asked.append(request.sampling)

    def step(self) -> list[TokenDelta]:
        return [replace(delta, allowed_logprobs=[-0.5] * len(delta.token_ids)) for delta in super().step()]


@asynccontextmanager
async def constrained(says: str = ANSWER, **app: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[SamplingParams]]]:
    engines: list[ConstrainedEngine] = []

    def make() -> ConstrainedEngine:
        engines.append(ConstrainedEngine(script=script(TOKENIZER, lambda _: says), vocab_size=VOCAB))
        return engines[-1]

    loop = EngineLoop(make, stream_interval=1)
    await loop.start()
    router = GeneratorRouter([LocalReplica("engine", loop, lambda version: [])])
    settings = {"model": "policy", "max_context": 4096, "tokenizer": TOKENIZER, "renderer": qwen3(TOKENIZER), **app}
    try:
        async with client_of(make_app(router.stream, **settings)) as client:
            yield client, engines[0].asked
    finally:
        await router.close()


def allows(tag: str | None, text: str) -> bool:
    """Return whether the constraint allows a completion of this text, including the stop token."""
    assert tag is not None
    info = xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=VOCAB)
    matcher = xgrammar.GrammarMatcher(
        xgrammar.GrammarCompiler(info).compile_structural_tag(tag), override_stop_tokens=[END]
    )
    return all(map(matcher.accept_token, [*TOKENIZER.encode(text, add_special_tokens=False), END]))


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "function": one} for one in (ADD, STOP)]
    return CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": tools, **more}


def responses(**more: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "parameters": {}, **one} for one in (ADD, STOP)]
    return RESPONSES, {"input": "x", "tools": tools, **more}


def messages(**more: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"name": one["name"], "input_schema": one.get("parameters", {})} for one in (ADD, STOP)]
    return MESSAGES, {"max_tokens": 500, "messages": [{"role": "user", "content": "x"}], "tools": tools, **more}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


REQUIRED = [
    chat(tool_choice="required"),
    responses(tool_choice="required"),
    messages(tool_choice={"type": "any"}),
]
NAMED = [
    chat(tool_choice=named("add")),
    responses(tool_choice={"type": "function", "name": "add"}),
    messages(tool_choice={"type": "tool", "name": "add"}),
]
TYPED = [
    chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}),
    responses(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}),
    messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
]
ANY_OBJECT = [chat(response_format={"type": "json_object"}), responses(text={"format": {"type": "json_object"}})]


async def tag_of(path: str, body: dict[str, Any], says: str) -> str | None:
    async with constrained(says) as (client, asked):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
    return asked[0].constraint


@pytest.mark.parametrize(("path", "body"), REQUIRED)
async def test_required_tool_choice_allows_calls_of_any_tool(path: str, body: dict[str, Any]) -> None:
    tag = await tag_of(path, body, CALL)
    assert allows(tag, CALL)
    assert allows(tag, OTHER_CALL)
    assert allows(tag, f"{CALL}\n{OTHER_CALL}\n{CALL}")
    assert allows(tag, f"<think>\nhm\n</think>\n\n{CALL}"), "reasoning may come first"
    for wrong in ("no", "", ANSWER, CALL.replace("add", "sub"), CALL.replace("3", "true"), f"Well: {CALL}"):
        assert not allows(tag, wrong), wrong


@pytest.mark.parametrize(("path", "body"), NAMED)
async def test_named_tool_choice_allows_one_call_of_that_tool(path: str, body: dict[str, Any]) -> None:
    tag = await tag_of(path, body, CALL)
    assert allows(tag, CALL)
    assert not allows(tag, OTHER_CALL)
    assert not allows(tag, f"{CALL}\n{CALL}")


async def test_allows_a_single_call_without_parallel_tool_calls() -> None:
    tag = await tag_of(*chat(tool_choice="required", parallel_tool_calls=False), CALL)
    assert allows(tag, OTHER_CALL)
    assert not allows(tag, f"{CALL}\n{CALL}")


@pytest.mark.parametrize(("path", "body"), TYPED)
async def test_json_schema_allows_matching_json_or_a_tool_call(path: str, body: dict[str, Any]) -> None:
    tag = await tag_of(path, body, ANSWER)
    assert allows(tag, ANSWER)
    assert allows(tag, '{\n  "a": 3\n}')
    assert allows(tag, CALL)
    for wrong in ("{}", '{"a": "x"}', "3", '{"a": 3, "b": 4}', '{"a":' + " " * 33 + "3}"):
        assert not allows(tag, wrong), wrong
    alone = await tag_of(path, {**body, "tools": None}, ANSWER)
    assert allows(alone, ANSWER)
    assert not allows(alone, CALL)


@pytest.mark.parametrize(("path", "body"), ANY_OBJECT)
async def test_json_object_format_allows_any_object(path: str, body: dict[str, Any]) -> None:
    tag = await tag_of(path, {**body, "tools": None}, ANSWER)
    assert allows(tag, '{"x": [1, {"y": null}]}')
    assert not allows(tag, "[1]")
    assert not allows(tag, '{"x": "<|im_start|>"}'), "text must not contain the model's markup"


async def test_constraint_allows_reasoning_only_when_the_prompt_leaves_it_open() -> None:
    constraining = Constraining(qwen3(TOKENIZER), Text(TOKENIZER))
    assert constraining.call_form == CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
    async with constrained() as (client, asked):
        body = {"response_format": {"type": "json_object"}, "tools": None}
        for kwargs in ({}, {"enable_thinking": False}):
            path, whole = chat(**body, chat_template_kwargs=kwargs)
            assert (await client.post(path, json=whole)).status_code == 200
    free, closed = asked
    assert allows(free.constraint, "<think>a</think>\n\n{}")
    assert not allows(closed.constraint, "<think>a</think>\n\n{}"), "the prompt has ended the reasoning"
    assert allows(closed.constraint, "{}")


@pytest.mark.parametrize(("path", "body"), [*REQUIRED, *NAMED, *TYPED, *ANY_OBJECT])
async def test_rejects_constraints_that_the_engine_does_not_support(path: str, body: dict[str, Any]) -> None:
    app: Any = {"tokenizer": TOKENIZER, "renderer": qwen3(TOKENIZER), "max_context": 4096}
    async with served(engine={"max_context": 4096}, **app) as stage, client_of(stage.app) as client:
        for stream in (False, True):
            answer = await client.post(path, json={**body, "stream": stream})
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert "not supported by the engine behind this server; leave it out" in message
            assert message.startswith(("tool_choice", "response_format", "text.format", "output_config.format"))


async def test_rejects_constraints_for_a_plain_generate_function() -> None:
    async def generate(prompt: Sequence[int], *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        return Completion(request_id, [65, END], [-0.1, -0.1], FinishReason.STOP, (VersionSpan(0, 2),))

    app = make_app(
        request_fn(generate), model="policy", max_context=4096, tokenizer=TOKENIZER, renderer=qwen3(TOKENIZER)
    )
    async with client_of(app) as client:
        path, body = TYPED[0]
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert "cannot enforce a JSON schema" in answer.json()["error"]["message"]


async def test_rejects_forced_calls_when_the_renderer_cannot_parse_calls() -> None:
    renderer = ChatTemplateRenderer(TOKENIZER)
    async with constrained(renderer=renderer) as (client, asked):
        path, body = chat(tool_choice="required")
        refused = await client.post(path, json=body)
        path, body = TYPED[0]
        assert (await client.post(path, json=body)).status_code == 200, "a schema can still be enforced"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert "set model.renderer to one that does" in refused.json()["error"]["message"]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": named("nothing")}, "tool_choice"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "stop_token_ids"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ],
)
async def test_rejects_unsatisfiable_constraints_by_name(more: dict[str, Any], param: str) -> None:
    async with constrained() as (client, _):
        path, body = chat(**more)
        response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_penalties_and_logit_bias_reach_the_engine_unchanged() -> None:
    asked_for = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "logit_bias": {"65": 2}}
    bodies = [chat(**asked_for), responses(**asked_for), messages(**asked_for)]
    start = TOKENIZER.encode("<|im_start|>assistant\n")
    bodies.append(("/v1/completions", {"prompt": start, **asked_for}))
    bodies.append(("/inference/v1/generate", {"token_ids": start, "sampling_params": {**asked_for, "max_tokens": 4}}))
    async with constrained() as (client, asked):
        for path, body in bodies:
            assert (await client.post(path, json=body)).status_code == 200
    expected = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": ((65, 2.0),),
    }
    assert [each.shaping for each in asked] == [expected] * 5


class TestEpisodes:
    """Constraints in the episode of an agent in training."""

    @asynccontextmanager
    async def stage(self, says: str) -> AsyncIterator[tuple[Any, httpx.AsyncClient, list[SamplingParams]]]:
        store = EpisodeStore(qwen3(TOKENIZER))
        async with constrained(says, episodes=store) as (client, asked):
            episode = store.open("one", sampling=SamplingParams(500, temperature=0.5, min_tokens=0))
            client.headers["authorization"] = f"Bearer {episode.key}"
            yield episode, client, asked

    async def test_constraint_and_allowed_logprobs_are_recorded(self) -> None:
        async with self.stage(CALL) as (episode, client, asked):
            for path, body in (NAMED[0], chat()):
                assert (await client.post(path, json=body)).status_code == 200
            episode.end()
            rollout = Rollout("g/0", "g", 0, None)
            episode.fill_in(rollout)
        assert asked[0].temperature == 0.5, "other parameters are the run's"
        forced, free = rollout.turns
        assert forced.sampling is not None
        assert forced.sampling.constraint == asked[0].constraint
        assert list(forced.completion.allowed_logprobs or ()) == [-0.5] * len(forced.completion.token_ids)
        assert free.completion.allowed_logprobs is None
        rollout.advantage = 1.0
        samples = build_samples(RolloutGroup("g", None, [rollout]))
        assert sum(sample.num_trained_tokens for sample in samples) == len(free.completion.token_ids)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("presence_penalty", 0.5),
            ("frequency_penalty", 0.5),
            ("repetition_penalty", 1.1),
            ("logit_bias", {"65": 1}),
        ],
    )
    async def test_rejects_sampling_settings_that_training_cannot_account_for(self, name: str, value: Any) -> None:
        async with self.stage(ANSWER) as (_, client, asked):
            for make in (chat, responses, messages):
                path, body = make(**{name: value})
                response = await client.post(path, json=body)
                assert response.status_code == 400
                message = response.json()["error"]["message"]
                assert f"{name} = " in message
                assert "training does not account for that; leave it out" in message
            neutral = {
                "presence_penalty": 0,
                "repetition_penalty": 1,
                "logit_bias": {},
                "top_logprobs": 2,
                "logprobs": True,
            }
            path, body = chat(**neutral)
            assert (await client.post(path, json=body)).status_code == 200
        assert [each.top_logprobs for each in asked] == [2]


class TestPrompts:
    async def test_chat_template_kwargs_change_only_their_own_conversation(self) -> None:
        async with constrained("fine") as (client, _):
            path, body = chat(tools=None, return_token_ids=True)
            usual = (await client.post(path, json=body)).json()
            closed = (await client.post(path, json={**body, "chat_template_kwargs": {"enable_thinking": False}})).json()
            said = [*body["messages"], closed["choices"][0]["message"], {"role": "user", "content": "y"}]
            more = {**body, "messages": said, "chat_template_kwargs": {"enable_thinking": False}}
            second = (await client.post(path, json=more)).json()
            wrong = await client.post(path, json={**body, "chat_template_kwargs": {"enable_thoughts": False}})
        assert TOKENIZER.decode(closed["prompt_token_ids"]).endswith("<think>\n\n</think>\n\n")
        assert TOKENIZER.decode(usual["prompt_token_ids"]).endswith("assistant\n")
        before = [*closed["prompt_token_ids"], *closed["choices"][0]["token_ids"]]
        assert second["prompt_token_ids"][: len(before)] == before
        assert wrong.status_code == 400
        assert "enable_thinking" in wrong.json()["error"]["message"]

    async def test_unknown_chat_template_kwarg_error_lists_the_known_ones(self) -> None:
        template = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}" + (
            "{%- if add_generation_prompt -%}<|im_start|>assistant\n{{ mood }}{%- endif -%}"
        )
        tokenizer = byte_tokenizer(template)
        async with constrained("fine", renderer=ChatTemplateRenderer(tokenizer), tokenizer=tokenizer) as (client, _):
            path, body = chat(tools=None, return_token_ids=True, chat_template_kwargs={"mood": "Sad: "})
            completion = (await client.post(path, json=body)).json()
            wrong = await client.post(path, json={**body, "chat_template_kwargs": {"tone": "Sad: "}})
        assert TOKENIZER.decode(completion["prompt_token_ids"]).endswith("assistant\nSad: ")
        assert "it reads mood" in wrong.json()["error"]["message"]

    async def test_continue_final_message_continues_a_prefilled_reply(self) -> None:
        begun = {"role": "assistant", "content": "Well, "}
        async with constrained("Well, fine") as (client, _):
            path, body = chat(
                tools=None, return_token_ids=True, continue_final_message=True, add_generation_prompt=False
            )
            body = {**body, "messages": [*body["messages"], begun]}
            completion = (await client.post(path, json=body)).json()
            whole = {"role": "assistant", "content": "Well, " + completion["choices"][0]["message"]["content"]}
            said = [*body["messages"][:-1], whole, {"role": "user", "content": "y"}]
            second = (await client.post(path, json={"messages": said, "return_token_ids": True})).json()
            refused = [
                {**body, "add_generation_prompt": True},
                {**body, "messages": body["messages"][:1]},
                {"messages": body["messages"][:1], "add_generation_prompt": False},
            ]
            codes = [(await client.post(path, json=each)).status_code for each in refused]
        assert TOKENIZER.decode(completion["prompt_token_ids"]).endswith("assistant\nWell, ")
        assert completion["choices"][0]["message"]["content"] == "fine"
        before = [*completion["prompt_token_ids"], *completion["choices"][0]["token_ids"]]
        assert second["prompt_token_ids"][: len(before)] == before
        assert codes == [400, 400, 400]

    async def test_completion_echoes_its_prompt(self) -> None:
        prompt = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        async with constrained("fine") as (client, _):
            body = {"prompt": prompt, "max_tokens": 50, "echo": True}
            whole = (await client.post("/v1/completions", json=body)).json()
            streamed = (await client.post("/v1/completions", json={**body, "stream": True})).text
            refused = await client.post("/v1/completions", json={**body, "logprobs": 1})
        assert whole["choices"][0]["text"] == "user\nx\nassistant\nfine"
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "user\nx\nassistant\nfine"
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")

    async def test_tokenize_and_detokenize_round_trip(self) -> None:
        async with constrained("fine") as (client, _):
            text = (await client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
            path, body = chat(return_token_ids=True)
            prompt = (await client.post(path, json=body)).json()["prompt_token_ids"]
            asked = {"messages": body["messages"], "tools": body["tools"]}
            conversation = (await client.post("/tokenize", json=asked)).json()
            back = (await client.post("/detokenize", json={"tokens": prompt})).json()
            neither = await client.post("/tokenize", json={})
        assert (text["count"], text["tokens"]) == (3, TOKENIZER.encode("aé"))
        assert (text["token_strs"][0], text["max_model_len"]) == ("a", 4096)
        assert conversation["tokens"] == prompt
        assert back["prompt"] == TOKENIZER.decode(prompt)
        assert neither.status_code == 400
