"""On policy, one seed gives one run: the same bits in losses, tokens, rewards and weights, on the real stack."""

import json
import random

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from e2e.runs import run_training
from e2e.tiny_policy import make_tiny_qwen3
from safetensors.torch import load_file

from titan_rl.generation.engine import EngineRequest
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.types import SamplingParams


def is_of_the_run(metric: str) -> bool:
    """It says what was computed, and not how long that took."""
    computed = metric == "step" or metric.startswith("train/") or metric.endswith(("reward_mean", "tokens_mean"))
    return computed and not metric.endswith("_s")


def test_two_runs_with_one_seed_have_the_same_bits(tmp_path):
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with run_training(tmp_path / name, scheduling__max_staleness=0, logging__transcripts_per_step=4) as run:
            assert run.wait() == 0, run.output
            numbers = [{k: v for k, v in record.items() if is_of_the_run(k)} for record in run.metrics()]
            transcripts = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
            answers = sorted((t["rollout_id"], t["step"], json.dumps(t["messages"])) for t in transcripts)
            runs.append((numbers, answers, load_file(run.folder / "export" / "model.safetensors")))
    (numbers, answers, weights), again = runs
    assert numbers == again[0]
    assert sum("train/loss" in record for record in numbers) == 3
    assert answers == again[1]
    assert all(torch.equal(tensor, again[2][name]) for name, tensor in weights.items())


def test_what_shares_a_batch_does_not_change_the_bits_on_cpu(tmp_path):
    """Why runs need no fixed order of admission there: on one thread each row of a batch is computed alike."""
    engine = VLLMEngine(str(make_tiny_qwen3(tmp_path)), max_context=128, max_running=16, kv_cache_gib=0.1)
    rng = random.Random(0)
    prompts = [[rng.randrange(128) for _ in range(rng.randint(3, 40))] for _ in range(16)]

    def play(order: list[int], at_once: int) -> dict[str, list[tuple[int, float]]]:
        played: dict[str, list[tuple[int, float]]] = {str(index): [] for index in order}
        waiting = list(order)
        while waiting or any(len(tokens) < 40 for tokens in played.values()):
            for index in waiting[:at_once]:
                sampling = SamplingParams(max_tokens=40, min_tokens=40, seed=index)
                engine.add(EngineRequest(str(index), prompts[index], sampling))
            waiting = waiting[at_once:]
            for delta in engine.step():
                played[delta.request_id] += zip(delta.token_ids, delta.logprobs, strict=True)
        engine.reset_prefix_cache()
        return played

    together = play(list(range(16)), at_once=16)
    assert play(list(range(16))[::-1], at_once=3) == together
    for index in (0, 7):
        assert play([index], at_once=1)[str(index)] == together[str(index)]
    engine.close()
