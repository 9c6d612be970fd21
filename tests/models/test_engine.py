"""Model families in vLLM: the engine matches the trainer's logprobs for an export and after three swaps with requests
running."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from background import HANG_S

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import on_policy_samples
from models.families import ADAPTED_TARGETS, ALL, ENGINE_PROBLEMS, ENGINES, WRONG_IN_THE_ENGINE, make_family, model_type
from models.steps import make
from transformers import AutoConfig

from titan_rl.core.errors import VerificationError
from titan_rl.generation.engine import AdapterSpec, EngineSpec, TokenDelta
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.family_check import draw_sequences
from titan_rl.training.models.families import ADAPTED
from titan_rl.training.models.shrunken_models import make_tiny, tiny_config
from titan_rl.training.publishing import WeightPublisher
from titan_rl.training.settings import TARGETS, ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore
from titan_rl.types import SamplingParams
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport
from titan_rl.weights.verification import SwapCheck

TOLERANCE = 2e-5
PROMPT = [5, 6, 7, 8]
GATED_HEADS = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # the smallest size that vLLM's kernel supports


@pytest.mark.check("b")
def test_engine_matches_trainer_logprobs_after_each_swap(
    name: str, folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if name not in ENGINES:
        pytest.skip("make test-models starts the engines of all families")
    if name not in ENGINE_PROBLEMS:
        compare_engine(folder, tmp_path)
        return
    record_property("works", False)
    # In a separate process, because an engine that fails to start leaves vLLM's settings in transformers' modules.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        error = pool.submit(error_of_engine, folder, tmp_path).result(timeout=HANG_S)
    assert error is not None, f"{name} works; remove it from ENGINE_PROBLEMS"


def error_of_engine(folder: Path, out: Path) -> str | None:
    """Error of `compare_engine`, or None if it passes."""
    try:
        compare_engine(folder, out)
    except Exception as error:
        return repr(error)
    return None


def compare_engine(folder: Path, out: Path) -> None:
    """Compare an engine with a trainer, before and after each of three swaps, with requests running."""
    trainer = make(folder, lr=1e-2)
    trainer.step(on_policy_samples(trainer, 40, 33))
    trainer.export_hf(out / "export")
    engine = VLLMEngine(EngineSpec(str(out / "export"), max_context=128, kv_cache_gib=0.1))
    try:
        assert difference(engine, trainer) < TOLERANCE
        for number in range(2):
            sampling = SamplingParams(max_tokens=100, min_tokens=100)
            engine.add(EngineRequest(str(number), PROMPT, sampling))
        first = steps(engine, 5)
        check_sampled(first, trainer)
        for version in range(1, 4):
            trainer.step(on_policy_samples(trainer, 40, 33))
            engine.load_state_dict(list(trainer.named_tensors()), version)
            assert difference(engine, trainer) < TOLERANCE, version
            assert steps(engine, 5), "the requests continue"
    finally:
        engine.close()


def test_engine_matches_trainer_logprobs_after_adapter_swaps(name: str, folder: Path) -> None:
    if not ALL or model_type(name) not in ADAPTED:
        pytest.skip("make test-models starts the engines of all families that have adapters")
    targets = ADAPTED_TARGETS.get(name, TARGETS)
    trainer = make(folder, lr=1e-2, adapter={"rank": 4, "alpha": 8.0, "targets": ADAPTED_TARGETS.get(name, ())})
    adapter = AdapterSpec(4, 8.0, targets)
    engine = VLLMEngine(EngineSpec(str(folder), max_context=128, kv_cache_gib=0.1, adapters={"": adapter}))
    try:
        for number in range(2):
            sampling = SamplingParams(max_tokens=100, min_tokens=100)
            engine.add(EngineRequest(str(number), PROMPT, sampling))
        for version in range(1, 4):
            trainer.step(on_policy_samples(trainer, 40, 33))
            engine.load_state_dict([(key, piece.tensor) for key, piece in trainer.held_slices()], version)
            assert difference(engine, trainer) < TOLERANCE, version
            assert steps(engine, 5), "the requests continue"
    finally:
        engine.close()


@pytest.mark.skipif(not ALL, reason="make test-models starts the engines of all families")
def test_packed_bfloat16_convolutions_are_swapped_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny(tiny_config(AutoConfig.for_model("qwen3_next"), **GATED_HEADS), folder)
    model = ModelConfig(path=str(folder), max_context=128, dtype="bfloat16")
    trainer = TrainerCore(model, TrainingConfig(steps=10, lr=1e-2), seed=0)
    engines = [bfloat16_engine(folder)]
    try:
        engines[0].add(EngineRequest("r", PROMPT, SamplingParams(max_tokens=100, min_tokens=100)))
        for version in range(1, 3):
            trainer.step(on_policy_samples(trainer, 40, 33))
            published = dict(trainer.named_tensors())
            engines[0].load_state_dict(list(published.items()), version)
            held = [each for each in engines[0].held_weights() if each.name.endswith("conv1d.weight")]
            assert held
            assert all(torch.equal(each.tensor, published[each.name]) for each in held)
            assert steps(engines[0], 5), "the request continues"
        trainer.export_hf(tmp_path / "export")
        engines.append(bfloat16_engine(tmp_path / "export"))
        swapped, fresh = (engine.score(draw_sequences(40, 17)) for engine in engines)
        assert swapped == fresh
    finally:
        for engine in engines:
            engine.close()


def bfloat16_engine(folder: Path) -> VLLMEngine:
    return VLLMEngine(EngineSpec(str(folder), dtype="bfloat16", max_context=128, kv_cache_gib=0.1))


@pytest.mark.parametrize("wrong", WRONG_IN_THE_ENGINE)
def test_probes_reject_weights_that_the_engine_computes_differently(wrong: str, tmp_path: Path) -> None:
    trainer = make(make_family(wrong, tmp_path / "model"))
    engine = VLLMEngine(EngineSpec(str(tmp_path / "model"), max_context=128, kv_cache_gib=0.1))
    transport = SharedMemoryTransport("test-wrong", root=tmp_path)
    publisher = WeightPublisher(trainer, transport)
    try:
        with pytest.raises(VerificationError, match="probe logprobs that differ"):
            pull_two_versions(trainer, publisher, transport, engine)
    finally:
        publisher.close()
        engine.close()


def pull_two_versions(
    trainer: TrainerCore, publisher: WeightPublisher, transport: SharedMemoryTransport, engine: VLLMEngine
) -> None:
    swaps = SwapCheck()
    for version in range(2):
        manifest = publisher.publish()
        engine.load_state_dict(list(transport.pull(manifest)), version)
        swaps.verify(manifest, engine.score)
        trainer.step(on_policy_samples(trainer, 40, 33))


def difference(engine: VLLMEngine, trainer: TrainerCore) -> float:
    """Largest difference between the two sides' logprobs of sequences."""
    sequences = draw_sequences(40, 17)
    pairs = zip(engine.score(sequences), trainer.score(sequences), strict=True)
    return max(float((torch.tensor(theirs) - torch.tensor(mine)).abs().max()) for theirs, mine in pairs)


def steps(engine: VLLMEngine, count: int) -> list[TokenDelta]:
    return [delta for _ in range(count) for delta in engine.step()]


def check_sampled(deltas: list[TokenDelta], trainer: TrainerCore) -> None:
    """Compare logprobs of sampled tokens with the trainer's."""
    for request_id in {delta.request_id for delta in deltas}:
        own = [delta for delta in deltas if delta.request_id == request_id]
        tokens = [token for delta in own for token in delta.token_ids]
        logprobs = [value for delta in own for value in delta.logprobs]
        expected = trainer.score([[*PROMPT, *tokens]])[0][len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), rtol=0, atol=TOLERANCE)
