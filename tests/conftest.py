"""Settings of all tests: number of hypothesis examples, limits of virtual time, order of the files."""

import atexit
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from background import HANG_S
from depth import examples
from hypothesis import settings
from virtual_time import END_S

pytest.register_assert_rewrite("titan_rl.testing.engine_contract")

settings.register_profile("titan_rl", max_examples=examples(100), deadline=None)
settings.load_profile("titan_rl")

# A shell starts background processes with SIGINT ignored, nohup with SIGHUP, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ.pop("PYTEST_ADDOPTS", None)  # meant for this process, not for those that tests start

TESTS = Path(__file__).parent
# The slowest files. They come first, because one that came last would run alone.
LONGEST = [
    "e2e/test_train.py",
    "e2e/test_stopped_and_killed.py",
    "e2e/test_real_generators.py",
    "e2e/test_sharded_run.py",
    "e2e/test_tensor_parallel.py",
    "e2e/test_sharded_publish.py",
    "e2e/test_sharded_trainer.py",
    "e2e/test_compile.py",
    "hosts/test_hosts_come_and_go.py",
    "test_storm.py",
    "run/test_killed_run.py",
    "generation/test_poison.py",
    "benchmarks/test_simulation.py",
    "scheduling/test_any_order.py",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt imported modules from garbage collection, which would take a quarter of the time of fast tests."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_sessionfinish() -> None:
    atexit.register(gc.unfreeze)  # otherwise native modules report uncollected objects as leaks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("looptime") is not None:  # the test's own marker takes precedence
            item.add_marker(pytest.mark.looptime(end=END_S, idle_timeout=HANG_S))
    items.sort(key=_order)


def _order(item: pytest.Item) -> int:
    """Sort key of a test: the files of `LONGEST`, then the folders e2e and hosts, then all others."""
    file = item.path.relative_to(TESTS)
    if file.as_posix() in LONGEST:
        return LONGEST.index(file.as_posix())
    return len(LONGEST) + (file.parts[0] not in ("e2e", "hosts"))
