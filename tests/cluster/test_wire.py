"""Packing and unpacking of the messages of a request stream."""

from dataclasses import MISSING, fields

import pytest

from titan_rl.cluster.request_stream import RequestFailed, pack, unpack
from titan_rl.core.errors import GenerationError
from titan_rl.types import Completion, FinishReason, PromptScores, TokenChunk, VersionSpan

TOP = [[(5, -0.5)], [(8, -0.05), (9, -0.1)], []]
ALLOWED = [-0.25, 0.0, -3.5]
SPANS = (VersionSpan(6, 1), VersionSpan(7, 2))
CHUNK = TokenChunk("g/0/1", [5, 9, 2], [-0.5, -0.1, -2.0], SPANS, [[[1]], [[2]], [[3]]], TOP, ALLOWED)
COMPLETION = Completion(
    "g/0/1",
    [5, 9, 2],
    [-0.5, -0.1, -2.0],
    FinishReason.ABORT,
    SPANS,
    [[[1]], [[2]], [[3]]],
    {"queue_s": 0.5},
    FinishReason.TOOL_CALLS,
    TOP,
    ALLOWED,
    PromptScores([-1.5], 1, [7], [-0.5]),
)


@pytest.mark.parametrize("message", [CHUNK, COMPLETION])
def test_unpack_restores_every_field(message: TokenChunk | Completion) -> None:
    for field in fields(message):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        assert getattr(message, field.name) != default, f"the test would not notice a lost {field.name}"
    assert unpack(pack(message)) == message


def test_unpack_restores_a_bare_completion_and_a_failure() -> None:
    bare = Completion("a", [], [], FinishReason.LENGTH, ())
    assert unpack(pack(bare)) == bare
    failed = RequestFailed("a", GenerationError("gone"))
    assert unpack(pack(failed)) == failed
