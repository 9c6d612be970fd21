"""Quick pickling of frozen dataclasses with slots."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from titan_rl import Completion, FinishReason, SamplingParams, VersionSpan
from titan_rl.core.pickling import quick_pickle, replace_unchecked


@dataclass(frozen=True, slots=True)
class Plain:
    first: int
    second: str


@quick_pickle
@dataclass(frozen=True, slots=True)
class Quick:
    first: int
    second: str


def test_quick_pickle_matches_the_dataclass_pickle() -> None:
    plain, quick = pickle.dumps(Plain(1, "a")), pickle.dumps(Quick(1, "a"))
    assert quick == plain.replace(b"Plain", b"Quick")
    assert pickle.loads(quick) == Quick(1, "a") == copy.copy(Quick(1, "a"))


def test_restored_object_is_frozen_and_complete() -> None:
    restored = pickle.loads(pickle.dumps(Quick(1, "a")))
    with pytest.raises(FrozenInstanceError):
        restored.first = 2
    with pytest.raises(ValueError, match="zip"):
        restored.__setstate__([1])


def test_replace_unchecked_equals_replace_without_the_checks() -> None:
    sampling = SamplingParams(max_tokens=3, stop_token_ids=(7,))
    assert replace_unchecked(sampling, seed=5) == replace(sampling, seed=5)
    assert replace_unchecked(sampling, max_tokens=0).max_tokens == 0
    assert sampling.max_tokens == 3


def test_sampling_params_and_completion_can_be_pickled() -> None:
    sampling = SamplingParams(max_tokens=3, seed=5)
    completion = Completion("a", [1, 2], [-0.5, 0.0], FinishReason.STOP, (VersionSpan(4, 2),), None, {"queue_s": 1.0})
    assert pickle.loads(pickle.dumps((sampling, completion))) == (sampling, completion)
