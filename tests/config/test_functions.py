"""Settings of the form "module:function" are imported and checked when the config is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_rl.config.load import load_config
from titan_rl.core.errors import ConfigError


def failure(*overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("config.toml", overrides)
    return str(caught.value)


OWN_FUNCTIONS = """
import math
from pathlib import Path
from titan_rl.generation.router import RoundRobin
def mine(*args): return RoundRobin()
def no_arguments(): ...
def of_three(one, two, three): ...
async def later(*args): ...
class Fancy:
    def __init__(self, *args): ...
_hidden = mine
number = 3
"""


@pytest.mark.parametrize(
    "key",
    [
        "training.loss",
        "training.advantage",
        "training.optimizer",
        "routing.strategy",
        "generation.engine",
        "model.renderer",
        "statedict.transport",
    ],
)
def test_user_function_is_imported_on_load(project: Path, key: str):
    table, _, setting = key.partition(".")
    module = f"own_{setting}"
    Path(f"{module}.py").write_text(OWN_FUNCTIONS)
    config = load_config("config.toml", [(key, f"{module}:mine")])
    assert getattr(getattr(config, table), setting) == f"{module}:mine"
    named = f"command line: {key} = "
    there = "mine, no_arguments, of_three, later, Fancy"
    for value, reason in {
        f"{module}:mein": f"{module} has no function mein; it has: {there}",
        f"{module}:number": f"{module} has no function number; it has: {there}",
        "no_such_module:mine": "there is no module no_such_module",
    }.items():
        message = failure((key, value))
        assert message.startswith(f"{named}{value!r}: {reason}")
    Path("broken_functions.py").write_text("1 / 0")
    assert "importing broken_functions failed: ZeroDivisionError" in failure((key, "broken_functions:mine"))
    Path("leaving_functions.py").write_text("raise SystemExit(3)")
    assert "importing leaving_functions failed: SystemExit: 3" in failure((key, "leaving_functions:mine"))
    Path("fussy_functions.py").write_text("def __getattr__(name): raise RuntimeError('no')")
    assert "fussy_functions.mine cannot be read: RuntimeError: no" in failure((key, "fussy_functions:mine"))
    assert f"{named}'quux' must be one of " in failure((key, "quux"))


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("training.loss", "(tokens, clip)"),
        ("training.advantage", "(rewards)"),
        ("training.optimizer", "(named_parameters, spec)"),
        ("routing.strategy", "(max_sessions)"),
        ("generation.engine", "(spec)"),
        ("model.renderer", "(tokenizer)"),
        ("statedict.transport", "(spec)"),
    ],
)
def test_function_with_the_wrong_signature_is_rejected(project: Path, key: str, call: str):
    module = f"uncalled_{key.rpartition('.')[2]}"
    Path(f"{module}.py").write_text(OWN_FUNCTIONS)
    named = f"command line: {key} = '{module}:"
    assert failure((key, f"{module}:no_arguments")).startswith(
        f"{named}no_arguments' is called with {call}, and takes (): too many positional arguments"
    )
    assert failure((key, f"{module}:of_three")).startswith(
        f"{named}of_three' is called with {call}, and takes (one, two, three): missing a required argument"
    )
    assert failure((key, f"{module}:later")).startswith(f"{named}later' is async, and nothing awaits it; make it a")
    if key in ("training.loss", "training.advantage"):
        assert f"{named}Fancy' is a class; name a function" in failure((key, f"{module}:Fancy"))


def test_routing_strategy_is_created_on_load(project: Path):
    Path("own_routing.py").write_text("def none(max_sessions): ...\ndef broken(max_sessions): return {}['answer']\n")
    assert failure(("routing.strategy", "own_routing:none")).startswith(
        "command line: routing.strategy = 'own_routing:none' returned None; it must return a Strategy"
    )
    assert failure(("routing.strategy", "own_routing:broken")).startswith(
        "command line: routing.strategy = 'own_routing:broken' failed: KeyError: 'answer' (own_routing.py:2 in broken)"
    )


def test_every_function_of_a_list_is_imported(project: Path):
    Path("own_filters.py").write_text(OWN_FUNCTIONS)
    key, names = "scheduling.filters", ("zero_variance", "own_filters:mine")
    assert load_config("config.toml", [(key, str(list(names)))]).scheduling.filters == names
    assert "command line: scheduling.filters[1] = 'own_filters:mein': own_filters has no function mein" in failure(
        (key, '["zero_variance", "own_filters:mein"]')
    )
    assert "scheduling.filters[0] = 'dull' must be one of zero_variance, or your own" in failure((key, '["dull"]'))
