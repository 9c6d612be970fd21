from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from titan_rl.config.load import dump_config, load_config
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import Section
from titan_rl.rollout.task import Task


def failure(*overrides: tuple[str, str], path: str | Path = "config.toml") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_reads_the_file_and_fills_in_defaults(project: Path):
    config = load_config("config.toml")

    assert config.seed == 7
    assert config.training.steps == 5
    assert config.training.lr == 1.0
    assert config.rollout.group_size == 8
    assert config.run_dir == "runs"


def test_task_is_an_instance_of_the_named_class(project: Path):
    task = load_config("config.toml").tasks[0].task

    assert isinstance(task, Task)
    assert task.train_sample(seed=0, index=5) == "spam"


def test_overrides_replace_file_values_and_the_last_one_wins(project: Path):
    config = load_config(
        "config.toml",
        [
            ("training.steps", "8"),
            ("training.steps", "9"),
            ("training.betas", "[0.8, 0.9]"),
            ("training.lr", "1e-3"),
            ("model.dtype", "bfloat16"),
            ("logging.sinks", '["tensorboard"]'),
            ("task.words", '["a", "b"]'),
            ("task.style", "loud"),
            ("sampling.max_tokens", "5 # tokens"),
        ],
    )

    assert (config.training.steps, config.training.betas, config.training.lr) == (9, (0.8, 0.9), 1e-3)
    assert config.model.dtype == "bfloat16"
    assert config.logging.sinks == ("tensorboard",)
    assert config.sampling.max_tokens == 5
    assert config.tasks[0].task.train_sample(0, 1) == "b"


def test_dumped_config_loads_to_an_equal_config(project: Path):
    config = load_config("config.toml", [("statedict.tolerance", "1e-3"), ("task.length", "4")])
    written = dump_config(config)
    (project / "elsewhere").mkdir()
    again = project / "elsewhere" / "resolved.toml"
    again.write_text(written)

    assert load_config(again) == config
    assert tomllib.loads(written)["task"] == {
        "type": "echo_task:Echo",
        "words": ["spam"],
        "style": "plain",
        "length": 4,
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.stepz", "5", "command line: training.stepz = 5 is not a setting; nearest: training.steps"),
        (
            "generation.request_timeout_s",
            "300.0",
            "command line: generation.request_timeout_s = 300.0 is not a setting; nearest: generation.stall_timeout_s",
        ),
        (
            "training.learning_rate",
            "5",
            "command line: training.learning_rate = 5 is not a setting; nearest: training.lr",
        ),
        ("rollout.num_generations", "5", "nearest: rollout.group_size"),
        ("lr", "5", "command line: lr = 5 is not a setting; nearest: training.lr"),
        ("trainin.lr", "5", "command line: [trainin] is not a table; nearest: training"),
        ("routing.quux", "5", "routing.quux = 5 is not a setting; valid here: routing.strategy, routing.move_below"),
        ("routing.move_below", "1", "routing.move_below = 1 must be less than 1"),
        ("task.lenght", "5", "command line: task.lenght = 5 is not a setting; nearest: task.length"),
        ("training.lr", "fast", "command line: training.lr = 'fast' must be a valid number"),
        ("training.lr", "nan", "training.lr = nan must be a finite number"),
        ("training.lr", "-1", "training.lr = -1 must be greater than 0"),
        ("training.steps", "true", "training.steps = True must be a valid integer"),
        ("training.steps", "2.0", "training.steps = 2.0 must be a valid integer"),
        ("training.betas", "[0.9, 1.5]", "command line: training.betas[1] = 1.5 must be less than 1"),
        ("training.lr_decay", "cosin", "training.lr_decay = 'cosin' must be 'constant', 'linear' or 'cosine'"),
        ("rollout.group_size", "0", "rollout.group_size = 0 must be greater than 0"),
        ("rollout.group_size", "1", 'rollout.group_size = 1 with the advantage "standardized" of task'),
        ("task.style", "quiet", "command line: task.style = 'quiet' must be 'plain' or 'loud'"),
        ("training.betas", "[0.9, 0.9, 0.9]", "training.betas = [0.9, 0.9, 0.9] has more than 2 items"),
        (
            "scheduling.filters",
            "zero_variance",
            "scheduling.filters = 'zero_variance' must be a list; in brackets: [\"zero_variance\"]",
        ),
        (
            "scheduling.filters",
            "zero_variance, all_same",
            'must be a list; in brackets: ["zero_variance", "all_same"]',
        ),
        (
            "hosts.kubernetes.resources",
            "8",
            'hosts.kubernetes.resources = 8 must be a table; in braces: { "NAME" = 8 }',
        ),
        ("hosts.train", "2", "hosts.train is 2, and there is 1 host; lower it"),
        ("task.words", "3", "task.words = 3 must be a list; in brackets: [3]"),
        ("training", "3", "command line: training = 3 must be a table"),
        ("task", "3", "command line: task = 3 must be a table"),
        ("seed.x", "3", "--seed.x: seed is a setting, not a table"),
        ("name", "..", "command line: name = '..' must be letters, digits and -_.+=, 80 at most, and not . or .."),
        ("name", "a/b", "command line: name = 'a/b' must be letters, digits"),
        ("name", "x" * 300, f"command line: name = '{'x' * 119}... must be letters, digits"),
        ("seed", "-3", "seed = -3 must be greater than or equal to 0"),
        ("scheduling.mode", '["sync"]', "scheduling.mode = ['sync'] must be 'sync', 'one_step_off', 'streaming' or"),
        ("training.algorithm", '["grpo"]', "training.algorithm = ['grpo'] must be a valid string"),
        ("scheduling.tail", "{ drop = 1 }", "scheduling.tail = {'drop': 1} must be \"carry_over\""),
    ],
)
def test_invalid_setting_error_names_value_origin_and_fix(project: Path, key: str, value: str, message: str):
    assert message in failure((key, value))


HALF = "\ud83d"  # first half of the surrogate pair of an emoji


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.teacher", HALF),
        ("training.loss", f"losses{HALF}:mine"),
        ("hosts.command", f"python {HALF}"),
        ("hosts.names", ["a", HALF]),
        ("hosts.kubernetes.image", HALF),
        ("logging.wandb", {"project": HALF}),
        ("logging.wandb", {HALF: "sums"}),
        ("task.words", [HALF]),
        ("run_dir", HALF),
        ("run_dir", "\udcff"),  # a byte of an argument that is not UTF-8
    ],
)
def test_half_of_a_surrogate_pair_is_rejected_in_every_setting(project: Path, key: str, value: object):
    with pytest.raises(ConfigError) as raised:
        load_config("config.toml", given={key: value})

    message = str(raised.value)
    assert message.isascii()
    assert key.partition(".")[2] in message
    assert "half of a surrogate pair" in message


def test_error_in_the_file_names_the_file(project: Path):
    Path("config.toml").write_text('[model]\npath = "policy"\nmax_contxt = 9\n[task]\ntype = "echo_task:Echo"\n')

    assert failure() == "config.toml: model.max_contxt = 9 is not a setting; nearest: model.max_context"


def test_all_invalid_settings_are_reported_at_once(project: Path):
    assert len(failure(("training.stepz", "5"), ("seed", "x"), ("rollout.group_size", "0")).splitlines()) == 3


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        ({"sampling.max_tokens": "512"}, ["sampling.max_tokens = 512", "model.max_context = 512"]),
        ({"training.row_tokens": "256"}, ["training.row_tokens = 256", "model.max_context = 512"]),
        ({"training.warmup_steps": "6"}, ["training.warmup_steps = 6", "training.steps = 5"]),
        ({"validation.temperature": "0"}, ["validation.temperature = 0", "samples_per_prompt = 1"]),
        (
            {"generation.pull_mode": "drain", "generation.prefix_cache": "keep"},
            ['generation.prefix_cache = "keep"', 'pull_mode = "drain"', "prefix_cache = true"],
        ),
        (
            {"routing.move_below": "0.5", "scheduling.max_staleness": "0"},
            ["routing.move_below = 0.5", "seeded requests", "sampling.seeded = false"],
        ),
        (
            {"generation.stall_timeout_s": "60", "statedict.pull_timeout_s": "60"},
            ["generation.stall_timeout_s = 60", "statedict.pull_timeout_s = 60"],
        ),
        (
            {"generation.pull_mode": "recompute", "generation.prefix_cache": "keep"},
            ['generation.prefix_cache = "keep"', 'pull_mode = "recompute"', "prefix_cache = true"],
        ),
        (
            {"scheduling.max_staleness": "0", "generation.prefix_cache": "keep"},
            ['generation.prefix_cache = "keep"', "scheduling.max_staleness = 0", "prefix_cache = true"],
        ),
        (
            {"training.compile": "true", "training.tensor_parallel": "2"},
            ["[training] compile = true", "tensor_parallel = 2", "compile = false"],
        ),
        (
            {"training.expert_parallel": "2", "training.tensor_parallel": "2"},
            ["[training] expert_parallel = 2 with tensor_parallel = 2", "set tensor_parallel = 1"],
        ),
        (
            {"training.expert_parallel": "4", "training.data_parallel": "2", "training.context_parallel": "3"},
            ["[training] expert_parallel = 4 does not divide the 6 processes of data_parallel = 2 x context_parallel"],
        ),
        (
            {"training.offload": '["activations"]', "training.activation_checkpointing": "selective"},
            [
                '[training] offload = ["activations"]',
                'checkpointing = "selective"',
                'activation_checkpointing = "full"',
            ],
        ),
        (
            {"training.context_parallel": "2", "training.tensor_parallel": "2"},
            ["[training] context_parallel with tensor_parallel = 2", "context_parallel = 1"],
        ),
        (
            {
                "training.offload": '["activations"]',
                "training.activation_checkpointing": "full",
                "training.tensor_parallel": "2",
            },
            ['[training] offload = ["activations"] with tensor_parallel = 2', 'leave "activations" out'],
        ),
        (
            {"training.context_parallel": "4096", "training.row_tokens": "2048"},
            ["training.context_parallel = 4096", "training.row_tokens = 2048"],
        ),
        (
            {"training.offload": '["reference"]'},
            ['[training] offload = ["reference"]', "kl_coef = 0", 'leave "reference" out'],
        ),
        (
            {"training.offload": '["reference"]', "training.kl_coef": "0.1", "training.reference_interval": "9"},
            ["reference_interval = 9", 'offload = ["reference"]', "leave one of them out"],
        ),
        (
            {"generation.pull_mode": "drain", "scheduling.on_batch_ready": "keep"},
            ['generation.pull_mode = "drain"', 'on_batch_ready = "keep"', 'pull_mode = "hot_swap"'],
        ),
    ],
)
def test_incompatible_settings_are_rejected(project: Path, overrides: dict[str, str], fragments: list[str]):
    message = failure(*overrides.items())

    assert all(name in message for name in fragments)


def test_missing_file_error_lists_existing_files(project: Path):
    assert failure(path="confg.toml") == "confg.toml: no such file; that folder has config.toml"


def test_malformed_toml_error_names_the_position(project: Path):
    Path("config.toml").write_text("seed = 1\nmodel = [\n")

    assert "config.toml: not valid TOML: " in failure()
    assert "at end of document" in failure()

    Path("config.toml").write_text("seed = 1\nmodel == 3\n")
    assert "line 2, column 8" in failure()


def test_binary_file_and_folder_are_rejected(project: Path):
    Path("config.toml").write_bytes(b"\xff\xfe")

    assert "not valid TOML" in failure()
    assert failure(path="policy") == "policy is a folder; name a TOML file"
    assert failure(path=".") == ". is a folder; name a TOML file in it: config.toml"
    assert failure(path="config.toml/below") == "config.toml/below: Not a directory; name a TOML file that you may read"


def test_missing_tables_are_named(project: Path):
    Path("config.toml").write_text('[task]\ntype = "echo_task:Echo"\n')
    assert failure() == "config.toml: table model is missing"

    Path("config.toml").write_text('[model]\npath = "policy"\n')
    assert "the table [task] is missing" in failure()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("echo_task.Echo", 'must be a string "module:Class"'),
        ("3", 'must be a string "module:Class"'),
        ("no_such_module:Echo", "there is no module no_such_module"),
        ("echo_task.sub:Echo", "there is no module echo_task"),
        ("echo_task:Eco", "echo_task has no Eco; tasks in echo_task: Echo"),
        ("importing_task:Eco", "importing_task has no Eco; tasks in importing_task: none"),
        ("echo_task:Literal", "Literal is not a subclass of titan_rl.core.settings.Section"),
        (
            "echo_task:Half",
            "Half is not a task: it lacks make_env, train_sample, validation_samples; tasks in echo_task",
        ),
        ("broken_task:Echo", "importing broken_task failed: ZeroDivisionError"),
        ("leaving_task:Echo", "importing leaving_task failed: SystemExit: 3"),
        ("fussy_task:Echo", "fussy_task.Echo cannot be read: RuntimeError: no"),
        ("needy_task:Echo", "importing needy_task failed: No module named 'absent_dependency'"),
    ],
)
def test_invalid_task_type_error_lists_available_tasks(project: Path, name: str, message: str):
    Path("broken_task.py").write_text("1 / 0\n")
    Path("importing_task.py").write_text("from echo_task import Echo\n")
    Path("leaving_task.py").write_text("raise SystemExit(3)\n")
    Path("fussy_task.py").write_text("def __getattr__(name): raise RuntimeError('no')\n")
    Path("needy_task.py").write_text("import absent_dependency\n")

    found = failure(("task.type", name))

    assert found.startswith("command line: task.type = ")
    assert message in found


def test_default_of_the_wrong_type_is_rejected():
    class Count(Section):
        largest: int = "x"  # type: ignore

    with pytest.raises(ValidationError, match="largest"):
        Count()
