"""Hot swaps during training: the logprob of every token matches the weights of its version.

The reference is transformers in float32. Each version continues with the KV cache of the previous ones, as the engine
does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import make_tiny_qwen3, make_trainer
from transformers import Qwen3ForCausalLM

from titan_rl.generation.engine import Engine, EngineSpec
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.publishing import WeightPublisher
from titan_rl.types import Completion, SamplingParams
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.verification import SwapCheck

NUM_VERSIONS, IN_FLIGHT, LENGTH = 4, 8, 60


async def test_logprobs_match_the_weight_version_of_each_token(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    trainer = make_trainer(folder, lr=3e-3, steps=NUM_VERSIONS)
    loop = EngineLoop(
        lambda: VLLMEngine(EngineSpec(str(folder), max_context=256, max_running=IN_FLIGHT, kv_cache_gib=0.1))
    )
    await loop.start()
    models: dict[int, Qwen3ForCausalLM] = {}
    names = itertools.count()
    asked: dict[str, list[int]] = {}

    def ask() -> asyncio.Task[Completion]:
        name = str(next(names))
        asked[name] = [5 + int(name) % 50, 6, 7]
        sampling = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, temperature=0.8)
        return asyncio.create_task(loop.generate(asked[name], request_id=name, sampling=sampling))

    with SharedMemoryTransport("test-hot-swaps") as transport:
        publisher = WeightPublisher(trainer, transport)

        async def publish_and_pull() -> None:
            manifest = publisher.publish()
            models[trainer.version] = model_of(folder, dict(trainer.named_tensors()))

            def check(engine: Engine) -> None:
                SwapCheck().verify(manifest, engine.score)

            await loop.pull(manifest.version, lambda: transport.pull(manifest), check)

        await publish_and_pull()
        running = {ask() for _ in range(IN_FLIGHT)}
        finished: list[Completion] = []
        while trainer.version < NUM_VERSIONS:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            fresh = [task.result() for task in done]
            finished += fresh
            running |= {ask() for _ in fresh}
            samples = [sample_of(asked[c.request_id], c, (-1.0) ** i) for i, c in enumerate(fresh)]
            await asyncio.to_thread(trainer.step, samples)
            await publish_and_pull()
        # One more, because all others may have ended before the last version was pulled.
        finished += await asyncio.gather(ask(), *running)
    await loop.close()

    assert {span.version for c in finished for span in c.version_spans} == set(range(NUM_VERSIONS + 1))
    assert sum(len(c.version_spans) > 1 for c in finished) >= NUM_VERSIONS
    for completion in finished:
        expected = reference(models, asked[completion.request_id], completion, temperature=0.8)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)


def model_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
    return model.eval()


def sample_of(prompt: Sequence[int], completion: Completion, advantage: float) -> TrainingSample:
    head, count = len(prompt), len(completion.token_ids)
    return TrainingSample(
        completion.request_id,
        completion.request_id,
        [*prompt, *completion.token_ids],
        [False] * head + [True] * count,
        [0.0] * head + list(completion.logprobs),
        [0.0] * head + [advantage] * count,
        [-1] * head + list(completion.versions),
        temperature=0.8,
    )


@torch.no_grad()
def reference(
    models: dict[int, Qwen3ForCausalLM], prompt: list[int], completion: Completion, temperature: float
) -> torch.Tensor:
    logprobs: list[torch.Tensor] = []
    cache = None
    fed = prompt
    pairs = zip(completion.versions, completion.token_ids, strict=True)
    for version, sampled in itertools.groupby(pairs, itemgetter(0)):
        tokens = [token for _, token in sampled]
        output = models[version](torch.tensor([[*fed, *tokens[:-1]]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        predicted = (output.logits[0, -len(tokens) :] / temperature).log_softmax(-1)
        logprobs.append(predicted[range(len(tokens)), tokens])
        fed = tokens[-1:]
    return torch.cat(logprobs)
