"""Tool choice, JSON schemas, penalties and logit biases, from the clients of agents through vLLM to training.

The model has random weights and a byte vocabulary, so well-formed answers can only come from the constraint.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

pytest.importorskip("vllm", reason="needs the cpu or gpu extra")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import agents
import anthropic
import openai
import torch
from byte_tokenizer import byte_tokenizer
from e2e.tiny_policy import make_tiny_qwen3
from pydantic import BaseModel
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import Qwen3ForCausalLM

from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
from titan_rl.generation.router import GeneratorRouter
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.serving.app import make_app
from titan_rl.serving.episode_store import EpisodeStore
from titan_rl.serving.server import serve
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.types import SamplingParams

CONTEXT, VOCAB, SEED = 2048, 272, 7
TOKENIZER = byte_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]
    nights: Literal[1, 2, 3]


TOOL = {"name": "book", "description": "Book a trip.", "parameters": Trip.model_json_schema()}
OTHER = {"name": "wait", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: list[Any] = [{"type": "function", "function": one} for one in (TOOL, OTHER)]
ASKED: list[Any] = [{"role": "user", "content": "Where to?"}]


@dataclass
class Stage:
    url: str
    model: Any  # of transformers, the reference
    store: EpisodeStore
    loop: asyncio.AbstractEventLoop
    router: GeneratorRouter

    def do(self, work: Any) -> Any:
        """Await something in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0].double()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = make_tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, max_positions=CONTEXT)
    TOKENIZER.save_pretrained(folder)
    ready, done = threading.Event(), threading.Event()
    stages: list[Stage] = []

    async def run() -> None:
        spec = EngineSpec(str(folder), max_context=CONTEXT, max_running=8, kv_cache_gib=0.1)
        engine = EngineLoop(lambda: VLLMEngine(spec), stream_interval=1)
        await engine.start()
        router = GeneratorRouter([LocalReplica("engine", engine, lambda version: [])])
        renderer: Any = Qwen3Renderer(TOKENIZER, Qwen3RendererConfig(thinking_retention="all"))
        store = EpisodeStore(renderer)
        app = make_app(
            router.stream,
            model="policy",
            max_context=CONTEXT,
            tokenizer=TOKENIZER,
            renderer=renderer,
            any_model=True,
            episodes=store,
            wait_until_resumed=router.wait_resumed,
        )
        try:
            async with serve(app) as url:
                model = Qwen3ForCausalLM.from_pretrained(folder).float().eval()
                stages.append(Stage(url, model, store, asyncio.get_running_loop(), router))
                ready.set()
                await asyncio.to_thread(done.wait)
        finally:
            await router.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="server")
    thread.start()
    while not ready.wait(0.1):
        assert thread.is_alive(), "the server did not start"
    yield stages[0]
    done.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def client(stage: Stage) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def parse_trip(text: str | None) -> Trip:
    return Trip.model_validate_json(text or "")


class TestChat:
    def ask(self, client: openai.OpenAI, **more: Any) -> Any:
        given = {"model": "policy", "messages": ASKED, "max_tokens": 400, "extra_body": NO_THINKING, **more}
        return client.chat.completions.create(**given)

    def test_answer_matches_the_json_schema(self, client: openai.OpenAI) -> None:
        response = client.chat.completions.parse(
            model="policy", messages=ASKED, response_format=Trip, max_tokens=400, extra_body=NO_THINKING
        )
        assert isinstance(response.choices[0].message.parsed, Trip)
        assert response.choices[0].finish_reason == "stop"

    def test_json_object_mode_returns_json(self, client: openai.OpenAI) -> None:
        closing = {
            "chat_template_kwargs": {"enable_thinking": False},
            "logit_bias": {str(TOKENIZER.encode("}")[0]): 100},
        }
        response = self.ask(client, response_format={"type": "json_object"}, extra_body=closing)
        assert response.choices[0].message.content == "{}"

    def test_required_tool_choice_calls_a_tool(self, client: openai.OpenAI) -> None:
        called = set()
        for seed in range(6):
            response = self.ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed)
            (call,) = response.choices[0].message.tool_calls
            assert response.choices[0].finish_reason == "tool_calls"
            called.add(call.function.name)
            if call.function.name == "book":
                parse_trip(call.function.arguments)
        assert called == {"book", "wait"}

    def test_named_tool_choice_calls_that_tool_when_streaming(self, client: openai.OpenAI) -> None:
        named = {"type": "function", "function": {"name": "book"}}
        with client.chat.completions.stream(
            model="policy", messages=ASKED, tools=TOOLS, tool_choice=named, max_tokens=400, extra_body=NO_THINKING
        ) as stream:
            for _ in stream:
                pass
            (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        assert call.function.name == "book"
        parse_trip(call.function.arguments)

    def test_schema_with_tools_gives_schema_answer_or_tool_call(self, client: openai.OpenAI) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": Trip.model_json_schema()}}
        kinds = set()
        for seed in range(8):
            message = self.ask(client, tools=TOOLS, response_format=schema, seed=seed).choices[0].message
            kinds.add("calls" if message.tool_calls else "answers")
            if not message.tool_calls:
                parse_trip(message.content)
        assert "answers" in kinds

    def test_rejects_unsupported_json_schema(self, client: openai.OpenAI) -> None:
        for wrong in ({"type": "integer", "multipleOf": 3}, {"type": "nonsense"}, {"$ref": "#/$defs/none"}):
            schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
            with pytest.raises(openai.BadRequestError, match=r"constraint|JSON schema"):
                self.ask(client, response_format=schema)
        assert self.ask(client, max_tokens=2).choices[0].finish_reason == "length", "other requests continue"

    def test_logprobs_are_normalized_over_allowed_tokens(self, client: openai.OpenAI) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
        response = self.ask(client, response_format=schema, logprobs=True, top_logprobs=5)
        for token in response.choices[0].logprobs.content:
            assert sum(torch.tensor([each.logprob for each in token.top_logprobs]).exp()) == pytest.approx(1, abs=1e-5)


class TestOtherProtocols:
    def test_responses_api_supports_schemas_and_tool_choice(self, client: openai.OpenAI) -> None:
        response = client.responses.parse(
            model="policy", input="Where to?", text_format=Trip, max_output_tokens=400, extra_body=NO_THINKING
        )
        assert isinstance(response.output_parsed, Trip)
        tools: Any = [{"type": "function", "strict": True, **TOOL}]
        for choice in ("required", {"type": "function", "name": "book"}):
            called: Any = client.responses.create(
                model="policy",
                input="Where to?",
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=False,
                max_output_tokens=400,
                extra_body=NO_THINKING,
            )
            assert [item.type for item in called.output] == ["function_call"]
            parse_trip(called.output[0].arguments)

    def test_messages_api_supports_schemas_and_tool_choice(self, stage: Stage) -> None:
        tool: Any = {"name": "book", "input_schema": Trip.model_json_schema()}
        with anthropic.Anthropic(base_url=stage.url, api_key="none", max_retries=0) as client:
            more: Any = {"model": "policy", "max_tokens": 400, "messages": ASKED, "extra_body": NO_THINKING}
            response = client.messages.parse(output_format=Trip, **more)
            assert isinstance(response.parsed_output, Trip)
            for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "book"}):
                called: Any = client.messages.create(tools=[tool], tool_choice=choice, **more)
                assert called.stop_reason == "tool_use"
                (block,) = called.content
                Trip.model_validate(block.input)
            with client.messages.stream(tools=[tool], tool_choice={"type": "tool", "name": "book"}, **more) as stream:
                (block,) = stream.get_final_message().content
            assert block.type == "tool_use"

    @pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
    def test_openai_agents_get_output_type_and_forced_tools(self, stage: Stage, kind: Any) -> None:
        booked: list[Trip] = []

        @agents.function_tool
        def book(trip: Trip) -> str:
            booked.append(trip)
            return "done"

        async def run() -> Any:
            async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
                model = kind(model="policy", openai_client=client)
                settings = agents.ModelSettings(max_tokens=600, extra_body=NO_THINKING, store=False)
                typed = agents.Agent(name="typed", model=model, output_type=Trip, model_settings=settings)
                answer = await agents.Runner.run(typed, "Where to?")
                forced = agents.Agent(
                    name="forced",
                    model=model,
                    tools=[book],
                    tool_use_behavior="stop_on_first_tool",
                    model_settings=replace(settings, tool_choice="required", parallel_tool_calls=False),
                )
                return answer.final_output, (await agents.Runner.run(forced, "Book it.")).final_output

        agents.set_tracing_disabled(True)
        answer, outcome = asyncio.run(run())
        assert isinstance(answer, Trip)
        assert (outcome, len(booked)) == ("done", 1)


class TestTraining:
    def test_trainer_sees_unconstrained_policy_logprobs(self, stage: Stage) -> None:
        """The trainer's logprob of a token is the sampled logprob plus the log probability of the allowed tokens."""
        temperature = 0.7

        async def open_one() -> Any:
            return stage.store.open("trained", sampling=SamplingParams(500, temperature=temperature, seed=SEED))

        episode = stage.do(open_one())
        with openai.OpenAI(base_url=f"{stage.url}/v1", api_key=episode.key, max_retries=0) as client:
            ask: Any = {"model": "any", "extra_body": NO_THINKING, "max_tokens": 400}
            first = client.chat.completions.parse(messages=ASKED, response_format=Trip, **ask)
            messages = [*ASKED, first.choices[0].message.model_dump(), {"role": "user", "content": "Sure?"}]
            client.chat.completions.create(messages=messages, **{**ask, "max_tokens": 5})
            for refused in ({"presence_penalty": 1}, {"frequency_penalty": 1}, {"logit_bias": {"65": 5}}):
                (name,) = refused
                with pytest.raises(openai.BadRequestError, match="not supported in an episode") as caught:
                    client.chat.completions.create(messages=ASKED, **ask, **refused)
                assert caught.value.param == name
            with pytest.raises(openai.BadRequestError, match="repetition_penalty"):
                client.chat.completions.create(messages=ASKED, **{**ask, "extra_body": {"repetition_penalty": 1.2}})
        rollout = Rollout("g/0", "g", 0, None, advantage=1.0)

        async def end() -> None:
            episode.end()
            episode.fill_in(rollout)

        stage.do(end())
        group = RolloutGroup("g", None, [rollout])
        held, free = rollout.turns
        assert held.completion.allowed_logprobs is not None
        assert sum(held.completion.allowed_logprobs) < -10
        assert free.completion.allowed_logprobs is None
        (sample,) = build_samples(group, constrained="trained")
        tokens = list(sample.token_ids)
        table = (stage.logits(tokens) / temperature).log_softmax(-1)
        own = [table[at - 1, token].item() for at, token in enumerate(tokens) if at]
        trained = [at for at, is_trained in enumerate(sample.loss_mask) if is_trained]
        assert len(trained) == len(held.completion.token_ids) + len(free.completion.token_ids)
        assert [sample.behaviour_logprobs[at] for at in trained] == pytest.approx(
            [own[at - 1] for at in trained], abs=1e-4
        )
        (corrected,) = build_samples(group, constrained="corrected")
        assert corrected.loss_weights is not None
        weight = torch.tensor(list(held.completion.allowed_logprobs)).double().sum().exp().item()
        assert [corrected.loss_weights[at] for at in trained] == pytest.approx([weight] * len(trained))
        (masked,) = build_samples(group)
        assert masked.num_trained_tokens == len(free.completion.token_ids)

    def test_constraint_continues_after_an_interruption(self, stage: Stage) -> None:
        schema = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 8, "maxItems": 8}
        tag = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}})
        sampling = SamplingParams(400, constraint=tag, stop_token_ids=(END,), seed=SEED)
        prompt = TOKENIZER.encode("Well?")

        async def whole(request_id: str, prompt: list[int], sampling: SamplingParams) -> Any:
            return await stage.router.generate(prompt, request_id=request_id, sampling=sampling)

        first = stage.do(whole("first", prompt, sampling))
        for count in (1, 7, len(first.token_ids) - 1):
            begun = list(first.token_ids)[:count]
            rest = stage.do(whole(f"rest-{count}", [*prompt, *begun], sampling.after(count)))
            answer = json.loads(TOKENIZER.decode([*begun, *rest.token_ids], skip_special_tokens=True))
            assert len(answer) == 8
            assert set(answer) <= {"yes", "no"}


class TestPenaltiesAndBiases:
    def reference(
        self, logits: torch.Tensor, prompt: list[int], sampled: list[int], asked: SamplingParams
    ) -> torch.Tensor:
        """Log distribution of the token after `sampled`."""
        logits = logits.clone()
        for token, value in asked.logit_bias:
            logits[token] += value
        for token in {*prompt, *sampled}:
            by = asked.repetition_penalty
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        for token in set(sampled):
            logits[token] -= asked.frequency_penalty * sampled.count(token) + asked.presence_penalty
        return (logits / asked.temperature).log_softmax(-1)

    @pytest.mark.parametrize(
        "more",
        [
            {"presence_penalty": 1.5},
            {"frequency_penalty": -1.5},
            {"repetition_penalty": 1.8},
            {"logit_bias": {65: 4.0, 66: -3.0}},
            {"presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.7, "logit_bias": {65: 3.0}},
        ],
    )
    def test_logprobs_include_penalties_and_biases(self, stage: Stage, more: dict[str, Any]) -> None:
        prompt, asked = TOKENIZER.encode("Say it again."), SamplingParams(24, temperature=0.8, seed=SEED, **more)

        async def ask() -> Any:
            return await stage.router.generate(prompt, request_id=f"{more}", sampling=asked)

        done = stage.do(ask())
        sampled = list(done.token_ids)
        logits = stage.logits([*prompt, *sampled])
        for at, (token, logprob) in enumerate(zip(sampled, done.logprobs, strict=True)):
            expected = self.reference(logits[len(prompt) + at - 1], prompt, sampled[:at], asked)
            assert logprob == pytest.approx(expected[token].item(), abs=1e-4)

    def test_client_penalties_and_biases_are_applied(self, client: openai.OpenAI) -> None:
        response: Any = client.chat.completions.create(
            model="policy",
            messages=ASKED,
            max_tokens=4,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={"65": 100},
            extra_body={"repetition_penalty": 1.1, "return_token_ids": True},
        )
        assert response.choices[0].token_ids == [65] * 4
        with pytest.raises(openai.BadRequestError, match="logit_bias for token 5000"):
            client.chat.completions.create(model="policy", messages=ASKED, max_tokens=4, logit_bias={"5000": 1})
