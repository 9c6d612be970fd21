"""One policy evaluated in-process, by tokens over HTTP and by chat gives the same results."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.served import served

from titan_rl import ConfigError, SamplingParams, load_config
from titan_rl.config.build import make_renderer
from titan_rl.config.evaluation import make_eval_config
from titan_rl.evaluation.evaluate import EvaluationRun
from titan_rl.evaluation.policies.inference import OpenedPolicy, open_endpoint
from titan_rl.evaluation.results import TaskResult
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.run.observability.progress import Progress

EXAMPLE = Path(__file__).parents[2] / "examples" / "alphabet_sort"
CONFIG = load_config(EXAMPLE / "cpu.toml")
OPTIONS: dict[str, Any] = {"num_prompts": 3, "samples": 2, "max_tokens": 8, "success": 0.5}


async def result(policy: OpenedPolicy, **options: Any) -> TaskResult:
    settings = make_eval_config({**OPTIONS, **options})
    return (await EvaluationRun(CONFIG, settings, policy, None, Progress(0, io.StringIO())).run()).task


@pytest.mark.parametrize("api", ["tokens", "chat"])
async def test_endpoint_evaluation_matches_the_served_policy(api: str) -> None:
    renderer, tokenizer = make_renderer(CONFIG.model), load_tokenizer(CONFIG.model.path)
    async with served(renderer=renderer, tokenizer=tokenizer, engine={"vocab_size": 400, "mean_tokens": 4}) as server:
        here = OpenedPolicy("here", server.router.generate, renderer)
        transport = httpx.ASGITransport(server.app)
        settings = make_eval_config({**OPTIONS, "api": api})
        async with open_endpoint("http://policy", CONFIG, settings, transport) as there:
            asked = await result(there, api=api)
        played = await result(here)
    assert there.name == "policy at http://policy"
    assert asked.num_samples == played.num_samples == 6
    assert asked.completion_tokens == played.completion_tokens
    assert asked.statuses == played.statuses
    assert asked.rewards == played.rewards


async def test_greedy_evaluation_allows_one_sample_per_prompt() -> None:
    renderer = make_renderer(CONFIG.model)
    asked: list[SamplingParams] = []
    async with served(engine={"vocab_size": 400, "mean_tokens": 4}) as server:

        async def generate(prompt_token_ids: Any, *, request_id: str, session_id: Any = None, sampling: Any) -> Any:
            asked.append(sampling)
            return await server.router.generate(prompt_token_ids, request_id=request_id, sampling=sampling)

        policy = OpenedPolicy("here", generate, renderer)
        assert (await result(policy, samples=None, temperature=0)).num_samples == 3
        assert {sampling.temperature for sampling in asked} == {0.0}
        with pytest.raises(ConfigError, match="would be the same"):
            await result(policy, temperature=0)
