"""Agent that answers a question about a company by looking things up in its directory.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none \
        python -m examples.agent.agent 17 "Who is the manager of Mia?"

It is written with `openai-agents`, as for a hosted model. Environment variables select the model: OPENAI_BASE_URL,
OPENAI_API_KEY, OPENAI_MODEL.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    Tool,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI

from examples.agent.company import MOST_LOOK_UPS, Company

INSTRUCTIONS = "Answer with one word. Look up what you need in the directory of the company."
MAX_TURNS = MOST_LOOK_UPS + 3

set_tracing_disabled(True)  # tracing would send every run to OpenAI


def tools_of(company: Company) -> list[Tool]:
    @function_tool
    def manager_of(name: str) -> str:
        """Who manages a person."""
        return company.manager_of(name)

    @function_tool
    def town_of(name: str) -> str:
        """Where a person works."""
        return company.town_of(name)

    return [manager_of, town_of]


async def answer(model: Model, seed: int, question: str) -> str:
    """Answer a question.

    Args:
        seed: Seed of the company.
    """
    agent = Agent(
        name="directory",
        instructions=INSTRUCTIONS,
        tools=tools_of(Company(seed)),
        model=model,
        model_settings=ModelSettings(max_tokens=32),
    )
    try:
        result = await Runner.run(agent, question, max_turns=MAX_TURNS)
    except (MaxTurnsExceeded, ModelBehaviorError):  # it made too many calls, or called an unknown tool
        return "I do not know"
    return str(result.final_output)


async def main(seed: str, question: str) -> None:
    async with AsyncOpenAI() as client:
        model = OpenAIChatCompletionsModel(os.environ.get("OPENAI_MODEL", "policy"), client)
        print(await answer(model, int(seed), question))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
