"""Names of settings in TRL, verl, prime-rl, SkyRL and OpenRLHF: the error names the setting of titan_rl."""

from __future__ import annotations

from pathlib import Path

import pytest
from user_project import project

from titan_rl.config.load import load_config
from titan_rl.config.peer_settings import peer_settings
from titan_rl.config.run import RunConfig
from titan_rl.config.serve import load_serve_config
from titan_rl.config.settings_reference import tables
from titan_rl.config.validation_errors import settings
from titan_rl.core.errors import ConfigError

__all__ = ["project"]


def failure(key: str, value: str = "8") -> str:
    with pytest.raises(ConfigError) as raised:
        load_config("config.toml", [(key, value)])
    return str(raised.value)


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("training.beta", "training.kl_coef"),
        ("beta", "training.kl_coef"),
        ("kl_loss_coef", "training.kl_coef"),
        ("init_kl_coef", "training.kl_coef"),
        ("actor_rollout_ref.actor.kl_loss_coef", "training.kl_coef"),
        ("trainer.algorithm.kl_loss_coef", "training.kl_coef"),
        ("rollout.n", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("num_generations", "rollout.group_size"),
        ("n_samples_per_prompt", "rollout.group_size"),
        ("orchestrator.rollouts_per_example", "rollout.group_size"),
        ("orchestrator.group_size", "rollout.group_size"),
        ("data.train_batch_size", "scheduling.groups_per_step"),
        ("trainer.train_batch_size", "scheduling.groups_per_step"),
        ("per_device_train_batch_size", "scheduling.groups_per_step"),
        ("training.per_device_train_batch_size", "scheduling.groups_per_step"),
        ("rollout_batch_size", "scheduling.groups_per_step"),
        ("orchestrator.batch_size", "scheduling.groups_per_step"),
        ("gradient_accumulation_steps", "training.rows_per_micro_batch"),
        ("micro_train_batch_size", "training.rows_per_micro_batch"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "training.rows_per_micro_batch"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "training.minibatches"),
        ("max_completion_length", "sampling.max_tokens"),
        ("data.max_response_length", "sampling.max_tokens"),
        ("generate_max_len", "sampling.max_tokens"),
        ("generator.sampling_params.max_generate_length", "sampling.max_tokens"),
        ("max_prompt_length", "model.max_context"),
        ("prompt_max_len", "model.max_context"),
        ("seq_len", "model.max_context"),
        ("learning_rate", "training.lr"),
        ("learning-rate", "training.lr"),
        ("actor_learning_rate", "training.lr"),
        ("actor_rollout_ref.actor.optim.lr", "training.lr"),
        ("trainer.optim.lr", "training.lr"),
        ("trainer.policy.optimizer_config.lr", "training.lr"),
        ("critic.optim.lr", "training.critic_lr"),
        ("sft.learning_rate", "sft.lr"),
        ("sft.per_device_train_batch_size", "sft.batch_size"),
        ("max_steps", "training.steps"),
        ("num_train_epochs", "training.steps"),
        ("trainer.total_epochs", "training.steps"),
        ("lr_scheduler_type", "training.lr_decay"),
        ("warmup_ratio", "training.warmup_steps"),
        ("max_norm", "training.max_grad_norm"),
        ("epsilon_high", "training.clip"),
        ("actor_rollout_ref.actor.clip_ratio_high", "training.clip"),
        ("algorithm.adv_estimator", "training.algorithm"),
        ("temperature", "sampling.temperature"),
        ("actor_rollout_ref.rollout.temperature", "sampling.temperature"),
        ("save_steps", "checkpoint.interval"),
        ("trainer.save_freq", "checkpoint.interval"),
        ("ckpt.interval", "checkpoint.interval"),
        ("save_total_limit", "checkpoint.keep"),
        ("eval_steps", "validation.interval"),
        ("trainer.test_freq", "validation.interval"),
        ("report_to", "logging.sinks"),
        ("trainer.logger", "logging.sinks"),
        ("wandb_project", "logging.wandb"),
        ("wandb.project", "logging.wandb"),
        ("trainer.project_name", "logging.wandb"),
        ("output_dir", "run_dir"),
        ("run_name", "name"),
        ("model_name_or_path", "model.path"),
        ("model.name", "model.path"),
        ("pretrain", "model.path"),
        ("bf16", "model.dtype"),
        ("lora_r", "training.adapter.rank"),
        ("trainer.model.lora.alpha", "training.adapter.alpha"),
        ("gradient_checkpointing", "training.activation_checkpointing"),
        ("gpu_memory_utilization", "generation.gpu_share"),
        ("vllm_num_engines", "generation.num_generators"),
        ("tensor_model_parallel_size", "generation.tensor_parallel_size"),
        ("trainer.n_gpus_per_node", "training.data_parallel"),
        ("max_async_level", "scheduling.max_staleness"),
        ("dataset_name", "task.path"),
        ("data.train_files", "task.path"),
    ],
)
def test_setting_of_another_library_names_the_setting_here(project: Path, key: str, setting: str):
    error = failure(key)

    assert f"command line: {key} = 8 is not a setting" in error
    assert f"nearest: {setting}" in error or f"set {setting}" in error


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("per_device_train_batch_size", "groups of rollout.group_size rollouts"),
        ("num_train_epochs", "epochs x prompts / scheduling.groups_per_step"),
        ("max_prompt_length", "prompt and completion together"),
        ("wandb_project", '{ project = "NAME" }'),
        ("bf16", '"bfloat16"'),
        ("top_p", "temperature only"),
    ],
)
def test_setting_with_another_unit_says_how_to_convert_it(project: Path, key: str, unit: str):
    assert unit in failure(key)


def test_all_settings_in_an_unknown_table_are_named(project: Path):
    Path("verl.toml").write_text("[data]\ntrain_batch_size = 8\nmax_response_length = 64\nshuffle = true\n")

    with pytest.raises(ConfigError) as raised:
        load_config(["config.toml", "verl.toml"])

    assert [line.partition(" is not ")[0] for line in str(raised.value).splitlines()] == [
        "verl.toml: data.train_batch_size = 8",
        "verl.toml: data.max_response_length = 64",
        "verl.toml: [data]",
    ]


def test_misspelt_settings_of_titan_rl_win_over_names_of_other_libraries(project: Path):
    assert "nearest: training.betas" in failure("training.betaz")
    assert "nearest: task.length" in failure("task.lenth")


def test_server_names_its_own_settings_only(project: Path):
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization = 0.5 is not a setting; nearest: generation.gpu_sha"
    ):
        load_serve_config(Path("config.toml"), [("gpu_memory_utilization", "0.5")], policy=None)
    with pytest.raises(ConfigError) as raised:
        load_serve_config(Path("config.toml"), [("num_generations", "8")], policy=None)
    assert "rollout.group_size" not in str(raised.value)


def test_each_row_names_an_existing_setting_and_no_name_of_titan_rl():
    own = {*settings(RunConfig), *(entry.key for table in tables() for entry in table.settings)}
    assert {row.setting for row in peer_settings().values()} - {""} <= own
    assert not peer_settings().keys() & own


def test_number_of_settings_does_not_grow():
    assert len([entry for table in tables() for entry in table.settings]) <= 209
