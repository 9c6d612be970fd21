"""When garbage is collected: not while a heap grows, and seldom once it has settled."""

import asyncio
import gc
import weakref

import looptime
import pytest

from titan_rl.actors.processes.garbage import LEAST_APART_S, growing_heap, settled_heap


def test_collections_rest_for_the_length_of_the_block():
    with growing_heap():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_a_failure():
    with pytest.raises(OSError, match="no such model"), growing_heap():
        raise OSError("no such model")
    assert gc.isenabled()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_in_a_settled_heap_are_freed_by_a_timer_alone_and_later_as_before():
    thresholds = gc.get_threshold()

    async def live() -> None:
        with settled_heap():
            old = weakref.ref(aged := Cycle())
            gc.collect(1)  # it is of the oldest generation then
            del aged
            gc.collect(1)
            assert old() is not None
            await asyncio.sleep(LEAST_APART_S + 0.001)
            assert old() is None

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(live())
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("is_settled", [False, True])
def test_what_a_program_has_its_collections_skip_they_skip_after_a_run_too(is_settled: bool):
    async def live() -> None:
        with settled_heap():
            assert gc.get_freeze_count()

    gc.unfreeze()
    if is_settled:
        gc.freeze()
    asyncio.run(live())
    assert bool(gc.get_freeze_count()) is is_settled
    gc.freeze()  # as the others have it
