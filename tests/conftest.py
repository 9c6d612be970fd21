"""For all tests: how many examples hypothesis draws, and which files come first."""

from pathlib import Path

import pytest
from depth import examples
from hypothesis import settings

settings.register_profile("titan_rl", max_examples=examples(100), deadline=None)
settings.load_profile("titan_rl")

E2E = Path(__file__).parent / "e2e"
# Files that take half a minute and more, the longest first: one that came last would run alone.
LONGEST = [
    "test_train.py",
    "test_stopped_and_killed.py",
    "test_real_generators.py",
    "test_troubled_task.py",
    "test_sharded_run.py",
    "test_tensor_parallel.py",
    "test_sharded_publish.py",
    "test_sharded_trainer.py",
    "test_compile.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """What starts engines and trainers comes before what does not; in each, files keep their order."""
    if item.path.parent != E2E:
        return len(LONGEST) + 1
    return LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
