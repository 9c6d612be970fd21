"""Elo ratings after an evaluation: policies that never meet have none, and their results are kept."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.test_message_token_env import LetterRenderer

from titan_rl import (
    Completion,
    ConfigError,
    FinishReason,
    GenerateFn,
    Message,
    MessageSeat,
    Rubric,
    SeatedTask,
    VersionSpan,
    env_reward,
)
from titan_rl.config.evaluation import make_eval_config
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.evaluation.evaluate import EvaluationRun, rate_policies
from titan_rl.evaluation.policies.inference import OpenedPolicy
from titan_rl.run.observability.progress import Progress
from titan_rl.training.settings import ModelConfig


class Highest:
    """Game in which the seat with the greater letter wins."""

    async def play_seats(self, seats: Mapping[str, MessageSeat]) -> None:
        said = {name: (await seat.ask([{"role": "user", "content": "x"}]))["content"] for name, seat in seats.items()}
        for name, seat in seats.items():
            seat.reward("won", float(said[name] == max(said.values())))

    async def close(self) -> None: ...


class Duel(SeatedTask):
    seat_names = ("first", "second")

    def train_sample(self, seed: int, index: int) -> int:
        return index

    def validation_samples(self, count: int) -> Sequence[int]:
        return range(count)

    def game(self, sample: Any) -> Highest:
        return Highest()

    def rubric(self) -> Rubric:
        return Rubric([env_reward("won")])


def middle(messages: Sequence[Message]) -> str:
    return "m"


def letter(text: str) -> GenerateFn:
    async def generate(prompt: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Completion:
        return Completion(request_id, [ord(text), 0], [0.0, 0.0], FinishReason.STOP, [VersionSpan(0, 2)])

    return generate


class Opened:
    """Policies that were opened before; `error` if they cannot play each other."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def together(self) -> Mapping[str, GenerateFn]:
        if self._error is not None:
            raise self._error
        return {"low": letter("a"), "high": letter("z")}


async def rated(out: Path, opened: Opened, **task: Any) -> tuple[list[Any], str, EvaluationRun]:
    source = TaskSource(task=Duel.model_validate(task))  # pyright: ignore[reportArgumentType]
    config = RunConfig(model=ModelConfig(path="unused", max_context=256), tasks=[source])
    settings = make_eval_config({"num_prompts": 4, "samples": 2})
    output = io.StringIO()
    with Progress(0, output) as progress:
        policy = OpenedPolicy("high", letter("z"), LetterRenderer())
        run = EvaluationRun(config, settings, policy, out / "high", progress)
        await run.run()
        return await rate_policies(config, settings, run, opened, out, progress), output.getvalue(), run  # pyright: ignore[reportArgumentType]


async def test_policies_with_one_seat_in_each_game_have_results_but_no_ratings(tmp_path: Path) -> None:
    scripted = {"rotate": "sibling", "seats": {"second": f"{__name__}:middle"}}
    ratings, shown, run = await rated(tmp_path, Opened(AssertionError("not asked")), **scripted)
    assert ratings == []
    assert "duel: no Elo ratings, because the policy has one seat in each game" in shown
    results = json.loads((tmp_path / "high" / "results.json").read_text())
    assert results["is_complete"]
    assert results["tasks"]["duel"]["reward"]["mean"] == run.evaluation().reward == 1.0


async def test_policies_that_meet_are_rated(tmp_path: Path) -> None:
    ratings, _, _ = await rated(tmp_path, Opened())
    (duel,) = ratings
    low, high = duel.ratings
    assert (low.score, high.score, high.num_games) == (0.0, 1.0, 8)
    assert json.loads((tmp_path / "elo.json").read_text())[0]["task"] == "duel"


async def test_policies_that_cannot_play_each_other_keep_their_results(tmp_path: Path) -> None:
    ratings, shown, run = await rated(tmp_path, Opened(ConfigError("weights of two architectures")))
    assert ratings == []
    assert "no Elo ratings: weights of two architectures" in shown
    assert run.evaluation().is_complete
