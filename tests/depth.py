"""How far the tests that draw examples go: all the way in `make test-deep`, an eighth of it elsewhere."""

import os

DEEP = os.environ.get("TITAN_RL_TEST_DEPTH") == "deep"


def examples(number: int) -> int:
    """How many of `number` examples to draw."""
    return number if DEEP else max(number // 8, 4)
