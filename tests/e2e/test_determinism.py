"""Determinism on CPUs: no token depends on the rest of its batch."""

import random

import pytest

pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3

from titan_rl.generation.engine import AdapterSpec, EngineSpec
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.vllm_adapters import MOST_JOINED_RANK
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.types import SamplingParams


@pytest.mark.parametrize("rank", [None, 8, MOST_JOINED_RANK + 6])
def test_cpu_tokens_are_independent_of_the_batch(tmp_path, rank):
    """With one thread, rows of a batch are computed independently, so runs need no fixed order of admission.

    Args:
        rank: Rank of the adapter that is sampled from; None samples from the model.
    """
    adapters = {} if rank is None else {"": AdapterSpec(rank, 2.0 * rank, ("q_proj", "k_proj", "v_proj", "down_proj"))}
    spec = EngineSpec(
        str(make_tiny_qwen3(tmp_path)), max_context=128, max_running=16, kv_cache_gib=0.1, adapters=adapters
    )
    engine = VLLMEngine(spec)
    if adapters:
        generator = torch.Generator().manual_seed(0)
        shapes = {each.name: each.global_shape for each in engine.held_weights()}
        matrices = [(name, 0.1 * torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
        engine.load_state_dict(matrices, 1)
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
