"""Speculative decoding in vLLM preserves the policy's distribution, token by token."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from depth import in_depth

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from titan_rl.config.sections import SpeculativeConfig
from titan_rl.core.errors import RequestError
from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.testing.engine_contract import Batch
from titan_rl.types import FinishReason, SamplingParams

CONTEXT = 128
VOCABULARY, LENGTH = (8, 2) if torch.cuda.is_available() else (4, 3)  # on GPUs vLLM requests 5 logprobs at startup
PROMPT = [0, 1, 2, 3] * 3 + [0, 1, 2]  # repetitive, so that ngram finds matches
SAMPLES = 480
PLAIN = SamplingParams(max_tokens=LENGTH)
CUT = SamplingParams(max_tokens=LENGTH, temperature=0.7, top_p=0.95, top_k=3)
TOLERANCE = 5e-3 if torch.cuda.is_available() else 1e-5  # of logprobs in float32
MAX_CHI_SQUARED = 140.0  # 63 degrees of freedom; a correct sampler exceeds it once in ten million


def make_model(folder: Path, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,  # a layer of 192 x 128, which oneDNN packs differently for one thread and for two
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Qwen3ForCausalLM]]:
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, make_model(folder / name, seed)) for seed, name in enumerate(("policy", "small"))}


@pytest.fixture(scope="module")
def policy(models: dict[str, tuple[Path, Qwen3ForCausalLM]]) -> Qwen3ForCausalLM:
    return models["policy"][1]


@pytest.fixture(scope="module")
def num_threads() -> int:
    """Number of torch threads before any engine of this module starts."""
    return torch.get_num_threads()


NGRAM = pytest.mark.parametrize("engine", ["ngram"], indirect=True)
MODEL = pytest.param("draft_model", marks=in_depth)
BOTH = pytest.mark.parametrize("engine", ["ngram", MODEL], indirect=True)


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, models: dict[str, tuple[Path, Qwen3ForCausalLM]], num_threads: int
) -> Iterator[VLLMEngine]:
    small = str(models["small"][0]) if request.param == "draft_model" else None
    speculative = SpeculativeConfig(method=request.param, num_speculative_tokens=2, model=small, prompt_lookup=(1, 4))
    engine = VLLMEngine(
        EngineSpec(
            str(models["policy"][0]),
            max_context=CONTEXT,
            max_running=64,
            kv_cache_gib=0.125,
            speculative=speculative.options(),
            prefix_cache=request.param == "ngram",
        )
    )
    yield engine
    engine.close()


def draw(engine: VLLMEngine, sampling: SamplingParams, count: int) -> Batch:
    """Sample `count` answers to one prompt, each with its own seed."""
    batch = Batch(engine)
    for seed in range(count):
        batch.add(f"{seed}", PROMPT, replace(sampling, seed=seed))
    batch.run()
    return batch


@torch.no_grad()
def exact_logprobs(
    policy: Qwen3ForCausalLM, answers: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[list[float]]:
    """Logprobs of the tokens of equally long answers under the sampling distribution."""
    answers_AT = torch.tensor(answers)
    ids_AT = torch.cat([torch.tensor([PROMPT]).expand(len(answers), -1), answers_AT], dim=1)
    logits_ATV = policy(ids_AT).logits[:, len(PROMPT) - 1 : -1] / sampling.temperature
    if sampling.top_k > 0:
        least_AT1 = logits_ATV.topk(sampling.top_k).values[..., -1:]
        logits_ATV = logits_ATV.masked_fill(logits_ATV < least_AT1, -math.inf)
    if sampling.top_p < 1:
        sorted_ATV, order_ATV = logits_ATV.sort(descending=True)
        ahead_ATV = sorted_ATV.softmax(-1).cumsum(-1) - sorted_ATV.softmax(-1)
        out_ATV = torch.empty_like(ahead_ATV, dtype=torch.bool).scatter_(-1, order_ATV, ahead_ATV >= sampling.top_p)
        logits_ATV = logits_ATV.masked_fill(out_ATV, -math.inf)
    return logits_ATV.log_softmax(-1).gather(-1, answers_AT[..., None])[..., 0].tolist()


def test_spread_repeats_request_values_per_token() -> None:
    from titan_rl.generation.vllm_cpu import spread

    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    assert spread(torch.tensor([0.0, 5.0, 0.75]), ends, 3, replace_from=0, replace_to=1).tolist() == [1.0, 1.0, 0.75]
    assert spread(torch.tensor([7, 8, -1]), ends, 3).tolist() == [7, 7, -1]


@pytest.mark.parametrize(
    ("engine", "sampling"),
    [("ngram", PLAIN), ("ngram", CUT), pytest.param("draft_model", CUT, marks=in_depth)],
    ids=["ngram-plain", "ngram-cut", "draft_model-cut"],
    indirect=["engine"],
)
def test_answers_follow_the_policy_distribution(
    engine: VLLMEngine, policy: Qwen3ForCausalLM, sampling: SamplingParams
) -> None:
    drawn = draw(engine, sampling, SAMPLES)
    answers = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    exact = dict(zip(answers, exact_logprobs(policy, answers, sampling), strict=True))
    counts = Counter(tuple(tokens) for tokens in drawn.tokens.values())
    expected = {answer: SAMPLES * math.exp(sum(logprobs)) for answer, logprobs in exact.items()}
    assert all(expected[answer] for answer in counts)
    assert sum((counts[answer] - n) ** 2 / n for answer, n in expected.items() if n) < MAX_CHI_SQUARED
    for name, tokens in drawn.tokens.items():
        assert drawn.logprobs[name] == pytest.approx(exact[tuple(tokens)], abs=TOLERANCE)


@NGRAM
@pytest.mark.skipif(torch.cuda.is_available(), reason="rounding on GPUs depends on the batch")
def test_seeded_sampling_is_independent_of_the_batch(engine: VLLMEngine, policy: Qwen3ForCausalLM) -> None:
    sampling = SamplingParams(max_tokens=20)
    engine.reset_prefix_cache()
    many = draw(engine, sampling, 20)
    few = draw(engine, sampling, 3)
    assert [few.tokens[f"{seed}"] for seed in range(3)] == [many.tokens[f"{seed}"] for seed in range(3)]
    answers = list(many.tokens.values())
    for logprobs, exact in zip(many.logprobs.values(), exact_logprobs(policy, answers, sampling), strict=True):
        assert logprobs == pytest.approx(exact, abs=TOLERANCE)


@NGRAM
@pytest.mark.skipif(torch.cuda.is_available(), reason="rounding on GPUs depends on the batch")
def test_scoring_does_not_disturb_running_requests(engine: VLLMEngine) -> None:
    undisturbed = draw(engine, SamplingParams(max_tokens=12), 20)
    disturbed = Batch(engine)
    for seed in range(20):
        disturbed.add(f"{seed}", PROMPT, SamplingParams(max_tokens=12, seed=seed))
    while len(disturbed.finished) < 20:
        disturbed.step()
        engine.score([PROMPT, PROMPT[1:]])
    assert disturbed.tokens == undisturbed.tokens


@NGRAM
def test_speculation_keeps_the_number_of_threads(engine: VLLMEngine, num_threads: int) -> None:
    draw(engine, PLAIN, 1)
    assert torch.get_num_threads() == num_threads


@NGRAM
def test_stop_token_discards_later_draft_tokens(engine: VLLMEngine) -> None:
    stopped = draw(engine, SamplingParams(max_tokens=20, stop_token_ids=(2,)), 20)
    for name, tokens in stopped.tokens.items():
        assert len(tokens) == len(stopped.logprobs[name])
        if stopped.finished[name] is FinishReason.STOP:
            assert tokens.index(2) == len(tokens) - 1
        else:
            assert len(tokens) == 20
            assert 2 not in tokens


@BOTH
@torch.no_grad()
def test_tokens_after_a_swap_use_the_new_weights(engine: VLLMEngine, policy: Qwen3ForCausalLM, tmp_path: Path) -> None:
    new, batch, cache = make_model(tmp_path, 7), Batch(engine), DynamicCache()
    batch.add("a", PROMPT, SamplingParams(max_tokens=20, seed=3))
    batch.step(5)
    num_old = len(batch.tokens["a"])
    engine.load_state_dict([(name, tensor.clone()) for name, tensor in new.state_dict().items()], 1)
    batch.run()
    fed, logprobs = PROMPT, list[float]()
    for index, token in enumerate(batch.tokens["a"]):
        logits = (policy if index < num_old else new)(torch.tensor([fed]), past_key_values=cache).logits[0, -1]
        logprobs.append(logits.log_softmax(-1)[token].item())
        fed = [token]
    engine.load_state_dict([(name, tensor.clone()) for name, tensor in policy.state_dict().items()], 2)
    engine.reset_prefix_cache()
    assert 5 <= num_old < 20
    assert batch.logprobs["a"] == pytest.approx(logprobs, abs=TOLERANCE)


@NGRAM
def test_counts_drafts_and_accepted_tokens(engine: VLLMEngine) -> None:
    before, batch = engine.gauges(), draw(engine, SamplingParams(max_tokens=20), 16)
    grown = {name: value - before[name] for name, value in engine.gauges().items() if name.endswith("_total")}
    drafts, guessed, accepted = (grown[f"{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert 0 < accepted < guessed <= 2 * drafts
    # A forward pass gives one token plus the accepted ones. The last pass may give too many.
    assert 16 * 20 - drafts <= accepted + 16 * batch.num_steps
    assert batch.num_steps <= 20


@NGRAM
def test_rejects_sampling_parameters_that_vllm_ignores(engine: VLLMEngine) -> None:
    for sampling, name in (
        (SamplingParams(max_tokens=4, min_p=0.1), "min_p = 0.1"),
        (SamplingParams(max_tokens=4, min_tokens=2), "min_tokens = 2"),
    ):
        with pytest.raises(RequestError, match=f"{name}, which vLLM ignores with speculative"):
            engine.add(EngineRequest("a", PROMPT, sampling))


@BOTH
def test_prefix_cache_is_used_if_enabled_and_hits_are_counted(engine: VLLMEngine) -> None:
    long = PROMPT * 4  # more than a block
    engine.reset_prefix_cache()
    before = engine.gauges()
    for name in ("first", "second"):
        batch = Batch(engine)
        batch.add(name, long, SamplingParams(max_tokens=1))
        batch.run()
    after = engine.gauges()
    if "prefix_cache_hits_total" not in after:
        assert "prefix_cache_queries_total" not in after
        return
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == 2 * len(long)
    assert 16 <= after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] < len(long)  # whole blocks
    engine.reset_prefix_cache()
    batch.add("after a swap", long, SamplingParams(max_tokens=1))
    batch.run()
    assert engine.gauges()["prefix_cache_hits_total"] == after["prefix_cache_hits_total"]
