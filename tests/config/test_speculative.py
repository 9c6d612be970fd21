"""The table [generation.speculative]: options for the engine, and incompatible settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_rl.config.load import load_config
from titan_rl.config.sections import SpeculativeConfig
from titan_rl.core.errors import ConfigError


def load(*overrides: tuple[str, str]) -> SpeculativeConfig:
    named = [(f"generation.speculative.{name}" if "." not in name else name, value) for name, value in overrides]
    config = load_config("examples/alphabet_sort/cpu.toml", named, check_files=False)
    return config.generation.speculative


def test_engine_options_contain_only_settings_of_the_method(tmp_path: Path) -> None:
    assert load().options() is None
    assert load(("method", "ngram"), ("num_speculative_tokens", "5")).options() == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    assert load(("method", "eagle"), ("model", str(tmp_path))).options() == {
        "method": "eagle",
        "num_speculative_tokens": 3,
        "model": str(tmp_path),
    }
    assert load(("method", "suffix")).options() == {"method": "suffix", "num_speculative_tokens": 3}
    assert [load(("method", name)).has_weights for name in ("none", "ngram", "suffix", "mtp")] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ([("method", "synthetic")], "generation.speculative.method = 'synthetic' must be .*'ngram'"),
        ([("method", "ngram"), ("rejection_sample_method", "synthetic")], "is not a setting"),
        ([("method", "ngram"), ("num_speculative_tokens", "0")], "must be greater than 0"),
        ([("method", "ngram"), ("num_speculative_tokens", "129")], "num_speculative_tokens = 129 must be .* 128"),
        ([("num_speculative_tokens", "5")], 'num_speculative_tokens = 5 with method = "none".*leave it out'),
        ([("method", "draft_model")], 'method = "draft_model" needs model, the folder of the draft model'),
        ([("method", "ngram"), ("model", "small")], 'model is for .* and method is "ngram"; leave it out'),
        (
            [("method", "ngram"), ("prompt_lookup", "[6, 4]")],
            r"prompt_lookup = \[6, 4\]: the least number of tokens must come first",
        ),
        (
            [("method", "ngram"), ("generation.return_routed_experts", "true")],
            '"ngram" with generation.return_routed_experts = true: the experts',
        ),
        (
            [("method", "mtp"), ("scheduling.on_batch_ready", "sleep")],
            '"mtp" with scheduling.on_batch_ready = "sleep": an engine that sleeps discards the draft weights',
        ),
    ],
)
def test_incompatible_speculative_settings_are_rejected(overrides: list[tuple[str, str]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(*overrides)
