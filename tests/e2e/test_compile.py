"""torch.compile on CPUs: equal steps without recompilation per shape, and flex attention."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from depth import in_depth
from tiny_policy import make_tiny_qwen3, make_trainer, on_policy_samples, weights
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from titan_rl.core.errors import ConfigError
from titan_rl.training.attention.attention import layout_documents
from titan_rl.training.attention.documents import Document
from titan_rl.training.attention.flex_attention import layout_blocks

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory):
    # An engine in this process may have disabled dynamo. Compile workers would each import torch for a few kernels.
    settings = torch._dynamo.config.patch(disable=False), torch._inductor.config.patch(compile_threads=1)
    with pytest.MonkeyPatch.context() as patch, settings[0], settings[1]:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@needs_compiler
@in_depth
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_steps_match_eager_without_recompiling_per_shape(folder: Path, checkpointing: str):
    torch._dynamo.reset()
    counters.clear()
    rows = {"row_tokens": 128, "rows_per_micro_batch": 8, "lr": 1e-4}
    eager = make_trainer(folder, **rows)
    compiled = make_trainer(folder, **rows, compile=True, activation_checkpointing=checkpointing)
    num_graphs: list[int] = []
    for lengths in [(90, 70, 50), (20, 110, 30, 99, 75), (110, 120), (60, 70, 80, 90, 100, 110)]:
        samples = on_policy_samples(eager, *lengths)
        expected, found = eager.step(samples).metrics, compiled.step(samples).metrics
        assert found["on_policy_logprob_diff_max"] < 1e-4
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 0
    assert num_graphs == num_graphs[:1] * 4
    reference, published = weights(eager), weights(compiled)
    assert published.keys() == reference.keys()
    for name, tensor in published.items():
        # AdamW normalizes gradients and amplifies their rounding; a wrong one moves a weight by `lr`, 1e-4, per step.
        torch.testing.assert_close(tensor, reference[name], rtol=0, atol=2e-5)


@needs_compiler
@in_depth
def test_compiled_flex_attention_matches_bucket_attention():
    """Forward only: the uncompiled operator ignores blocks, and the compiled one has no gradients on CPUs."""
    documents = [Document(290), Document(150, 0, 290), Document(33, 0, 290), Document(200)]
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 673, heads, 32, generator=generator) for heads in (4, 2, 2)]
    q, k, v = (x.transpose(1, 2) for x in qkv)
    block_mask = layout_blocks(documents).block_mask
    found = torch.compile(flex_attention)(q, k, v, block_mask=block_mask, scale=0.3, enable_gqa=True)
    assert isinstance(found, torch.Tensor)
    expected = layout_documents(documents).attend(*qkv, scale=0.3)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=0, atol=1e-5)


def test_compile_without_a_cpp_compiler_is_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"training.compile = true needs a C\+\+ compiler .* compile = false"):
        make_trainer(folder, compile=True)
    assert os.listdir(tmp_path) == []
