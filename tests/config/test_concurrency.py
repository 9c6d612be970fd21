"""Number of requests that engines run: sized from the batch, bounded by the KV cache, with warnings if it throttles."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from titan_rl.cli.main import main
from titan_rl.config.concurrency import Concurrency, throttles
from titan_rl.config.load import dump_config, load_config
from titan_rl.core.errors import ConfigError

# KV cache of half a context (256 tokens) of the project's model, 128 KiB:
# 2 (keys, values) x 2 layers x 2 heads x 16 numbers x 4 bytes x 256 tokens.
HALF_CONTEXT_GIB = 2**17 / 2**30


def sized(**settings: object) -> Concurrency:
    return Concurrency.of(config_of(**settings))


def config_of(**settings: object):
    return load_config("config.toml", [(key.replace("__", "."), str(value)) for key, value in settings.items()])


@pytest.mark.parametrize(
    ("settings", "in_flight", "max_running"),
    [
        ({}, 256, 128),  # 2 x 16 slots of 8 rollouts, on two generators
        ({"scheduling__max_staleness": 0}, 128, 64),
        ({"scheduling__oversample": 0.5}, 320, 160),
        ({"generation__num_generators": 3}, 256, 88),  # 85.3, rounded up to a multiple of 8
        ({"scheduling__groups_per_step": 1, "rollout__group_size": 3, "scheduling__max_staleness": 0}, 3, 8),
        ({"scheduling__max_running_rollouts": 100}, 100, 56),
        ({"generation__max_running": 37}, 256, 37),
        ({"generation__max_running": "auto"}, 256, 128),
        ({"generation__max_running": "auto", "generation__kv_cache_gib": 3 * HALF_CONTEXT_GIB}, 256, 128),
        ({"generation__kv_cache_gib": 100 * HALF_CONTEXT_GIB}, 256, 96),
        ({"generation__kv_cache_gib": 3 * HALF_CONTEXT_GIB}, 256, 3),
    ],
)
def test_max_running_is_sized_from_the_batch(
    project: Path, settings: dict[str, object], in_flight: int, max_running: int
):
    found = sized(**settings)
    assert (found.in_flight, found.max_running) == (in_flight, max_running)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_max_running_must_be_a_number_or_auto(project: Path, value: str):
    with pytest.raises(ConfigError) as raised:
        load_config("config.toml", [("generation.max_running", value)])
    (line,) = str(raised.value).splitlines()
    assert line.startswith("command line: generation.max_running = ")
    assert line.endswith('must be a number above 0 or "auto"')


def test_kv_cache_sized_by_the_free_gpu_memory_sets_no_limit(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_rl.generation.gpu_share.has_gpu_driver", lambda: True)
    config = config_of()
    assert (Concurrency.of(config).max_running, Concurrency.of(config).held) == (128, None)
    assert list(throttles(config)) == []
    assert "# the KV cache of a generator uses the free memory of its GPU" in dump_config(config)


def test_default_settings_throttle_nothing(project: Path):
    assert list(throttles(config_of())) == []


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        (
            {"generation__max_running": 64},
            [
                "generation.max_running = 64 on 2 generators runs 128 of 256",
                "32 slots x rollout.group_size = 8",
                "128,",
            ],
        ),
        (
            {"generation__kv_cache_gib": 100 * HALF_CONTEXT_GIB},
            ["generation.kv_cache_gib = 0.012207 holds 100 contexts", "128 rollouts", "raise it to 0.0158"],
        ),
        (
            {"scheduling__max_running_rollouts": 100},
            ["scheduling.max_running_rollouts = 100 is less than the 128 rollouts of one step"],
        ),
        (
            {"scheduling__groups_per_step": 3, "training__minibatches": 3, "training__data_parallel": 16},
            ["training.data_parallel = 16 ranks", "as few as 8 rollouts", "training.minibatches = 3", "lower it to 8"],
        ),
    ],
)
def test_throttling_warnings_contain_the_numbers(project: Path, settings: dict[str, object], numbers: list[str]):
    (warning,) = throttles(config_of(**settings))
    assert all(number in warning for number in numbers), warning


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("generation.max_running", 9, "set it to "),
        ("generation.kv_cache_gib", 77 * HALF_CONTEXT_GIB, "raise it to "),
    ],
)
def test_following_the_advice_removes_the_warning(project: Path, key: str, value: float, advice: str):
    (warning,) = throttles(load_config("config.toml", [(key, str(value))]))
    better = warning.partition(advice)[2].split(",")[0]
    assert list(throttles(load_config("config.toml", [(key, better)]))) == []


def test_resolved_values_are_comments_and_do_not_change_settings(project: Path, capsys: pytest.CaptureFixture[str]):
    config = config_of()
    written = dump_config(config)
    assert config.generation.max_running is None
    assert "max_running" not in tomllib.loads(written)["generation"]
    assert "# 256 rollouts in flight: 32 slots" in written
    assert "# generation.max_running is 128, on each of 2 generators\n" in written

    assert main(["train", "config.toml", "--dry-run", "--generation.max_running", "64"]) == 0
    shown = capsys.readouterr()
    assert "# generation.max_running is 64" in shown.out
    assert tomllib.loads(shown.out)["generation"]["max_running"] == 64
    assert shown.err.startswith("titan-rl: warning: generation.max_running = 64")


def test_unknown_model_is_sized_from_the_batch_alone(project: Path):
    found = Concurrency.of(load_config("config.toml", [("model.path", "elsewhere")], check_files=False))
    assert (found.held, found.max_running) == (None, 128)


@pytest.mark.parametrize(
    ("settings", "seeded"),
    [
        ({"scheduling__max_staleness": 0}, True),
        ({"scheduling__max_staleness": 0, "scheduling__oversample": 0.5}, False),
        ({"scheduling__max_staleness": 1}, False),
        ({"scheduling__max_staleness": 1, "sampling__seeded": "true"}, True),
        ({"scheduling__max_staleness": 0, "sampling__seeded": "false"}, False),
    ],
)
def test_requests_are_seeded_in_reproducible_runs_or_as_set(
    project: Path, settings: dict[str, object], seeded: bool
) -> None:
    assert config_of(**settings).seeds_requests is seeded
