"""How far the tests go: all the way in `make test-deep` and `make test-hosts`, a part of it elsewhere."""

import os

import pytest

DEEP = os.environ.get("TITAN_RL_TEST_DEPTH") == "deep"
in_depth = pytest.mark.skipif(not DEEP, reason="make test-deep runs it, beside others of its kind")
on_more_hosts = pytest.mark.skipif(
    not os.environ.get("TITAN_RL_TEST_HOSTS"), reason="make test-hosts runs it, beside others of its kind"
)


def examples(number: int) -> int:
    """How many of `number` random examples to draw: an eighth, where it is not all the way."""
    return number if DEEP else max(number // 8, 4)
