"""Settings without effect are errors that name the missing condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from user_project import project

from titan_rl.config.conflicts import Setting, effect_conflicts, reset_without_effect, settings_in
from titan_rl.config.load import dump_config, load_config
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section, TakesEffect
from titan_rl.run.sft.train import supervised

__all__ = ["project"]

ELSEWHERE = {"hosts.addresses": ("10.0.0.1:22222", "10.0.0.2:22222")}
COMPUTED = ("hosts.elsewhere", "transport_may_be_tcp")
REPEATED = "validation.is_repeated_in_full"
MADE_TRUE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(COMPUTED, ELSEWHERE),
    "hosts.provider": {"hosts.provider": "mine:workers"},
    "training.num_ranks": {"training.data_parallel": 2},
    REPEATED: {"validation.interval": 2},
}
"""Settings to change so that a computed condition holds."""

OTHER_VALUES: dict[str, Any] = {
    "correction.cap": 2.0,
    "correction.bounds": (0.25, 4.0),
    "training.clip": (0.1, 0.2),
    "generation.speculative.prompt_lookup": (1, 3),
    "hosts.command": "titan-rl",
    "hosts.generate": 1,
    "hosts.listen": "10.0.0.1",
    "hosts.play": 1,
    "hosts.names": ("a",),
    "hosts.options": ("-v",),
    "hosts.setup": ("module load cuda",),
    "hosts.kubernetes.resources": {"cpu": "8"},
    "hosts.kubernetes.controller_resources": {"cpu": "8"},
    "logging.wandb": {"project": "mine"},
    "logging.trackio": {"project": "mine"},
    "scheduling.window": 10**6,
    "statedict.tolerance": 0.5,
    "training.kl": "k2",
    "training.reference_interval": "100",
    "training.gae": (0.9, 0.9),
    "training.adapter.targets": ("o_proj",),
    "validation.suites": ("a suite",),
}


def with_value(section: Section, name: str, value: Any) -> Section:
    first, _, below = name.partition(".")
    inner = with_value(getattr(section, first), below, value) if below else value
    return section.model_copy(update={first: inner})


def other_value(setting: Setting) -> Any:
    """A value that is not the default."""
    if setting.name in OTHER_VALUES:
        return OTHER_VALUES[setting.name]
    match setting.default:
        case bool():
            return not setting.default
        case int() | float():
            return setting.default + 1
        case None | str():
            return "another"
    raise AssertionError(f"{setting.name}: give OTHER_VALUES a value for {setting.default!r}")


def made_true(config: Section, condition: TakesEffect) -> Section:
    changes = MADE_TRUE.get(condition.setting)
    if condition.one_of and condition.setting not in (*COMPUTED, REPEATED):
        value: Any = condition.one_of[0]
        changes = {condition.setting: (value,) if condition.setting == "logging.sinks" else value}
    elif changes is None:
        values: tuple[Any, ...] = (7, "my_module:mine")
        value = values[isinstance(condition.none_of[0], str)] if condition.setting != "sft.data" else "runs/latest"
        changes = {condition.setting: value}
    for name, value in changes.items():
        config = with_value(config, name, value)
    return config


def made_false(config: Section, condition: TakesEffect) -> Section:
    if condition.up_to or condition.setting in COMPUTED:
        return config
    if condition.setting == "training.num_ranks":
        return with_value(config, "training.data_parallel", 1)
    if condition.setting == REPEATED:
        return with_value(config, "validation.interval", 0)
    if condition.none_of:
        return with_value(config, condition.setting, condition.none_of[0])
    value: Any = not condition.one_of[0] if isinstance(condition.one_of[0], bool) else "something else"
    value = 3 if condition.one_of[0] is None else value
    return with_value(config, condition.setting, (value,) if condition.setting == "logging.sinks" else value)


def test_conditional_settings_are_accepted_only_when_their_conditions_hold(project: Path):
    config = load_config("config.toml")
    seen = 0
    for setting in settings_in(config):
        for condition in setting.conditions:
            holds = with_value(config, setting.name, other_value(setting))
            for other in setting.conditions:
                if not other.up_to:
                    holds = made_true(holds, other)
            complaints = [
                line for line in effect_conflicts(made_false(holds, condition)) if line.startswith(f"{setting.name} = ")
            ]
            if condition.setting in COMPUTED:
                holds = with_value(holds, "statedict.transport", "auto")
                complaints = [
                    line
                    for line in effect_conflicts(with_value(holds, "hosts.addresses", ()))
                    if line.startswith(f"{setting.name} = ")
                ]
            assert len(complaints) == 1, (setting.name, condition)
            assert condition.without or condition.setting in complaints[0]
            assert f"leave {setting.name} out" in complaints[0]
            assert "out, as" not in complaints[0]
            if not condition.up_to:
                assert [line for line in effect_conflicts(holds) if line.startswith(f"{setting.name} = ")] == [], (
                    condition
                )
            seen += 1
    assert seen > 30


def test_conditions_name_existing_settings(project: Path):
    config = load_config("config.toml")
    for setting in settings_in(config):
        for condition in setting.conditions:
            value: Any = config
            for part in condition.setting.split("."):
                value = getattr(value, part)
            assert bool(condition.one_of) + bool(condition.none_of) + condition.up_to == 1, setting.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "statedict.anchor_interval=4",
            "on one machine; set hosts.addresses or hosts.provider, or statedict.transport",
        ),
        ("sft.batch_size=9 sft.batch_tokens=100", "sft.batch_tokens = 100; leave sft.batch_tokens out"),
        ("sft.batch_size=9 sft.batch_tokens=100", "or leave sft.batch_size out (its default is 32)"),
        ("sft.interval=9 sft.held_out=0", "sft.held_out = 0; set that above 0"),
        ("hosts.names=a,b", 'hosts.provider = none; set that to "ssh"'),
        ("correction.cap=2", 'correction.weight = "none"; set correction.weight to "token" or "sequence"'),
        ("training.clip=[0.1,0.2] training.loss=nll", 'training.loss = "nll"; set that to "grpo", "gspo" or "cispo"'),
        ("scheduling.window=999", "beyond scheduling.num_slots = 32; lower it to at most 32"),
        ("validation.interval=5 validation.num_prompts=0", "validation.num_prompts = 0; set that above 0"),
        ("logging.prometheus=[::1]:1", 'logging.sinks = []; set logging.sinks to "prometheus"'),
        ("training.reference_interval=100", "training.kl_coef = 0; set training.kl_coef to something else than 0"),
        ("training.kl=k2", "training.kl_coef = 0; set training.kl_coef to something else than 0"),
        ("training.min_lr_ratio=0.5", 'training.lr_decay = "constant"; set training.lr_decay to something else than'),
        ("training.critic_lr=0.1", 'training.critic = "none"; set training.critic to "head" or "model"'),
        ("hosts.sync=true", "on one machine; set hosts.addresses or hosts.provider"),
    ],
)
def test_error_of_a_setting_without_effect_names_the_condition(project: Path, options: str, message: str):
    overrides = [(name, value) for name, _, value in (word.partition("=") for word in options.split())]
    with pytest.raises(ConfigError) as raised:
        load_config("config.toml", overrides)
    name = overrides[0][0]
    assert f"{name} = " in str(raised.value)
    assert " has no effect " in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        "correction.cap=2 correction.weight=token correction.proximal=recomputed",
        "training.clip=[0.1,0.2] training.loss=reinforce training.clip=[0.2,0.28]",
        "training.clip=[0.1,0.2] training.loss=gspo",
        "scheduling.tail=2",
        "scheduling.window=32",
        "validation.interval=5",
        'logging.wandb.project=mine logging.sinks=["wandb"]',
        "training.kl=k2 training.kl_coef=0.1",
        'training.offload=["parameters"] training.tensor_parallel=2',
        "training.gae=[0.99,1] training.gae_over=turn training.algorithm=ppo training.critic=head",
    ],
)
def test_settings_with_an_effect_and_defaults_are_accepted(project: Path, options: str):
    overrides = [(name, value) for name, _, value in (word.partition("=") for word in options.split())]
    if any(name == "logging.sinks" for name, _ in overrides):
        overrides = [(name, '["wandb"]' if name == "logging.sinks" else value) for name, value in overrides]
    config = load_config("config.toml", overrides)
    (project / "again.toml").write_text(dump_config(config))
    assert load_config("again.toml") == config


def test_settings_without_effect_can_be_reset(project: Path):
    config = load_config("config.toml", [("training.clip", "[0.1, 0.2]")])
    config = with_value(config, "training.loss", "nll")
    assert list(effect_conflicts(config)) != []
    assert list(effect_conflicts(reset_without_effect(config))) == []


def test_sft_does_not_offload_a_reference(project: Path):
    options = [("training.kl_coef", "0.1"), ("training.activation_checkpointing", "full")]
    config = load_config("config.toml", [*options, ("training.offload", '["reference", "activations"]')])

    training = supervised(config, config.model, steps=3).training

    assert (training.offload, training.kl_coef) == (("activations",), 0.0)
