"""Cost of tokens as lists of Python objects, for comparison with the arrays in `benchmarks/token_path.py`."""

from __future__ import annotations

import gc
import pickle
import time
import tracemalloc
from collections.abc import Sequence

import msgspec
import torch

from titan_rl.cluster.processes.garbage_collection import settle_heap
from titan_rl.rollout.types import Rollout


def tokens_per_second_of_lists(request_ids: Sequence[str], length: int, chunk: int) -> float:
    """Upper limit of the throughput: unpickling, joining, and building samples and rows, without router, rollouter and
    journal.

    Args:
        length: tokens of each request.
        chunk: tokens per chunk.
    """
    messages: list[bytes] = []
    for start in range(0, length, chunk):
        token_ids, logprobs = _numbers(range(start, start + chunk))
        messages.append(pickle.dumps([(name, list(token_ids), list(logprobs)) for name in request_ids]))
    held: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in request_ids}
    settle_heap()
    began = time.process_time()
    for message in messages:
        for name, token_ids, logprobs in pickle.loads(message):
            held[name][0].extend(token_ids)
            held[name][1].extend(logprobs)
    for token_ids, logprobs in held.values():
        mask, advantages, versions = [True] * length, [1.0] * length, [0] * length
        for values in (list(token_ids), list(logprobs), mask, advantages, versions):
            torch.tensor(values)
    seconds = time.process_time() - began
    gc.unfreeze()
    return len(request_ids) * length / seconds


def bytes_a_token_of_lists(length: int) -> float:
    """Bytes of a token's id and logprob, in lists that were unpickled."""
    message = pickle.dumps(_numbers(range(length)))
    tracemalloc.start()
    lists = pickle.loads(message)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(lists[0])


def journal_bytes_of_contexts(rollout: Rollout) -> int:
    """Bytes of a journal in which each turn stores its whole context, as lists."""
    return sum(
        len(
            msgspec.msgpack.encode(
                [list(each) for each in (turn.prompt_token_ids, completion.token_ids, completion.logprobs)]
            )
        )
        for turn in rollout.turns
        for completion in [turn.completion]
    )


def _numbers(places: range) -> tuple[list[int], list[float]]:
    return [7 * place % 150_000 for place in places], [-0.5 - 1e-4 * place for place in places]
