"""The agent as a task: its questions, demonstrations and reward."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from examples.agent.company import DEMONSTRATION_SEED, VALIDATION_SEED, draw_question
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.task import Demonstration, RunContext
from titan_rl.rollout.types import Rollout
from titan_rl.tasks.agents import AgentTask


class CompanyQuestions(AgentTask):
    """Task of questions about companies. With a `command` a program is started for each question; without one,
    `harness.py` plays all of them."""

    def train_sample(self, seed: int, index: int) -> dict[str, Any]:
        return _sample(random.Random(f"{seed}/{index}").randrange(DEMONSTRATION_SEED))

    def validation_samples(self, count: int) -> Sequence[dict[str, Any]]:
        return [_sample(VALIDATION_SEED + number) for number in range(count)]

    def demonstrations(self, count: int) -> Iterator[Demonstration]:
        """Yield right demonstrations, then careless ones."""
        from examples.agent.demonstrations import CARELESS, RIGHT, demonstrate  # needs openai-agents

        rng = random.Random("demonstrations")
        for number in range(count):
            question = draw_question(DEMONSTRATION_SEED + number)
            yield demonstrate(question, rng, careless=0.0 if number < RIGHT * count else CARELESS)

    def rubric(self) -> Rubric:
        return Rubric([Reward(is_right)])

    @asynccontextmanager
    async def open(self, run: RunContext) -> AsyncGenerator[None]:
        """Context manager: serve the policy and, without a command, run the harness, except in a dry run."""
        async with super().open(run):
            if self.command or run.dry:
                yield
                return
            harness = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "examples.agent.harness",
                    str(run.folder / f"agents-{socket.gethostname()}-{os.getpid()}.json"),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal does not reach it
            )
            try:
                yield
            finally:
                if harness.returncode is None:
                    harness.terminate()
                await harness.wait()


def _sample(seed: int) -> dict[str, Any]:
    question = draw_question(seed)
    return {"seed": seed, "question": question.text}


def is_right(rollout: Rollout) -> float:
    """Reward: 1 if the last message of the model is the answer."""
    said = next((message for message in reversed(rollout.messages) if message["role"] == "assistant"), {})
    return float(said.get("content") == draw_question(rollout.sample["seed"]).answer)
