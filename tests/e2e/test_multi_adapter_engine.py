"""vLLM with several adapters of different ranks in one batch, and swaps that do not stall the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the cpu or gpu extra")
pytest.importorskip("peft", reason="needs the dev extra")

import peft
import torch
from e2e.tiny_policy import make_tiny_qwen3, on_policy_samples
from transformers import AutoModelForCausalLM

from titan_rl.core.errors import RequestError
from titan_rl.generation.engine import AdapterSpec, EngineSpec
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import compare, read_back
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.adapter_trainers import AdapterTrainers
from titan_rl.training.publishing import WeightPublisher
from titan_rl.training.settings import TARGETS, CorrectionConfig, ModelConfig, PolicySettings, TrainingConfig
from titan_rl.types import SamplingParams
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.verification import published_checksums

SPECS = {
    "sort": AdapterSpec(8, 32.0, TARGETS),
    "sum": AdapterSpec(1, 8.0, TARGETS),
    "tags": AdapterSpec(2, 8.0, TARGETS),
}
LENGTH = 24


def test_adapters_swap_independently_without_stalling_others(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    policies = {
        name: PolicySettings(
            TrainingConfig.model_validate({"lr": 2e-2, "adapter": {"rank": spec.rank, "alpha": spec.alpha}}),
            CorrectionConfig(),
        )
        for name, spec in SPECS.items()
    }
    trainers = AdapterTrainers(ModelConfig(path=str(base)), policies, seed=0)
    engine = VLLMEngine(EngineSpec(str(base), max_context=128, max_running=6, kv_cache_gib=0.1, adapters=SPECS))
    models: dict[tuple[str, int], Any] = {}
    deltas: dict[str, list[tuple[int, float, int]]] = {}  # token, logprob and version, by request
    versions = dict.fromkeys(SPECS, 0)
    transports = {name: SharedMemoryTransport(f"test-several-{name}") for name in SPECS}
    publishers = {name: WeightPublisher(trainers[name], transports[name]) for name in SPECS}

    def swap(name: str) -> None:
        """Publish, load, read back and score a version, with requests of all adapters running."""
        with trainers.turn(name) as trainer:
            manifest = publishers[name].publish()
            assert trainer.adapter is not None
            trainer.adapter.write_peft(folder := tmp_path / f"{name}-{trainer.version}", base=str(base))
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        models[name, manifest.version] = peft.PeftModel.from_pretrained(model, folder).eval()
        policy = engine.policy(name)
        policy.load_state_dict(transports[name].pull(manifest), manifest.version)
        policy.reset_prefix_cache()
        published = published_checksums(manifest)
        assert compare(published, [read_back(policy, published)], manifest.version).unread == ()
        versions[name] = manifest.version
        scores = policy.score([probe.token_ids for probe in manifest.probes])
        for probe, found in zip(manifest.probes, scores, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(probe.logprobs), rtol=0, atol=1e-5)

    def step() -> None:
        for delta in engine.step():
            tokens = zip(delta.token_ids, delta.logprobs, strict=True)
            version = versions[delta.request_id.partition("/")[0]]
            deltas.setdefault(delta.request_id, []).extend((token, logprob, version) for token, logprob in tokens)

    for name in SPECS:
        swap(name)
    sampling = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, temperature=0.8)
    for name in (*SPECS, *SPECS):
        engine.add(EngineRequest(f"{name}/{len(deltas)}", [5, 6, 7], sampling, adapter=name))
        deltas[f"{name}/{len(deltas)}"] = []
    steps = 0
    for name in ("sort", "sum", "sort", "tags"):
        for _ in range(4):
            step()
            steps += 1
        with trainers.turn(name) as trainer:
            trainer.step(on_policy_samples(trainer, 20, 30, 25, 18))
        before = engine._scheduler.current_step
        swap(name)
        scoring = engine._scheduler.current_step - before
        assert 0 < scoring < 4
        step()  # also returns the tokens of the steps in which probes were scored
        steps += scoring + 1
        assert {len(tokens) for tokens in deltas.values()} == {steps}  # each request had a token in every step
    while any(len(tokens) < LENGTH for tokens in deltas.values()):
        step()

    for request_id, tokens in deltas.items():
        name = request_id.partition("/")[0]
        assert len(tokens) == LENGTH
        assert len({version for *_, version in tokens}) == versions[name] + 1
        check(models, name, tokens)
    with pytest.raises(RequestError, match=r"names adapter 'tag'; the engine has sort, sum, tags"):
        engine.add(EngineRequest("other", [5], sampling, adapter="tag"))
    engine.close()
    for transport in transports.values():
        transport.close()


def check(models: dict[tuple[str, int], Any], name: str, tokens: list[tuple[int, float, int]]) -> None:
    """Compare each token's logprob with PEFT's, which keeps its KV cache across swaps."""
    context, cache = [5, 6, 7], None
    for token, logprob, version in tokens:
        new = torch.tensor([context if cache is None else context[-1:]])
        with torch.no_grad():
            output = models[name, version](new, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        expected = (output.logits[0, -1] / 0.8).log_softmax(-1)[token]
        assert abs(float(expected) - logprob) < 1e-5, (name, version)
        context.append(token)
