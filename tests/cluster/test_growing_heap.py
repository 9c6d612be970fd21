"""Garbage collection that pauses while a heap grows and runs rarely once it has settled."""

import asyncio
import gc
import platform
import re
import weakref
from pathlib import Path

import looptime
import pytest

from titan_rl.cluster.processes.garbage_collection import LEAST_APART_S, growing_heap, return_free_memory, settled_heap


def test_growing_heap_disables_collection_inside_the_block():
    with growing_heap():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_growing_heap_reenables_collection_after_an_error():
    with pytest.raises(OSError, match="no such model"), growing_heap():
        raise OSError("no such model")
    assert gc.isenabled()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_settled_heap_collects_by_timer_and_restores_thresholds():
    thresholds = gc.get_threshold()

    async def live() -> None:
        with settled_heap():
            old = weakref.ref(aged := Cycle())
            gc.collect(1)  # moves it to the oldest generation
            del aged
            gc.collect(1)
            assert old() is not None
            await asyncio.sleep(LEAST_APART_S + 0.001)
            assert old() is None

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(live())
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("is_settled", [False, True])
def test_settled_heap_preserves_objects_frozen_before(is_settled: bool):
    async def live() -> None:
        with settled_heap():
            assert gc.get_freeze_count()

    gc.unfreeze()
    if is_settled:
        gc.freeze()
    asyncio.run(live())
    assert bool(gc.get_freeze_count()) is is_settled
    gc.freeze()  # as other tests expect


def resident_kb() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators return free memory by themselves")
def test_return_free_memory_between_live_blocks() -> None:
    blocks: list[bytes | None] = [bytes(20_000) for _ in range(5_000)]  # 100 MB
    pages_of_all = resident_kb()
    blocks = [block if index % 100 == 0 else None for index, block in enumerate(blocks)]
    return_free_memory()
    assert resident_kb() < pages_of_all - 80_000
    assert len([block for block in blocks if block is not None]) == 50
