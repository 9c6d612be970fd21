"""Depth of the tests: variants that only `make test-deep` or `make test-hosts` runs, and numbers of random examples."""

import os

import pytest

DEEP = os.environ.get("TITAN_RL_TEST_DEPTH") == "deep"
in_depth = pytest.mark.skipif(not DEEP, reason="make test-deep runs it, in addition to similar tests")
on_more_hosts = pytest.mark.skipif(
    not os.environ.get("TITAN_RL_TEST_HOSTS"), reason="make test-hosts runs it, in addition to similar tests"
)


def examples(number: int) -> int:
    """Return how many random examples to draw: `number` in `make test-deep`, an eighth of it elsewhere."""
    return number if DEEP else max(number // 8, 4)
