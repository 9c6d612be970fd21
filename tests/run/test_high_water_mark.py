"""What counts as something that has happened."""

from __future__ import annotations

import contextlib

from titan_rl.core.errors import NoReplicaError
from titan_rl.generation.router.counts import HighWaterMark


def test_requests_that_fail_are_no_answers():
    requests = HighWaterMark()
    with contextlib.suppress(NoReplicaError), requests.one():
        raise NoReplicaError("none")
    assert (requests.now, requests.num_done, requests.take()) == (0, 0, 1)
    with requests.one():
        pass
    assert (requests.now, requests.num_done, requests.take()) == (0, 1, 1)
