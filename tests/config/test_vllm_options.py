"""The table [generation.vllm]: forwards vLLM's arguments, and rejects those that titan_rl sets itself."""

from __future__ import annotations

import pytest

from titan_rl.cluster.generator_actor import GeneratorPlan
from titan_rl.config.load import load_config
from titan_rl.config.sections import GenerationConfig, StateDictConfig
from titan_rl.core.errors import ConfigError
from titan_rl.generation import vllm_arguments
from titan_rl.generation.vllm_arguments import problem_of
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
    plan = GeneratorPlan(ModelConfig(path="policy"), generation, StateDictConfig(), "run", seed=0, max_running=8)
    options = plan.settings_of(0, "policy").engine.options
    assert options == {"max_num_batched_tokens": 1024}


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ('dtype = "float16"', r"generation\.vllm\.dtype = 'float16': dtype is determined by model\.dtype"),
        ("async_scheduling = true", "async_scheduling is set by titan_rl, and no other value works"),
        ("gpu_memory_utilization = 0.5", r"is determined by generation\.gpu_share"),
    ],
)
def test_rejects_arguments_that_titan_rl_sets_itself(config_file, table: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_config(config_file(table), [])


def test_unknown_vllm_argument_error_suggests_the_nearest_name(config_file) -> None:
    pytest.importorskip("vllm", reason="needs the cpu or gpu extra")
    with pytest.raises(ConfigError, match=r"not a field of vLLM's EngineArgs; did you mean max_num_batched_tokens\?"):
        load_config(config_file("max_num_batched_token = 1024"), [])


def test_without_vllm_unknown_arguments_are_accepted(monkeypatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_argument_names", frozenset)
    assert problem_of({"whatever": 1}) is None
    assert problem_of({"model": "x"}) == ("model", "is determined by model.path; set that instead")


@pytest.mark.parametrize(
    ("kv_cache_gib", "gpu_share", "beside_trainer", "expected"),
    [(None, None, False, None), (None, None, True, 1.0), (None, 0.3, True, None), (7.0, None, True, 7.0)],
)
def test_engine_sharing_a_gpu_with_a_trainer_has_a_limited_kv_cache(
    kv_cache_gib: float | None, gpu_share: float | None, beside_trainer: bool, expected: float | None
) -> None:
    generation = GenerationConfig(kv_cache_gib=kv_cache_gib, gpu_share=gpu_share)
    plan = GeneratorPlan(ModelConfig(path="policy"), generation, StateDictConfig(), "run", seed=0, max_running=8)
    engine = plan.settings_of(0, "policy", neighbours=2, beside_trainer=beside_trainer).engine
    assert (engine.kv_cache_gib, engine.gpu_neighbours) == (expected, 2)
