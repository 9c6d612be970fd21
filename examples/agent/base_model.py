"""Train the base model: it knows how to call tools, and answers too early.

    python -m examples.agent.base_model --out examples/agent/base

Supervised learning, first on right demonstrations, then on careless ones, which give up looking things up at each step
with the same probability, and answer with what is known by then. The first part brings the skill, the second has the
model use it rarely, which leaves it to reinforcement learning to bring it out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from agents.models.chatcmpl_converter import Converter
from renderers.qwen3 import Qwen3Renderer

from examples.agent.agent import INSTRUCTIONS, tools_of
from examples.agent.company import TOWNS, Company, Question, draw_question
from examples.agent.tokenizer import build_tokenizer
from examples.tiny_model import IGNORED, Row, build_model, learn

DATA_SEED = 1_000_000_000  # apart from the seeds that runs use


def offered_tools() -> list[dict[str, Any]]:
    """The agent's tools as `openai-agents` sends them."""
    return [dict(Converter.tool_to_openai(tool)) for tool in tools_of(Company(0))]


def demonstrate(question: Question, rng: random.Random, careless: float) -> list[tuple[str, str | None]]:
    """What the assistant says, turn by turn, and what the tool that it calls says to that.

    Args:
        careless: how probable it is, at each step, that it answers at once.
    """
    turns: list[tuple[str, str | None]] = []
    for name, manager in zip(question.path, question.path[1:], strict=False):
        if rng.random() < careless:
            return [*turns, (rng.choice(TOWNS) if question.about_town else name, None)]
        turns.append((_call("manager_of", name), manager))
    if question.about_town:
        if rng.random() < careless:
            return [*turns, (rng.choice(TOWNS), None)]
        turns.append((_call("town_of", question.path[-1]), question.answer))
    return [*turns, (question.answer, None)]


def _call(tool: str, name: str) -> str:
    call = {"name": tool, "arguments": {"name": name}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def encode(renderer: Any, tokenizer: Any, tools: list[Any], row: tuple[Question, Any]) -> Row:
    """The conversation as an agent's requests have it, where all but the assistant's tokens are ignored."""
    question, turns = row
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question.text}]
    ids = list(renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
    labels = [IGNORED] * len(ids)
    for said, result in turns:
        sampled = tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False)
        labels += sampled
        if result is None:
            return [*ids, *sampled], labels
        extended = renderer.bridge_to_next_turn(ids, sampled, [{"role": "tool", "content": result}], tools=tools)
        assert extended is not None
        ids = list(extended.token_ids)
        labels += [IGNORED] * (len(ids) - len(labels))
    raise ValueError(f"the demonstration of {question.text!r} does not end with an answer")


def rows_of(
    tokenizer: Any,
    tools: list[dict[str, Any]],
    *,
    right_steps: int,
    batch_size: int,
    careless: float,
    seed: int,
) -> Callable[[int], list[Row]]:
    rng, renderer = random.Random(seed), Qwen3Renderer(tokenizer)

    def rows(step: int) -> list[Row]:
        first = DATA_SEED + step * batch_size
        questions = [draw_question(first + row) for row in range(batch_size)]
        share = careless if step >= right_steps else 0.0
        return [encode(renderer, tokenizer, tools, (each, demonstrate(each, rng, share))) for each in questions]

    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, in Hugging Face format")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--right-steps", type=int, default=500, help="steps before the careless demonstrations")
    parser.add_argument("--batch-size", type=int, default=32, help="conversations a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--careless", type=float, default=0.45, help="probability of giving up at each step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tools = offered_tools()
    tokenizer = build_tokenizer(INSTRUCTIONS, tools)
    model = build_model(tokenizer)
    started = time.monotonic()
    rows = rows_of(
        tokenizer,
        tools,
        right_steps=args.right_steps,
        batch_size=args.batch_size,
        careless=args.careless,
        seed=args.seed,
    )
    loss = learn(model, rows, steps=args.steps, lr=args.lr)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    seconds = round(time.monotonic() - started)
    print(json.dumps({"parameters": model.num_parameters(), "loss": round(loss, 4), "seconds": seconds}))


if __name__ == "__main__":
    main()
