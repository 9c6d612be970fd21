"""The agent of examples/agent, its base model's words, and that it runs against a server."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs the agent extra")
pytest.importorskip("transformers")

from serving.served import Engines, served
from serving.speaking import qwen3, script
from transformers import AutoTokenizer

from examples.agent import agent, base_model, evaluate
from examples.agent.company import MOST_LOOK_UPS, Company, draw_question
from examples.agent.tokenizer import build_tokenizer
from titan_rl.config.load import load_config
from titan_rl.config.make_rollouter import open_rollouters
from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.server import serve
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.types import SamplingParams

BASE = Path(agent.__file__).parent / "base"
QUESTION = next(question for seed in range(99) if len((question := draw_question(seed)).path) == MOST_LOOK_UPS)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE)


def test_the_committed_tokenizer_knows_the_tools_as_the_agent_offers_them(tokenizer: Any) -> None:
    tools = base_model.offered_tools()
    assert build_tokenizer(agent.INSTRUCTIONS, tools).get_vocab() == tokenizer.get_vocab()
    messages = [{"role": "system", "content": agent.INSTRUCTIONS}, {"role": "user", "content": QUESTION.text}]
    assert len(qwen3(tokenizer).render_ids(messages, tools=tools)) < 64


def test_a_question_has_one_answer_in_the_directory() -> None:
    for seed in range(200):
        question, company = draw_question(seed), Company(seed)
        name = question.path[0]
        for manager in question.path[1:]:
            assert (name := company.manager_of(name)) == manager
        assert question.answer == (company.town_of(name) if question.about_town else name)
        assert question.text.count("manager") == len(question.path) - 1


def test_only_what_the_assistant_says_is_learned(tokenizer: Any) -> None:
    tools = base_model.offered_tools()
    turns = base_model.demonstrate(QUESTION, random.Random(0), careless=0.0)
    ids, labels = base_model.encode(qwen3(tokenizer), tokenizer, tools, (QUESTION, turns))
    learned = tokenizer.decode([label for label in labels if label != base_model.IGNORED])
    assert learned == "".join(f"{said}<|im_end|>" for said, _ in turns)
    assert len(ids) == len(labels) < 256
    assert turns[-1][0] == QUESTION.answer


def test_careless_demonstrations_answer_too_early() -> None:
    rng = random.Random(0)
    lengths = {len(base_model.demonstrate(QUESTION, rng, careless=0.5)) for _ in range(50)}
    assert lengths == set(range(1, len(QUESTION.path) + QUESTION.about_town + 1))


def right_answer(asked: str) -> str:
    """What to say to the question, or to what the tool said."""
    said = asked.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    turns = base_model.demonstrate(QUESTION, random.Random(0), careless=0.0)
    results = [QUESTION.text, *(result for _, result in turns)]
    return turns[results.index(said)][0]


async def test_the_agent_finds_the_answer_with_its_tools(
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


@pytest.mark.parametrize(
    ("overrides", "group_size"), [([], 2), (PROGRAM, 1)], ids=["one process for all", "a program for each"]
)
async def test_its_rollouts_are_trained_in_one_piece(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[tuple[str, str]], group_size: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BASE.parents[2]))
    config = load_config(BASE.parent / "cpu.toml", overrides)
    sample = {"seed": QUESTION.seed, "question": QUESTION.text}
    engines = Engines(1, vocab_size=len(tokenizer), script=script(tokenizer, right_answer))
    async with engines.router() as router, open_rollouters(config, tmp_path, print) as rollouters:
        group = await rollouters[config.tasks[0].name].run_group(
            router.generate, sample, group_id="train-0", group_size=group_size, sampling=SamplingParams(max_tokens=32)
        )
    for rollout in group.rollouts:
        assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
        assert len(rollout.turns) == MOST_LOOK_UPS + 1
        rollout.advantage = 1.0
    assert len(build_samples(group)) == group_size
