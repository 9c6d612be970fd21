"""Assembly of a completion from attempts and chunks, and the request for its remaining tokens."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from titan_rl import Completion, EngineRequest, FinishReason, SamplingParams, VersionSpan
from titan_rl.generation.request import Partial
from titan_rl.types import TokenChunk

LENGTH = 20
VERSIONS = [0] * 7 + [1] * 6 + [3] * 7


def spans(start: int, end: int) -> tuple[VersionSpan, ...]:
    here = VERSIONS[start:end]
    return tuple(VersionSpan(version, here.count(version)) for version in dict.fromkeys(here))


def top(tokens: list[int]) -> list[list[tuple[int, float]]]:
    return [[(token, -float(token))] for token in tokens]


def chunk(start: int, end: int) -> TokenChunk:
    tokens = list(range(start, end))
    return TokenChunk("r~1", tokens, [-float(token) for token in tokens], spans(start, end), top_logprobs=top(tokens))


def completion(start: int, end: int, reason: FinishReason) -> Completion:
    tokens = list(range(start, end))
    logprobs = [-float(token) for token in tokens]
    return Completion("r~1", tokens, logprobs, reason, spans(start, end), top_logprobs=top(tokens))


def cuts(last: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, last), max_size=4).map(sorted)


@given(attempts=cuts(LENGTH - 1), streamed=cuts(LENGTH), streams=st.booleans())
def test_attempts_and_chunks_combine_into_the_whole_completion(
    attempts: list[int], streamed: list[int], streams: bool
) -> None:
    received: list[int] = []
    partial = Partial(
        EngineRequest("r", [7, 8], SamplingParams(max_tokens=LENGTH, min_tokens=5), "s"),
        lambda chunk: received.extend(chunk.token_ids),
    )
    start = 0
    for end in attempts:
        with partial.attempt() as on_chunk:
            points = [start, *(point for point in streamed if start < point < end), end]
            for first, last in pairwise(points):
                on_chunk(chunk(first, last))
            assert partial.so_far.token_ids == list(range(end))
            if not streams:
                partial.add(completion(start, end, FinishReason.ABORT))
        on_chunk(chunk(0, LENGTH))  # late chunk of an attempt that has ended
        start = end
        assert partial.ended is None
        assert partial.rest == EngineRequest(
            "r",
            (7, 8, *range(start)),
            SamplingParams(max_tokens=LENGTH - start, min_tokens=max(0, 5 - start)),
            "s",
        )
    whole = partial.add(completion(start, LENGTH, FinishReason.LENGTH))
    assert whole.request_id == "r"
    assert list(whole.token_ids) == received == list(range(LENGTH))
    assert list(whole.logprobs) == [-float(token) for token in range(LENGTH)]
    assert whole.version_spans == spans(0, LENGTH)
    assert whole.finish_reason is FinishReason.LENGTH


def test_request_copies_its_prompt() -> None:
    mine = [1, 2]
    request = EngineRequest("r", mine, SamplingParams(max_tokens=4))
    mine.append(3)
    assert (request.prompt_token_ids, request.cost) == ((1, 2), 6)


def test_sampling_within_caps_max_and_min_tokens() -> None:
    sampling = SamplingParams(max_tokens=8, min_tokens=4)
    assert sampling.within(8) is sampling
    assert sampling.within(3) == SamplingParams(max_tokens=3, min_tokens=3)
