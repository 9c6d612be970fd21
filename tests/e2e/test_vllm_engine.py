"""vLLM behind the engine loop, compared with a transformers forward pass of the same weights."""

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from depth import in_depth
from tqdm import tqdm
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from titan_rl.core.errors import EngineDeadError, GenerationError, ModelError, RequestError, VerificationError
from titan_rl.generation.engine import Engine, EngineSpec, LoadedPolicy, TokenDelta
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.testing.engine_contract import PLACES, EngineContract
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

VOCAB, CONTEXT = 128, 128
FULL_CONTEXT_GIB = 6 * 32 * 512 / 2**30  # six blocks: one context fits


def make_model(seed: int, *, tied: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float().eval()


def weights(model: Qwen3ForCausalLM) -> list[tuple[str, object]]:
    return [(name, tensor.clone()) for name, tensor in model.state_dict().items()]


@torch.no_grad()
def reference_logprobs(model: Qwen3ForCausalLM, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Logprobs of all tokens after the first."""
    logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


@torch.no_grad()
def swapped_logprobs(
    old: Qwen3ForCausalLM, new: Qwen3ForCausalLM, prompt: list[int], completion: list[int], num_old: int
) -> list[float]:
    """Logprobs of a completion whose first `num_old` tokens come from `old`. `new` continues with its KV cache."""
    cache = DynamicCache()
    logprobs, fed = list[float](), prompt
    for model, tokens in ((old, completion[:num_old]), (new, completion[num_old:])):
        logits = model(torch.tensor([[*fed, *tokens[:-1]]]), past_key_values=cache, use_cache=True).logits[0]
        logprobs += logits[-len(tokens) :].log_softmax(-1)[range(len(tokens)), tokens].tolist()
        fed = tokens[-1:]
    return logprobs


def largest_difference(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right)
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def old_model() -> Qwen3ForCausalLM:
    return make_model(0)


@pytest.fixture(scope="module")
def engine(old_model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    folder = tmp_path_factory.mktemp("model")
    old_model.save_pretrained(folder)
    engine = VLLMEngine(EngineSpec(str(folder), max_context=CONTEXT, max_running=32, kv_cache_gib=0.125))
    yield engine
    engine.close()


class Borrowed:
    """The module's engine with fresh weights and cache. Closing it does not shut it down."""

    def __init__(self, engine: VLLMEngine, model: Qwen3ForCausalLM) -> None:
        engine.load_state_dict(weights(model), 0)
        engine.reset_prefix_cache()
        self._engine = engine
        self.batch_sizes: list[int] = []
        self.block_at_step = 0
        self.started, self.release = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(self) -> list[TokenDelta]:
        if len(self.batch_sizes) == self.block_at_step > 0:
            self.started.set()
            assert self.release.wait(240)
        deltas = self._engine.step()
        self.batch_sizes.append(len(deltas))
        return deltas

    def close(self) -> None:
        assert not self._engine.step()


def prompt(seed: int, length: int = 12) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(engine: VLLMEngine, request: EngineRequest) -> tuple[list[int], list[float], FinishReason | None]:
    engine.add(request)
    tokens, logprobs, finish = list[int](), list[float](), None
    while finish is None:
        for delta in engine.step():
            tokens += delta.token_ids
            logprobs += delta.logprobs
            finish = delta.finish_reason
    return tokens, logprobs, finish


@pytest.fixture(scope="module", params=[pytest.param("roomy", marks=in_depth), "full"])
def crowded(
    request: pytest.FixtureRequest, old_model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMEngine]:
    """An engine with a KV cache for all requests, and one with too small a cache."""
    folder = tmp_path_factory.mktemp("crowded")
    old_model.save_pretrained(folder)
    gib = {"roomy": 0.125, "full": FULL_CONTEXT_GIB}[request.param]
    engine = VLLMEngine(EngineSpec(str(folder), max_context=CONTEXT, max_running=PLACES, kv_cache_gib=gib))
    yield engine
    engine.close()


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, crowded: VLLMEngine) -> VLLMEngine:
        return crowded

    def weights(self, version: int) -> list[tuple[str, object]]:
        return weights(make_model(0))

    def num_forwards(self, engine: VLLMEngine) -> int:
        return engine._core.engine_core.scheduler.current_step  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("crowded", ["full"], indirect=True)
def test_adaptive_engine_preempts_less_and_finishes_all_requests(
    crowded: VLLMEngine, old_model: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    """The number of preemptions depends on lengths, which are fixed here, and not on timing."""

    def preemptions(engine: VLLMEngine) -> tuple[float, set[float]]:
        """Preemptions while 12 requests grow from one block to three, and the numbers of places seen."""
        before, places, left = engine.gauges()["preemptions_total"], set[float](), 12
        for index in range(left):
            engine.add(EngineRequest(f"crowd-{index}", prompt(index), SamplingParams(max_tokens=60)))
        while left:
            left -= sum(delta.finish_reason is not None for delta in engine.step())
            places.add(engine.gauges()["places"])
        return engine.gauges()["preemptions_total"] - before, places

    old_model.save_pretrained(tmp_path)
    adaptive = VLLMEngine(
        EngineSpec(str(tmp_path), max_context=CONTEXT, max_running=PLACES, adapts=True, kv_cache_gib=FULL_CONTEXT_GIB)
    )
    fixed_count, fixed_places = preemptions(crowded)
    count, places = preemptions(adaptive)
    adaptive.close()
    assert fixed_places == {PLACES}
    assert min(places) < max(places) == PLACES
    assert count < fixed_count


def test_implements_the_engine_protocol(engine: VLLMEngine) -> None:
    assert isinstance(engine, Engine)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_the_sampling_distribution(
    engine: VLLMEngine, old_model: Qwen3ForCausalLM, temperature: float
) -> None:
    engine.load_state_dict(weights(old_model), 0)
    tokens, logprobs, finish = run(
        engine, EngineRequest("a", prompt(1), SamplingParams(max_tokens=20, temperature=temperature))
    )
    expected = reference_logprobs(old_model, prompt(1) + tokens, temperature)[11:]
    assert finish is FinishReason.LENGTH
    assert largest_difference(logprobs, expected) < 1e-5


def test_stop_token_ends_the_completion(engine: VLLMEngine) -> None:
    request = EngineRequest("greedy", prompt(2), SamplingParams(max_tokens=10, temperature=0))
    greedy, _, _ = run(engine, request)
    stop = greedy[4]
    first = greedy.index(stop)
    params = SamplingParams(max_tokens=10, temperature=0, stop_token_ids=(stop,))
    tokens, _, finish = run(engine, EngineRequest("stopped", prompt(2), params))
    assert tokens == greedy[: first + 1]
    assert finish is FinishReason.STOP
    held = SamplingParams(max_tokens=10, temperature=0, stop_token_ids=(stop,), min_tokens=10)
    tokens, _, finish = run(engine, EngineRequest("held", prompt(2), held))
    assert stop not in tokens
    assert finish is FinishReason.LENGTH


def test_seeded_sampling_is_reproducible(engine: VLLMEngine) -> None:
    def draw(name: str, seed: int) -> list[int]:
        return run(engine, EngineRequest(name, prompt(3), SamplingParams(max_tokens=16, seed=seed)))[0]

    assert draw("a", 1) == draw("b", 1) != draw("c", 2)


def test_seeded_prompts_exceeding_the_step_budget_all_finish(engine: VLLMEngine) -> None:
    """vLLM cannot chunk a seeded prompt on a CPU, so it must admit fewer at a time."""
    for index in range(48):
        sampling = SamplingParams(max_tokens=2, min_tokens=2, seed=index)
        engine.add(EngineRequest(f"long-{index}", prompt(index, CONTEXT - 3), sampling))
    finished: list[str] = []
    while len(finished) < 48:
        finished += [delta.request_id for delta in engine.step() if delta.finish_reason is not None]
    assert sorted(finished) == sorted(f"long-{index}" for index in range(48))


def test_context_length_bounds_a_completion(engine: VLLMEngine) -> None:
    tokens, _, finish = run(engine, EngineRequest("a", prompt(4, CONTEXT - 3), SamplingParams(max_tokens=50)))
    assert (len(tokens), finish) == (3, FinishReason.LENGTH)


def test_engine_uses_no_named_semaphore(engine: VLLMEngine) -> None:
    assert type(tqdm.get_lock()).__name__ != "TqdmDefaultWriteLock", "it is a named semaphore"


def test_rejects_bad_requests_with_the_offending_values(engine: VLLMEngine) -> None:
    sampling = SamplingParams(max_tokens=4)
    for token_ids, message in (
        (prompt(0, CONTEXT), "has 128 prompt tokens.*max_context, which is 128"),
        ([], "has 0 prompt tokens"),
        ([1, VOCAB], "token 128; the vocabulary has 128"),
        ([1, 2.5], "something other than token ids"),
        ([1, 10**30], "something other than token ids"),
        ([1, None], "something other than token ids"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add(EngineRequest("bad", token_ids, sampling))
    with pytest.raises(RequestError, match="must fit into 64 bits"):
        engine.add(EngineRequest("bad", [1], SamplingParams(max_tokens=4, seed=2**70)))
    engine.add(EngineRequest("a", [1], sampling))
    with pytest.raises(RequestError, match="'a' is already running"):
        engine.add(EngineRequest("a", [1], sampling))
    engine.abort(["a", "unknown"])
    assert not engine.step()


def test_out_of_vocabulary_stop_tokens_are_ignored(engine: VLLMEngine) -> None:
    params = SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=(-1, VOCAB, 10**6))
    assert len(run(engine, EngineRequest("a", [1, 2], params))[0]) == 6


def test_scores_match_transformers(engine: VLLMEngine, old_model: Qwen3ForCausalLM) -> None:
    engine.load_state_dict(weights(old_model), 0)
    sequences = [prompt(seed, length) for seed, length in ((5, 2), (6, 40), (7, CONTEXT), (6, 40))]
    scores = engine.score([*sequences, [3]])
    for sequence, score in zip(sequences, scores, strict=False):
        assert largest_difference(score, reference_logprobs(old_model, sequence)) < 1e-5
    assert scores[-1] == []


async def test_concurrent_requests_share_a_batch(engine: VLLMEngine, old_model: Qwen3ForCausalLM) -> None:
    borrowed = Borrowed(engine, old_model)
    loop = EngineLoop(lambda: borrowed)  # pyright: ignore[reportArgumentType]
    await loop.start()
    completions = await asyncio.gather(
        *(
            loop.generate(prompt(seed), request_id=f"r{seed}", sampling=SamplingParams(max_tokens=20))
            for seed in range(24)
        )
    )
    await loop.close()
    assert max(borrowed.batch_sizes) == 24
    assert len(borrowed.batch_sizes) < 24 + 20
    for seed, completion in enumerate(completions):
        expected = reference_logprobs(old_model, [*prompt(seed), *completion.token_ids])[11:]
        assert largest_difference(list(completion.logprobs), expected) < 1e-5


@pytest.mark.parametrize("verified", [False, True])
async def test_hot_swap_with_requests_in_flight_matches_reference(
    engine: VLLMEngine, old_model, verified: bool
) -> None:
    new_model = make_model(1)
    probe = prompt(99, 20)

    def verify(loaded: LoadedPolicy) -> None:
        assert largest_difference(loaded.score([probe])[0], reference_logprobs(new_model, probe)) < 1e-5

    borrowed = Borrowed(engine, old_model)
    borrowed.block_at_step = 10
    loop = EngineLoop(lambda: borrowed)  # pyright: ignore[reportArgumentType]
    await loop.start()

    def generate(seed: int) -> asyncio.Task[Completion]:
        return asyncio.create_task(
            loop.generate(
                prompt(seed),
                request_id=f"r{seed}",
                sampling=SamplingParams(max_tokens=100),
            )
        )

    calls = [generate(seed) for seed in range(6)]
    assert await asyncio.to_thread(borrowed.started.wait, 30)
    pull = asyncio.create_task(loop.pull(1, lambda: weights(new_model), verify if verified else None))
    while not loop._state._pulls:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    borrowed.release.set()
    await pull
    completions = await asyncio.gather(*calls)
    later = await loop.generate(prompt(0), request_id="later", sampling=SamplingParams(max_tokens=8))
    await loop.close()
    for seed, completion in enumerate(completions):
        old_span, new_span = completion.version_spans
        assert (old_span.version, new_span.version) == (0, 1)
        assert old_span.num_tokens + new_span.num_tokens == 100
        expected = swapped_logprobs(old_model, new_model, prompt(seed), list(completion.token_ids), old_span.num_tokens)
        assert largest_difference(list(completion.logprobs), expected) < 1e-5
    # The old weights' KV of the same prompt is not reused.
    assert later.version_spans == (VersionSpan(1, 8),)
    assert later.metrics["cached_prompt_tokens"] == 0
    expected = reference_logprobs(new_model, [*prompt(0), *later.token_ids])[11:]
    assert largest_difference(list(later.logprobs), expected) < 1e-5


def test_prefix_cache_serves_later_requests_until_reset(engine: VLLMEngine, old_model: Qwen3ForCausalLM) -> None:
    def cached(name: str) -> float:
        engine.add(EngineRequest(name, prompt(10, 100), SamplingParams(max_tokens=1)))
        (delta,) = engine.step()
        return delta.metrics["cached_prompt_tokens"]

    engine.load_state_dict(weights(old_model), 0)
    engine.reset_prefix_cache()
    assert cached("a") == 0
    assert cached("b") >= 64
    engine.reset_prefix_cache()
    assert cached("c") == 0


def test_running_requests_can_be_recomputed(engine: VLLMEngine, old_model: Qwen3ForCausalLM) -> None:
    new_model = make_model(1)
    engine.load_state_dict(weights(old_model), 0)
    engine.add(EngineRequest("a", prompt(11), SamplingParams(max_tokens=12)))
    deltas = [delta for _ in range(6) for delta in engine.step()]
    engine.load_state_dict(weights(new_model), 1)
    engine.reset_prefix_cache(recompute_running=True)
    while len(deltas) < 12:
        deltas += engine.step()
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert len(tokens) == 12
    expected = reference_logprobs(new_model, prompt(11) + tokens)[11:]
    assert largest_difference(logprobs[6:], expected[6:]) < 1e-5


class ReloadingEngine(VLLMEngine):
    """Loads tied embeddings the way vLLM does by default."""

    def load_state_dict(self, items: Iterable[tuple[str, object]], version: int) -> None:
        self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": items})


async def test_verification_detects_stale_tied_lm_head(tmp_path: Path) -> None:
    old_model, new_model = make_model(0, tied=True), make_model(1, tied=True)
    old_model.save_pretrained(tmp_path)
    published = [(name, tensor) for name, tensor in weights(new_model) if name != "lm_head.weight"]
    probe = prompt(1, 20)

    def verify(loaded: LoadedPolicy) -> None:
        difference = largest_difference(loaded.score([probe])[0], reference_logprobs(new_model, probe))
        if difference > 1e-5:
            raise VerificationError(f"logprobs differ by {difference:.3g}")

    engine = ReloadingEngine(EngineSpec(str(tmp_path), max_context=CONTEXT, kv_cache_gib=0.125))
    loop = EngineLoop(lambda: engine)
    await loop.start()
    with pytest.raises(VerificationError, match=r"logprobs differ by [1-9]"):
        await loop.pull(1, lambda: published, verify)
    with pytest.raises(GenerationError, match="loaded weights are unknown"):
        await loop.generate([1], request_id="a", sampling=SamplingParams(max_tokens=1))

    def load_head_too(items: Iterable[tuple[str, object]], version: int) -> None:
        VLLMEngine.load_state_dict(engine, items, version)

    engine.load_state_dict = load_head_too
    await loop.pull(2, lambda: published, verify)
    assert (await loop.generate([1], request_id="a", sampling=SamplingParams(max_tokens=1))).versions == [2]
    await loop.close()


def test_rejects_folder_without_config_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        VLLMEngine(EngineSpec(str(tmp_path)))


async def test_loop_fails_with_the_reason_if_the_engine_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match="no config"):
        await EngineLoop(lambda: VLLMEngine(EngineSpec(str(tmp_path)))).start()
