"""`titan_rl.__all__` contains the parts of a custom loop."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import titan_rl
from titan_rl.core import errors

LOOP = {
    "EngineLoop", "LocalReplica", "Engine", "ScriptedEngine", "GeneratorRouter", "Limits", "Rollouter", "Rubric",
    "GroupScheduler", "GroupBatch", "Lease", "SchedulingConfig", "build_samples", "resume_on_abort",
    "StateDictTransport", "TrainingSample", "WeightedReward", "env_reward", "EngineRequest", "TokenDelta",
    "Backlog", "RunGroup",
}  # fmt: skip


def test_public_names_include_loop_parts_and_errors():
    public = set(titan_rl.__all__)
    assert public >= LOOP
    of_errors = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert {value.__name__ for value in of_errors if value.__module__ == errors.__name__} <= public
    assert all(hasattr(titan_rl, name) for name in public)
    assert len(titan_rl.__all__) == len(public)


def test_stub_file_imports_each_public_name_from_its_module():
    stub = ast.parse(Path(titan_rl.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    found = {alias.name: import_module(str(node.module)) for node in imports for alias in node.names}
    assert found.keys() == set(titan_rl.__all__)
    assert all(getattr(module, name) is getattr(titan_rl, name) for name, module in found.items())
