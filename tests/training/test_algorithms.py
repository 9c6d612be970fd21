"""Algorithms: named presets of training settings, each of which can also be set individually."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError
from user_project import project

from titan_rl.cli.main import main
from titan_rl.config.build import make_filters, make_sample_maker
from titan_rl.config.load import dump_config, load_config
from titan_rl.core.errors import ConfigError
from titan_rl.rollout.rewards.advantages import find_advantage
from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.scheduling.filters import first_reason
from titan_rl.training.algorithms import BY_NAME, find_algorithm
from titan_rl.training.data.step_plan import plan_step
from titan_rl.training.losses import find_loss
from titan_rl.training.settings import TrainingConfig
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

__all__ = ["project"]

OWN = """
from titan_rl.training.algorithms import Algorithm
from titan_rl.training.losses import without_bounds

def squared(rewards):
    return [reward * reward for reward in rewards]

def plain(tokens, clip):
    return without_bounds(-tokens.advantages_N * tokens.logprobs_N)

mine = Algorithm(about="Mine.", source="here", advantage=squared, advantage_formula="r_i^2", loss=plain,
                 loss_formula="-A * log pi_theta", average="constant", kl_coef=0.5, kl="k2")
local = Algorithm(about="Mine.", source="here", loss=lambda tokens, clip: plain(tokens, clip), loss_formula="?")
"""


@pytest.fixture
def own(project: Path) -> Path:
    (project / "own_algorithms.py").write_text(OWN)
    sys.modules.pop("own_algorithms", None)
    return project


def test_default_algorithm_matches_default_settings():
    fields = TrainingConfig.model_fields
    preset = BY_NAME["grpo"].settings()

    assert preset == {name: fields[name].default for name in preset}
    assert TrainingConfig().model_fields_set == set()


@pytest.mark.parametrize("name", BY_NAME)
def test_every_algorithm_names_existing_functions_and_describes_its_terms(name: str):
    algorithm = BY_NAME[name]
    training = TrainingConfig(algorithm=name)

    assert find_loss(training.loss) is algorithm.loss
    assert find_advantage(training.advantage) is algorithm.advantage
    assert {key: getattr(training, key) for key in algorithm.settings()} == algorithm.settings()
    values = ["value of the critic, with its own optimizer"] if name == "ppo" else []
    assert [term.name for term in algorithm.terms()] == ["policy", *values]
    assert all((algorithm.about, algorithm.source, algorithm.advantage_formula))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"algorithm": "gspo"}, ("gspo", "sequence", (3e-4, 4e-4), "standardized")),
        ({"algorithm": "gspo", "clip": (0.1, 0.2)}, ("gspo", "sequence", (0.1, 0.2), "standardized")),
        ({"algorithm": "gspo", "loss": "grpo"}, ("grpo", "sequence", (0.2, 0.28), "standardized")),
        ({"algorithm": "dr_grpo"}, ("grpo", "constant", (0.2, 0.2), "group_mean")),
        ({"algorithm": "rloo"}, ("reinforce", "constant", (0.2, 0.28), "leave_one_out")),
        ({"algorithm": "rloo", "average": "token"}, ("reinforce", "token", (0.2, 0.28), "leave_one_out")),
        ({"algorithm": "ppo", "critic": "head"}, ("grpo", "token", (0.2, 0.2), "reward")),
        ({"loss": "cispo"}, ("cispo", "token", (0.2, 0.28), "standardized")),
    ],
)
def test_algorithm_fills_in_unset_settings(given: Mapping[str, object], expected: tuple[object, ...]):
    training = TrainingConfig.model_validate(given)

    assert (training.loss, training.average, training.clip, training.advantage) == expected
    assert training.model_fields_set == set(given)
    assert TrainingConfig.model_validate(training.model_dump()) == training


def test_rejects_algorithm_whose_settings_are_all_overridden():
    with pytest.raises(ValidationError, match=r'algorithm = "gspo" has no effect where loss = "grpo" and average = '):
        TrainingConfig(algorithm="gspo", loss="grpo", average="token", clip=(0.2, 0.28))


def test_dumped_config_shows_algorithm_settings_and_round_trips(project: Path):
    config = load_config("config.toml", [("training.algorithm", "dr_grpo"), ("training.average", "token")])
    dumped = dump_config(config)

    assert '# training.algorithm = "dr_grpo" sets loss = "grpo"' in dumped
    assert '; given: average = "token"' in dumped
    Path("again.toml").write_text(dumped)
    assert load_config("again.toml") == config


def test_user_defined_algorithm_is_loaded_from_a_module(own: Path, capsys: pytest.CaptureFixture[str]):
    config = load_config("config.toml", [("training.algorithm", "own_algorithms:mine")])
    training = config.training

    assert (training.loss, training.advantage) == ("own_algorithms:plain", "own_algorithms:squared")
    assert (training.average, training.kl_coef, training.kl) == ("constant", 0.5, "k2")
    assert str(own) in config.pythonpath
    assert main(["algorithms", "own_algorithms:mine"]) == 0
    output = capsys.readouterr().out
    assert "A_i = r_i^2" in output
    assert "KL to the reference model: 0.5 * d^2 / 2" in output
    assert "divided by the sequences of the batch times model.max_context" in output
    assert "the initial model as reference" in output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("grop", "training.algorithm = 'grop' must be one of grpo, dr_grpo, gspo"),
        ("own_algorithms:theirs", "own_algorithms has no Algorithm theirs; it has: mine, local"),
        ("own_algorithms:plain", "own_algorithms has no Algorithm plain; it has: mine, local"),
        ("own_algorithms:local", "the algorithm's loss is <function <lambda> at"),
        ("no_such_module:mine", "there is no module no_such_module"),
    ],
)
def test_unloadable_algorithm_error_gives_the_reason(own: Path, name: str, reason: str):
    with pytest.raises(ConfigError) as caught:
        load_config("config.toml", [("training.algorithm", name)])
    assert reason in str(caught.value)
    assert "algorithm" in str(caught.value)


def test_algorithms_command_prints_formula_terms_and_source(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms"]) == 0
    output = capsys.readouterr().out

    for name, algorithm in BY_NAME.items():
        assert f"{name}: {algorithm.about}" in output
    for word in ("advantage", "term", "divided by the", "source", "settings"):
        assert output.count(word) >= len(BY_NAME)
    assert main(["algorithms", "gspo"]) == 0
    assert capsys.readouterr().out.startswith("gspo: ")


def test_algorithms_command_rejects_an_unknown_name(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms", "gsop"]) == 2
    assert "must be one of grpo, dr_grpo" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        find_algorithm("gsop")


def test_rejects_algorithm_with_a_lambda_advantage(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("algorithms_on_trial")
    exec(OWN.replace("advantage=squared", "advantage=lambda rewards: rewards"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ValidationError, match="advantage is <function <lambda>"):
        TrainingConfig(algorithm="algorithms_on_trial:mine")


def test_critic_rejects_advantages_that_compare_rollouts(project: Path):
    assert load_config("config.toml", [("training.algorithm", "ppo")]).training.critic == "model"
    with pytest.raises(ConfigError, match=r'critic = "head" computes advantages from rewards.*algorithm = "ppo"'):
        load_config("config.toml", [("training.critic", "head")])


def test_single_rollout_groups_need_an_advantage_without_siblings(project: Path):
    alone = ("rollout.group_size", "1")
    for name in ("ppo", "reinforce"):
        config = load_config("config.toml", [alone, ("training.algorithm", name)])
        rollout = Rollout("g/0", "g", 0, None, reward=1.0, advantage=1.0)
        group = RolloutGroup("g", None, [rollout], task=config.tasks[0].name)
        assert first_reason(make_filters(config), group) is None
    with pytest.raises(ConfigError, match=r'set group_size to at least 2, or training.algorithm to "ppo"'):
        load_config("config.toml", [alone, ("training.algorithm", "rloo")])


def test_critic_samples_carry_rewards_to_the_trainer(project: Path):
    config = load_config("config.toml", [("training.algorithm", "ppo"), ("rollout.group_size", "1")])
    completion = Completion("r", [5, 1], [-1.0, -1.0], FinishReason.STOP, (VersionSpan(0, 2),))
    turn = Turn([7, 8], completion, sampling=SamplingParams(max_tokens=2))
    rollout = Rollout("g/0", "g", 0, None, turns=[turn], reward=0.5, advantage=0.5)
    group = RolloutGroup("g", None, [rollout], task=config.tasks[0].name)

    samples = make_sample_maker(config).samples([group], version=0)
    ((minibatch,),) = pickle.loads(pickle.dumps(plan_step(samples, config.training)))

    (((family,),),) = minibatch.micro_batches
    (sample,) = family.samples
    assert sample.episode is not None
    assert list(sample.episode.rewards) == [0.0, 0.0, 0.0, 0.5]
    assert list(sample.advantages) == [0.0] * 4
