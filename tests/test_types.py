"""Types that cross the planes validate their fields on construction and hold plain numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from titan_rl import (
    Completion,
    FinishReason,
    MessageObservation,
    Reward,
    RolloutGroup,
    Rubric,
    SamplingParams,
    TokenStep,
    VersionSpan,
    build_samples,
)
from titan_rl.rollout.environment.types import MessagePlayer, TokenPlayer
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.rewards.reward import FailurePolicy, SoftOverlong
from titan_rl.types import TokenChunk

INF, NAN = float("inf"), float("nan")


async def generate(*_: Any, **__: Any) -> Completion:
    raise NotImplementedError


def half(_: Any) -> float:
    return 0.5


RUBRIC = Rubric([Reward(half)])


def completion(**fields: Any) -> Completion:
    given = {"request_id": "r", "token_ids": [1, 2], "logprobs": [0.0, 0.0], "finish_reason": FinishReason.STOP}
    return Completion(**{**given, "version_spans": (VersionSpan(0, 2),), **fields})


INVALID: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"SamplingParams({name}={value!r})": (
            lambda name=name, value=value: SamplingParams(**{"max_tokens": 8, name: value}),
            f"SamplingParams.{name} is {value!r}; it must be",
        )
        for name, value in [
            ("max_tokens", 1.5),
            ("max_tokens", 0),
            ("max_tokens", "8"),
            ("max_tokens", None),
            ("max_tokens", True),
            ("max_tokens", INF),
            ("min_tokens", 0.5),
            ("min_tokens", 9),
            ("top_k", 1.5),
            ("top_k", 0),
            ("top_k", -2),
            ("top_logprobs", 1.5),
            ("top_logprobs", 21),
            ("temperature", INF),
            ("temperature", NAN),
            ("temperature", "1"),
            ("temperature", None),
            ("temperature", -1.0),
            ("top_p", 0.0),
            ("top_p", NAN),
            ("top_p", "0.5"),
            ("min_p", 1.5),
            ("min_p", NAN),
            ("seed", 1.5),
            ("seed", "a"),
            ("stop_token_ids", ("a",)),
            ("stop_token_ids", 5),
            ("stop_token_ids", (1.5,)),
            ("return_routed_experts", "yes"),
        ]
    },
    **{
        f"VersionSpan{values}": (lambda values=values: VersionSpan(*values), f"VersionSpan.{name} is {wrong!r}")
        for values, name, wrong in [
            ((1, -1), "num_tokens", -1),
            ((-1, 1), "version", -1),
            ((1.5, 1), "version", 1.5),
            ((1, 1.5), "num_tokens", 1.5),
            ((1, None), "num_tokens", None),
            ((2**63, 1), "version", 2**63),
        ]
    },
    "a completion with a metric of text": (lambda: completion(metrics={"x": "1"}), r"metrics['x'] is '1'"),
    "a completion without metrics": (lambda: completion(metrics=None), "Completion.metrics is None"),
    "a completion whose spans are pairs": (lambda: completion(version_spans=[(0, 2)]), "Completion.version_spans is"),
    "a completion that ended in text": (lambda: completion(ended="stop"), "Completion.ended is 'stop'"),
    "a chunk whose spans are pairs": (lambda: TokenChunk("r", [1], [0.0], [(0, 1)]), "TokenChunk.version_spans is"),
    "build_samples(temperature=inf)": (
        lambda: build_samples(RolloutGroup("g", None, []), temperature=INF),
        "temperature is inf; completions to train on are sampled at a finite temperature above 0",
    ),
    "build_samples(temperature=text)": (
        lambda: build_samples(RolloutGroup("g", None, []), temperature="1"),
        "temperature is '1'",
    ),
    "a negative weight next to a larger one": (
        lambda: Rubric([Reward(half, 2.0), Reward(lambda _: 1.0, -0.5, "penalty")]),
        "reward 'penalty' has weight -0.5; in a mean it must be positive, or 0",
    ),
    "a weight of text": (lambda: Reward(half, "1"), "reward 'half' has weight '1'"),
    "a weight of nan": (lambda: Reward(half, NAN), "reward 'half' has weight nan"),
    "a fixed reward of text": (lambda: Rubric([half], error_reward="0"), "error_reward is '0'"),
    "a huge fixed reward": (lambda: Rubric([half], truncated_reward=1e300), "truncated_reward is 1e+300"),
    "a rubric of numbers": (
        lambda: Rubric([0.5]),
        "has 0.5 among its rewards; it must be a reward, such as Reward(fun",
    ),
    "a rubric's timeout": (lambda: Rubric([half], timeout_s="5"), "timeout_s is '5'"),
    "a reward that is not a function": (lambda: Reward(0.5), "Reward got 0.5"),
    "a fractional number of threads": (lambda: Reward(half, max_threads=1.5), "max_threads 1.5"),
    "a timeout of nan": (lambda: Reward(half, timeout_s=NAN), "timeout_s nan"),
    "an infinite backoff": (lambda: FailurePolicy(backoff_s=INF), "backoff_s is inf"),
    "a fractional margin": (lambda: SoftOverlong(100, 1.5), "margin is 1.5"),
    "a player's temperature": (lambda: TokenPlayer(generate, temperature=INF), "TokenPlayer.temperature is inf"),
    "a player's timeout": (lambda: TokenPlayer(generate, timeout_s=0), "TokenPlayer.timeout_s is 0"),
    "a script's timeout": (lambda: MessagePlayer(str, timeout_s=-1.0), "MessagePlayer.timeout_s is -1.0"),
    "tools of text": (lambda: MessageObservation([], tools=["add"]), "MessageObservation.tools is ['add']"),
    "a fractional context": (lambda: Rollouter(half, RUBRIC, max_context=10.5), "max_context is 10.5"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_value_error_names_field_and_value(name: str) -> None:
    make, message = INVALID[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_penalty_keeps_its_positive_weight() -> None:
    rubric = Rubric([Reward(half, 0.8), Reward(lambda _: -1.0, 0.2, "penalty"), Reward(half, 0.0, "recorded")])
    assert [reward.weight for reward in rubric.rewards] == [0.8, 0.2, 0.0]


def test_numpy_numbers_become_plain_numbers() -> None:
    sampling = SamplingParams(
        max_tokens=np.int64(8),
        temperature=np.float32(0.5),
        top_p=np.float64(0.9),
        top_k=np.int32(4),
        min_tokens=np.uint8(1),
        seed=np.int64(3),
        stop_token_ids=np.array([1, 2]),
        return_routed_experts=np.bool_(True),
    )
    assert sampling == SamplingParams(8, 0.5, 0.9, 4, 0.0, 1, 3, (1, 2), True)
    answer = completion(
        request_id=np.str_("r"),
        version_spans=[VersionSpan(np.int64(3), np.int32(2))],
        metrics={"queue_s": np.float32(0.5), "cached": np.int64(2), np.str_("wait"): 1},
    )
    assert answer.metrics == {"queue_s": 0.5, "cached": 2.0, "wait": 1.0}
    for value in (sampling, answer.version_spans[0], dict(answer.metrics), answer.request_id):
        json.dumps(msgspec.to_builtins(value))
        msgspec.msgpack.encode(value)


def test_float_metrics_are_kept_without_a_copy() -> None:
    metrics = {"queue_s": 0.5}
    assert completion(metrics=metrics).metrics is metrics


def test_token_step_accepts_numpy_rewards() -> None:
    assert TokenStep([1], rewards={"won": np.float32(0.5)}).rewards == {"won": 0.5}
