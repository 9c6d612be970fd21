"""Hot swaps of adapters: token logprobs match transformers with PEFT, and faulty swaps are detected.

The reference keeps its KV cache across versions of the adapter, as the engine does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")
pytest.importorskip("peft", reason="needs the dev extra")

import peft
import torch
from background import HANG_S
from depth import in_depth
from e2e.test_hot_swap_numerics import reference, sample_of
from e2e.tiny_policy import make_tiny_llama3, make_tiny_moe, make_tiny_qwen3, make_trainer
from models.families import make_family
from transformers import AutoModelForCausalLM
from vllm.distributed.parallel_state import destroy_model_parallel

from titan_rl.core.errors import GenerationError, StateDictError, VerificationError
from titan_rl.generation.engine import AdapterSpec, Engine, EngineSpec, LoadedPolicy
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import compare, read_back
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.choices import DType
from titan_rl.training.publishing import WeightPublisher
from titan_rl.training.settings import TARGETS, ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore
from titan_rl.types import Completion, SamplingParams
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.types import Manifest
from titan_rl.weights.verification import SwapCheck, published_checksums

NUM_VERSIONS, IN_FLIGHT, LENGTH = 4, 16, 48


def engine_of(folder: Path, *, rank: int, alpha: float, num_versions: int = 1) -> VLLMEngine:
    adapter = AdapterSpec(rank, alpha, TARGETS, num_versions)
    spec = EngineSpec(str(folder), max_context=256, max_running=IN_FLIGHT, kv_cache_gib=0.1, adapters={"": adapter})
    return VLLMEngine(spec)


def peft_model(base: Path, trainer: TrainerCore, folder: Path) -> Any:
    assert trainer.adapter is not None
    trainer.adapter.write_peft(folder, base=str(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder).eval()


@pytest.mark.parametrize(
    ("make", "rank", "alpha", "num_versions", "last"),
    [
        pytest.param(make_tiny_qwen3, 8, 32.0, 1, NUM_VERSIONS, marks=in_depth),
        (make_tiny_llama3, 3, 8.0, 1, NUM_VERSIONS),
        (make_tiny_qwen3, 1, 8.0, NUM_VERSIONS + 1, NUM_VERSIONS),
        (partial(make_family, "qwen2"), 8, 32.0, 1, 3),  # this and the next are trained with transformers
        pytest.param(partial(make_family, "gemma3_text"), 8, 32.0, 1, 3, marks=in_depth),
    ],
    ids=["qwen3", "llama3", "pinned", "qwen2", "gemma3_text"],
)
async def test_logprobs_match_the_adapter_version_of_each_token(
    tmp_path: Path, make: Callable[[Path], Path], rank: int, alpha: float, num_versions: int, last: int
) -> None:
    base = make(tmp_path / "model")
    trainer = make_trainer(base, lr=5e-3, steps=last, adapter={"rank": rank, "alpha": alpha})
    loop = EngineLoop(lambda: engine_of(base, rank=rank, alpha=alpha, num_versions=num_versions))
    await loop.start()
    models: dict[int, Any] = {}
    names = itertools.count()
    asked: dict[str, list[int]] = {}

    def ask(on_chunk: Callable[[Any], None] | None = None) -> asyncio.Task[Completion]:
        name = str(next(names))
        asked[name] = [5 + int(name) % 50, 6, 7]
        sampling = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, temperature=0.8)
        return asyncio.create_task(loop.stream(EngineRequest(name, asked[name], sampling), on_chunk))

    async def ask_and_wait() -> asyncio.Task[Completion]:
        """Start a request and wait for its first tokens."""
        begun = asyncio.Event()
        task = ask(lambda _: begun.set())
        await asyncio.wait_for(begun.wait(), HANG_S)
        return task

    with SharedMemoryTransport("test-adapter-swaps") as transport:
        publisher = WeightPublisher(trainer, transport)
        running = set[asyncio.Task[Completion]]()

        async def publish_and_pull() -> None:
            manifest = publisher.publish()
            models[trainer.version] = peft_model(base, trainer, tmp_path / str(trainer.version))

            def check(engine: LoadedPolicy) -> None:
                SwapCheck().verify(manifest, engine.score)

            if trainer.version:
                running.add(await ask_and_wait())
            result = await loop.pull(
                manifest.version, lambda: transport.pull(manifest), check, published=published_checksums(manifest)
            )
            assert result.readback is not None
            unread = {name.rpartition(".lora_")[2] for name in result.readback.unread}
            assert unread == (set() if rank != 3 else {"B.weight"})  # the scale 8 / 3 is not a power of two

        await publish_and_pull()
        running.update(ask() for _ in range(IN_FLIGHT))
        finished: list[Completion] = []
        while trainer.version < last:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            fresh = [task.result() for task in done]
            finished += fresh
            running |= {ask() for _ in fresh}
            samples = [sample_of(asked[c.request_id], c, (-1.0) ** i) for i, c in enumerate(fresh)]
            await asyncio.to_thread(trainer.step, samples)
            await publish_and_pull()
        finished += await asyncio.gather(*running)
    await loop.close()

    assert {span.version for c in finished for span in c.version_spans} >= set(range(last))
    mixed = sum(len(c.version_spans) > 1 for c in finished)
    assert mixed == 0 if num_versions > 1 else mixed >= last
    for completion in finished[:: max(1, len(finished) // 40)]:
        expected = reference(models, asked[completion.request_id], completion, temperature=0.8)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)


class Faults:
    """Faulty updates of an adapter. Each takes the tensors of a version and of the previous one."""

    @staticmethod
    def withheld(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        return old

    @staticmethod
    def applied_twice(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        return {name: 2 * tensor if "lora_B" in name else tensor for name, tensor in new.items()}

    @staticmethod
    def missing_one_layer(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        return {name: tensor for name, tensor in new.items() if "layers.1.mlp.down_proj" not in name}

    @staticmethod
    def permuted_queries(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        def halves(name: str, tensor: Any) -> Any:
            is_permuted = "q_proj.lora_B" in name or "k_proj.lora_B" in name
            return tensor.view(-1, 2, 16, tensor.shape[1]).flip(1).reshape(tensor.shape) if is_permuted else tensor

        return {name: halves(name, tensor) for name, tensor in new.items()}


FAULTS = [Faults.withheld, Faults.applied_twice, Faults.missing_one_layer, Faults.permuted_queries]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterable[tuple[VLLMEngine, list[tuple[Manifest, Any]]]]:
    """An engine, and two versions of an adapter: (manifest, tensors)."""
    base = make_tiny_qwen3(tmp_path_factory.mktemp("faults") / "model")
    trainer = make_trainer(base, lr=1e-3, adapter={"rank": 8})
    samples = [sample_of([5, 6, 7], made_up(number), (-1.0) ** number) for number in range(8)]
    with SharedMemoryTransport("test-adapter-faults") as transport:
        publisher = WeightPublisher(trainer, transport)
        trainer.step(samples)
        versions: list[tuple[Manifest, Any]] = []
        for _ in range(2):
            trainer.step(samples)
            manifest = publisher.publish()
            versions.append((manifest, {name: tensor.clone() for name, tensor in transport.pull(manifest)}))
        engine = engine_of(base, rank=8, alpha=32.0)
        yield engine, versions
        engine.close()


def made_up(number: int) -> Completion:
    from titan_rl.types import FinishReason, VersionSpan

    tokens = [(11 * number + 7 * place) % 120 for place in range(20)]
    return Completion(str(number), tokens, [-4.8] * 20, FinishReason.LENGTH, (VersionSpan(0, 20),))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_probes_and_readback_detect_a_faulty_swap(fault: Any, published: Any) -> None:
    engine, ((_, old), (manifest, new)) = published

    def load(tensors: dict[str, Any]) -> Engine:
        engine.load_state_dict(tensors.items(), manifest.version)
        return engine

    SwapCheck().verify(manifest, load(new).score)
    with pytest.raises(VerificationError, match="probe logprobs that differ"):
        SwapCheck().verify(manifest, load(fault(new, old)).score)
    sums = published_checksums(manifest)
    with pytest.raises(VerificationError, match="its tensors differ from what was published"):
        compare(sums, [read_back(engine, sums)], manifest.version)


def test_rejects_adapter_with_unknown_or_incomplete_layers(published: Any) -> None:
    engine, ((manifest, tensors), _) = published
    renamed = {name.replace("self_attn", "attn"): tensor for name, tensor in tensors.items()}
    with pytest.raises(StateDictError, match=r"has model.layers.0.attn.q_proj.lora_A.weight, but the engine's"):
        engine.load_state_dict(renamed.items(), manifest.version)
    torn = {name: tensor for name, tensor in tensors.items() if "o_proj.lora_A" not in name}
    with pytest.raises(StateDictError, match="has only one of the two matrices"):
        engine.load_state_dict(torn.items(), manifest.version)


@pytest.mark.parametrize(("make", "dtype"), [(make_tiny_moe, "float32"), (make_tiny_qwen3, "bfloat16")])
def test_moe_and_bfloat16_engines_match_each_version(
    tmp_path: Path, make: Callable[[Path], Path], dtype: DType
) -> None:
    if make is make_tiny_moe:
        destroy_model_parallel()  # vLLM creates groups of experts only with the first groups of a process
    assert swap_and_verify(make(tmp_path / "model"), dtype) == [0.0, 0.0, 0.0]


def swap_and_verify(base: Path, dtype: DType) -> list[float]:
    """Unread shares of three versions, each loaded into an engine and verified against the trainer's logprobs."""
    training = TrainingConfig.model_validate({"lr": 1e-2, "adapter": {"rank": 16}})
    trainer = TrainerCore(ModelConfig(path=str(base), dtype=dtype), training, seed=0)
    adapter = AdapterSpec(16, 32.0, TARGETS)
    spec = EngineSpec(str(base), dtype=dtype, max_context=128, kv_cache_gib=0.1, adapters={"": adapter})
    engine, check, unread = VLLMEngine(spec), SwapCheck(), list[float]()
    samples = [sample_of([5, 6, 7], made_up(number), (-1.0) ** number) for number in range(8)]
    with SharedMemoryTransport(f"test-adapter-{dtype}") as transport:
        publisher = WeightPublisher(trainer, transport, num_probes=8)
        for _ in range(3):
            trainer.step(samples)
            manifest = publisher.publish()
            engine.load_state_dict(transport.pull(manifest), manifest.version)
            check.verify(manifest, engine.score)
            sums = published_checksums(manifest)
            unread.append(compare(sums, [read_back(engine, sums)], manifest.version).unread_share)
    engine.close()
    return unread


def test_rejects_version_without_a_free_slot_until_requests_end(tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "model")
    trainer = make_trainer(base, adapter={"rank": 8})
    tensors = {name: piece.tensor for name, piece in trainer.held_slices()}
    engine = engine_of(base, rank=8, alpha=32.0, num_versions=3)
    sampling = SamplingParams(max_tokens=20, min_tokens=20)
    for version in range(3):
        engine.load_state_dict(tensors.items(), version)
        engine.add(EngineRequest(f"of {version}", [5, 6, 7], sampling))
        engine.step()
    with pytest.raises(StateDictError, match="version 3 of the adapter has no place: running requests use all 3"):
        engine.load_state_dict(tensors.items(), 3)
    engine.abort(["of 0"])
    engine.load_state_dict(tensors.items(), 3)
    assert len(engine.step()) == 2
    engine.abort(["of 1", "of 2"])
    engine.pin(3)
    for version in (4, 5, 6):
        engine.load_state_dict(tensors.items(), version)
        engine.add(EngineRequest(f"pinned with {version}", [5, 6, 7], sampling, version=3))
    with pytest.raises(GenerationError, match=r"version 4 of the adapter is not loaded; loaded are"):
        engine.add(EngineRequest("gone", [5, 6, 7], sampling, version=4))
    assert len(engine.step()) == 3
    engine.close()
