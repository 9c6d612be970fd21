"""Agent of examples/agent: questions, demonstrations, and runs against a server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs the agent extra")
pytest.importorskip("transformers")

from serving.byte_model import qwen3, script
from serving.served import Engines, served
from transformers import AutoTokenizer

from examples.agent import agent, evaluate
from examples.agent.company import DEMONSTRATION_SEED, MOST_LOOK_UPS, Company, draw_question
from examples.agent.demonstrations import demonstrate
from examples.agent.task import CompanyQuestions
from titan_rl import Demonstration, Message
from titan_rl.config.build import open_rollouters
from titan_rl.config.load import load_config
from titan_rl.core.console import LOG
from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.server import serve
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.training.data.sft_tokens import encode
from titan_rl.types import SamplingParams

BASE = Path(agent.__file__).parent / "base"
QUESTION = next(question for seed in range(99) if len((question := draw_question(seed)).path) == MOST_LOOK_UPS)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE)


def test_question_has_one_answer_in_the_directory() -> None:
    for seed in range(200):
        question, company = draw_question(seed), Company(seed)
        name = question.path[0]
        for manager in question.path[1:]:
            assert (name := company.manager_of(name)) == manager
        assert question.answer == (company.town_of(name) if question.about_town else name)
        assert question.text.count("manager") == len(question.path) - 1


def answers(demonstration: Demonstration) -> list[Message]:
    return [message for message in demonstration.messages if message["role"] == "assistant"]


def test_demonstrations_call_the_agents_tools_and_mask_their_results(tokenizer: Any) -> None:
    demonstration = demonstrate(QUESTION, random.Random(0), careless=0.0)
    tokens = encode(qwen3(tokenizer), demonstration)
    assert len(tokens.token_ids) < 256
    learned = [token for token, learn in zip(tokens.token_ids, tokens.loss_mask, strict=True) if learn]
    said = tokenizer.decode(learned).replace("<think>\n\n</think>\n\n", "").split("<|im_end|>")
    company, called = Company(QUESTION.seed), said[:-2]
    for text, name in zip(called, QUESTION.path, strict=False):
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert call["arguments"] == {"name": name}
        assert call["name"] in {tool["function"]["name"] for tool in demonstration.tools or ()}
    assert len(called) == MOST_LOOK_UPS
    assert said[-2:] == [QUESTION.answer, ""]
    assert company.manager_of(QUESTION.path[0]) == QUESTION.path[1]


def test_careless_demonstrations_answer_too_early() -> None:
    rng = random.Random(0)
    lengths = {len(answers(demonstrate(QUESTION, rng, careless=0.5))) for _ in range(50)}
    assert lengths == set(range(1, len(QUESTION.path) + QUESTION.about_town + 1))


def test_right_demonstrations_come_first() -> None:
    task = CompanyQuestions()
    demonstrations = list(task.demonstrations(60))
    assert [demonstration.messages for demonstration in demonstrations] == [
        demonstration.messages for demonstration in task.demonstrations(60)
    ]
    right = [
        answers(demonstration)[-1]["content"] == draw_question(DEMONSTRATION_SEED + number).answer
        for number, demonstration in enumerate(demonstrations)
    ]
    assert all(right[:50])
    assert not all(right[50:])


def right_answer(asked: str) -> str:
    """Right reply to the question, or to the result of a tool."""
    heard = asked.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    messages = demonstrate(QUESTION, random.Random(0), careless=0.0).messages
    said = messages[next(at for at, message in enumerate(messages) if message["content"] == heard) + 1]
    if not (calls := said.get("tool_calls")):
        return said["content"]
    return f"<tool_call>\n{json.dumps(calls[0]['function'])}\n</tool_call>"


async def test_agent_finds_the_answer_with_its_tools(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "draw_question", lambda seed: QUESTION)
    engine = {"vocab_size": len(tokenizer), "script": script(tokenizer, right_answer)}
    async with (
        served(engine=engine, tokenizer=tokenizer, renderer=qwen3(tokenizer)) as policy,
        serve(policy.app) as url,
    ):
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        await agent.main(str(QUESTION.seed), QUESTION.text)
        assert capsys.readouterr().out == f"{QUESTION.answer}\n"
        assert await evaluate.evaluate(4, concurrency=2) == 1.0


PROGRAM = [("task.command", '["{python}", "-m", "examples.agent.agent", "{seed}", "{question}"]')]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "group_size"), [([], 2), (PROGRAM, 1)], ids=["one process for all", "a program for each"]
)
async def test_each_rollout_is_one_training_sample(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[tuple[str, str]], group_size: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BASE.parents[2]))
    config = load_config(BASE.parent / "cpu.toml", overrides)
    sample = {"seed": QUESTION.seed, "question": QUESTION.text}
    engines = Engines(1, vocab_size=len(tokenizer), script=script(tokenizer, right_answer))
    async with engines.router() as router, open_rollouters(config, tmp_path, LOG) as rollouters:
        group = await rollouters[config.tasks[0].name].run_group(
            router.generate, sample, group_id="train-0", group_size=group_size, sampling=SamplingParams(max_tokens=32)
        )
    for rollout in group.rollouts:
        assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
        assert len(rollout.turns) == MOST_LOOK_UPS + 1
        rollout.advantage = 1.0
    assert len(build_samples(group)) == group_size
