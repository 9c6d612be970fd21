"""Comparison of an engine with the trainer, with a tiny model, before and after hot swaps during running requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from titan_rl.core.errors import GenerationError
from titan_rl.generation.engine import Engine, EngineSpec, TokenDelta
from titan_rl.generation.registry import make_engine
from titan_rl.generation.request import EngineRequest
from titan_rl.training.family_check import (
    CONTEXT,
    draw_sequences,
    exact_products,
    logprob_tolerance,
    tiny_policy,
    tolerances_of,
)
from titan_rl.training.numerical_check import NumericalCheck
from titan_rl.training.policy import Policy
from titan_rl.types import SamplingParams

PROMPT = (5, 6, 7, 8)
SWAPS = 3
LEAST_CHANGE = 100
"""Least change of logprobs by a swap, as a multiple of the tolerance. After a smaller change, old weights might
pass for new ones."""


def check_engine(folder: Path) -> Iterator[NumericalCheck]:
    """Start vLLM with a tiny model, and compare its logprobs with the trainer's: for given sequences, for sampled
    tokens, and after each of `SWAPS` hot swaps, between which requests continue. vLLM runs in this process, which must
    exit afterwards.

    Raises:
        ModelError: The trainer or the engine cannot load the model.
        GenerationError: The engine stops, or a swap changes too little.
        Exception: Any error of the engine.
    """
    policy = tiny_policy(folder)
    sequences = draw_sequences(40, 17)
    tolerance = logprob_tolerance(folder, sequences, tolerances_of(policy.device).engine)
    engine = make_engine("vllm", EngineSpec(str(folder), max_context=CONTEXT, kv_cache_gib=0.1))
    with exact_products():
        before = policy.score(sequences)
        yield NumericalCheck(
            "engine",
            "vLLM's logprobs of given sequences against the trainer's",
            _difference(engine.score(sequences), before),
            tolerance,
            "nats",
        )
        for number in range(2):
            sampling = SamplingParams(max_tokens=100, min_tokens=100)
            engine.add(EngineRequest(str(number), PROMPT, sampling))
        yield NumericalCheck(
            "sampling",
            "vLLM's logprobs of the tokens it samples against the trainer's",
            _sampling_error(policy, _steps(engine, 5)),
            tolerance,
            "nats",
        )
        worst = 0.0
        for version in range(1, SWAPS + 1):
            change_weights(policy, seed=version)
            engine.load_state_dict(list(policy.named_tensors()), version)
            after = policy.score(sequences)
            if (change := _difference(after, before)) < LEAST_CHANGE * tolerance:
                raise GenerationError(f"swap {version} changes logprobs by only {change:.2g} nats")
            worst = max(worst, _difference(engine.score(sequences), after))
            _steps(engine, 2)
            before = after
        yield NumericalCheck(
            "hot swaps",
            f"the same after each of {SWAPS} swaps of weights, with requests running",
            worst,
            tolerance,
            "nats",
        )
    engine.close()


@torch.no_grad()
def change_weights(policy: Policy, *, seed: int) -> None:
    """Change every weight by about a twentieth, far more than an optimizer step would, so that old weights can be
    detected."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.add_(noise * parameter.abs().mean(), alpha=0.05)


def _difference(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Largest absolute difference; infinite if one of them is NaN."""
    pairs = zip(found, expected, strict=True)
    errors = (torch.tensor(own) - torch.tensor(other) for own, other in pairs)
    return max(float(error.abs().nan_to_num(torch.inf).max()) for error in errors)


def _steps(engine: Engine, count: int) -> list[TokenDelta]:
    """Run steps of an engine while requests are running, and collect their tokens.

    Raises:
        GenerationError: A step gives no tokens, or a request ends too early.
    """
    found: list[TokenDelta] = []
    for _ in range(count):
        deltas = engine.step()
        if not deltas:
            raise GenerationError("the engine has stopped working on its requests")
        for delta in deltas:
            if delta.failure is not None or delta.finish_reason is not None:
                raise GenerationError(f"a request ends early: {delta.failure or delta.finish_reason}")
        found += deltas
    return found


def _sampling_error(policy: Policy, deltas: Sequence[TokenDelta]) -> float:
    errors: list[float] = []
    for request_id in {delta.request_id for delta in deltas}:
        own = [delta for delta in deltas if delta.request_id == request_id]
        tokens = [token for delta in own for token in delta.token_ids]
        logprobs = [value for delta in own for value in delta.logprobs]
        (expected,) = policy.score([[*PROMPT, *tokens]])
        errors.append(_difference([logprobs], [expected[len(PROMPT) - 1 :]]))
    return max(errors)
