"""Conversion of generator settings to vLLM's `EngineArgs`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from titan_rl.generation import vllm_arguments
from titan_rl.generation.engine import AdapterSpec, EngineSpec
from titan_rl.generation.vllm_arguments import CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS, engine_arguments


def test_options_override_the_defaults() -> None:
    spec = EngineSpec("policy", max_context=100)
    assert engine_arguments(spec, on_cpu=True).max_num_batched_tokens == CPU_BATCHED_TOKENS
    on_gpu = replace(spec, gpu_share=0.5, kv_cache_gib=1.0)
    assert engine_arguments(on_gpu, on_cpu=False).max_num_batched_tokens == GPU_BATCHED_TOKENS
    own = replace(spec, options={"max_num_batched_tokens": 1024, "swap_space": 0})
    with pytest.raises(TypeError, match="swap_space"):
        engine_arguments(own, on_cpu=True)
    own = replace(spec, options={"max_num_batched_tokens": 1024, "scheduling_policy": "priority"})
    assert engine_arguments(own, on_cpu=True).max_num_batched_tokens == 1024
    assert engine_arguments(own, on_cpu=True).scheduling_policy == "priority"


def test_cohere2_window_matches_transformers_and_keeps_user_overrides(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere2", "sliding_window": 4096}))
    spec = EngineSpec(str(tmp_path), options={"hf_overrides": {"logit_scale": 0.5}})
    assert engine_arguments(spec, on_cpu=True).hf_overrides == {"sliding_window": 4095, "logit_scale": 0.5}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "sliding_window": 4096}))
    assert engine_arguments(replace(spec, options={}), on_cpu=True).hf_overrides == {}


def test_argument_names_match_engine_args_fields() -> None:
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert vllm_arguments._argument_names() == fields
    assert vllm_arguments.OWN.keys() <= fields


def test_default_kv_cache_is_one_gib_on_cpu_and_free_memory_on_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * 2**30, 80 * 2**30))
    spec = EngineSpec(str(tmp_path), max_context=100)  # without weights
    assert engine_arguments(spec, on_cpu=True).kv_cache_memory_bytes == 2**30
    found = engine_arguments(spec, on_cpu=False)
    assert found.kv_cache_memory_bytes == pytest.approx((0.98 * 50 - 3) * 2**30)
    assert found.gpu_memory_utilization == pytest.approx(0.98 * 50 / 80)


def test_gpu_kv_cache_leaves_room_for_adapter_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * 2**30, 80 * 2**30))
    save_file({"layers.0.q_proj.weight": torch.zeros(100, 60)}, tmp_path / "model.safetensors")
    adapters = {name: AdapterSpec(12, 32.0, ("q_proj",), num_versions=3) for name in ("sort", "sum")}
    base = EngineSpec(str(tmp_path), max_context=100, dtype="bfloat16")
    without, with_them = (engine_arguments(each, on_cpu=False) for each in (base, replace(base, adapters=adapters)))
    assert without.kv_cache_memory_bytes is not None
    assert with_them.kv_cache_memory_bytes == without.kv_cache_memory_bytes - 6 * 16 * (100 + 60) * 2
    assert with_them.gpu_memory_utilization == pytest.approx(without.gpu_memory_utilization)
