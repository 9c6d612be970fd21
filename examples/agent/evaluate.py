"""Evaluation of the agent: its share of right answers, with whichever server has its model.

titan-rl serve runs/latest
OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python -m examples.agent.evaluate
"""

from __future__ import annotations

import argparse
import asyncio
import os

from agents import OpenAIChatCompletionsModel
from openai import AsyncOpenAI

from examples.agent.agent import answer
from examples.agent.company import VALIDATION_SEED, Question, draw_question


async def evaluate(num_questions: int, concurrency: int) -> float:
    """Measure the share of right answers to held-out questions."""
    places = asyncio.Semaphore(concurrency)
    async with AsyncOpenAI() as client:
        model = OpenAIChatCompletionsModel(os.environ.get("OPENAI_MODEL", "policy"), client)

        async def is_right(question: Question) -> bool:
            async with places:
                return await answer(model, question.seed, question.text) == question.answer

        questions = (draw_question(VALIDATION_SEED + number) for number in range(num_questions))
        right = await asyncio.gather(*map(is_right, questions))
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=32)
    args = parser.parse_args()
    print(f"{asyncio.run(evaluate(args.questions, args.concurrency)):.3f} of the answers are right")


if __name__ == "__main__":
    main()
