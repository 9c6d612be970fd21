"""[generation.vllm] passes on what vLLM knows, and refuses what titan_rl sets itself, before anything starts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from titan_rl.cluster.generator_actor import GeneratorPlan
from titan_rl.config.load import load_config
from titan_rl.config.sections import GenerationConfig, StateDictConfig
from titan_rl.core.errors import ConfigError
from titan_rl.generation import vllm_arguments
from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.vllm_arguments import CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS, engine_arguments, problem_of
from titan_rl.training.settings import ModelConfig

EXAMPLE = "examples/alphabet_sort/cpu.toml"


@pytest.fixture
def config_file(tmp_path, request):
    text = (request.config.rootpath / EXAMPLE).read_text()

    def write(table: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(f"{text}\n[generation.vllm]\n{table}\n")
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _in_the_repository(request, monkeypatch) -> None:
    monkeypatch.chdir(request.config.rootpath)


def test_options_reach_the_engine() -> None:
    generation = GenerationConfig.model_validate({"vllm": {"max_num_batched_tokens": 1024}})
    plan = GeneratorPlan(
        ModelConfig(path="policy"), generation, StateDictConfig(), "run", seed=0, version=0, max_running=8, sleeps=False
    )
    options = plan.settings_of(0, "policy").engine.options
    assert options == {"max_num_batched_tokens": 1024}


def test_options_come_before_the_defaults() -> None:
    pytest.importorskip("vllm", reason="needs the cpu or gpu extra")
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


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ('dtype = "float16"', r"generation\.vllm\.dtype = 'float16': dtype is what model\.dtype says"),
        ("async_scheduling = true", "async_scheduling is set by titan_rl, which works with no other value"),
        ("gpu_memory_utilization = 0.5", r"is what generation\.gpu_share says"),
    ],
)
def test_what_titan_rl_sets_is_refused(config_file, table: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_config(config_file(table), [])


def test_a_name_that_vllm_does_not_know_is_refused_with_the_one_that_was_meant(config_file) -> None:
    pytest.importorskip("vllm", reason="needs the cpu or gpu extra")
    with pytest.raises(ConfigError, match=r"no field of vLLM's EngineArgs; did you mean max_num_batched_tokens\?"):
        load_config(config_file("max_num_batched_token = 1024"), [])


def test_the_names_read_from_the_source_are_those_of_the_class() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="needs the cpu or gpu extra")
    fields = {field.name for field in dataclasses.fields(arguments.EngineArgs)}
    assert vllm_arguments._argument_names() == fields
    assert vllm_arguments.OWN.keys() <= fields


def test_without_vllm_only_what_titan_rl_sets_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_argument_names", frozenset)
    assert problem_of({"whatever": 1}) is None
    assert problem_of({"model": "x"}) == ("model", "is what model.path says; set that instead")


def test_the_kv_cache_is_one_gib_on_a_cpu_and_what_is_free_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="needs the cpu or gpu extra")
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * 2**30, 80 * 2**30))
    spec = EngineSpec(str(tmp_path), max_context=100)  # without weights
    assert engine_arguments(spec, on_cpu=True).kv_cache_memory_bytes == 2**30
    found = engine_arguments(spec, on_cpu=False)
    assert found.kv_cache_memory_bytes == pytest.approx((0.98 * 50 - 3) * 2**30)
    assert found.gpu_memory_utilization == pytest.approx(0.98 * 50 / 80)


@pytest.mark.parametrize(
    ("kv_cache_gib", "gpu_share", "beside_trainer", "expected"),
    [(None, None, False, None), (None, None, True, 1.0), (None, 0.3, True, None), (7.0, None, True, 7.0)],
)
def test_an_engine_beside_a_trainer_fills_no_gpu_unless_told_to(
    kv_cache_gib: float | None, gpu_share: float | None, beside_trainer: bool, expected: float | None
) -> None:
    generation = GenerationConfig(kv_cache_gib=kv_cache_gib, gpu_share=gpu_share)
    plan = GeneratorPlan(
        ModelConfig(path="policy"), generation, StateDictConfig(), "run", seed=0, version=0, max_running=8, sleeps=False
    )
    engine = plan.settings_of(0, "policy", neighbours=2, beside_trainer=beside_trainer).engine
    assert (engine.kv_cache_gib, engine.gpu_neighbours) == (expected, 2)
