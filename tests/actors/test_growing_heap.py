"""No collections while a heap grows, and collections again afterwards, whatever happened."""

import gc

import pytest

from titan_rl.actors.processes.garbage import growing_heap


def test_collections_rest_for_the_length_of_the_block():
    with growing_heap():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_a_failure():
    with pytest.raises(OSError, match="no such model"), growing_heap():
        raise OSError("no such model")
    assert gc.isenabled()
