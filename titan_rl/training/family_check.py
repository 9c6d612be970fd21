"""Checks of a model family with a tiny model: its logprobs must match those of transformers' own layers, and packed
sequences must not affect each other. `titan_rl.run.checks.engine_check` compares an engine with it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from titan_rl.core.errors import ModelError
from titan_rl.training.choices import Implementation
from titan_rl.training.data.packing import Family, find_families
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.models.families import PROVED, choose_implementation
from titan_rl.training.models.hf_model import read_hf_config
from titan_rl.training.models.shrunken_models import VOCABULARY, tiny_of_folder
from titan_rl.training.numerical_check import NumericalCheck
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.tensor_batch import make_tensor_batch

CONTEXT = 128
"""Maximum number of tokens of a sequence in a check."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Largest differences that rounding in float32 explains, for tiny models.

    Attributes:
        logprobs: Difference between logprobs in float32 and in float64, in nats.
        gradients: Difference between gradients, relative to the largest entry.
        engine: Difference between the logprobs of an engine and of the trainer, in nats.
    """

    logprobs: float
    gradients: float
    engine: float


TOLERANCES: Mapping[str, Tolerances] = {
    "cpu": Tolerances(logprobs=2e-5, gradients=1e-4, engine=2e-5),
    # Kernels of a GPU sum in another order, and some of vLLM's multiply float32 with 10 bits of mantissa (TF32).
    "cuda": Tolerances(logprobs=5e-4, gradients=2e-3, engine=1e-2),
}
"""Tolerances by type of device; those of "cuda" for any device that is not listed."""


ROUNDINGS = 4
"""Largest difference of logprobs, as a multiple of the rounding of transformers' own forward pass in float32."""

MOST_ROUNDING = 10
"""Largest factor by which rounding may raise a tolerance. Larger differences are indistinguishable from errors."""


def logprob_tolerance(folder: Path, sequences: Sequence[Sequence[int]], least: float) -> float:
    """Largest difference of logprobs that rounding in float32 explains for a tiny model, in nats. It is larger in some
    families, such as those that scale embeddings or logits.

    Args:
        least: Tolerance for most families, in nats.
    """
    return min(max(least, ROUNDINGS * rounding_error(folder, sequences)), MOST_ROUNDING * least)


def rounding_error(folder: Path, sequences: Sequence[Sequence[int]]) -> float:
    """Largest difference between the logprobs of transformers in float32 and in float64, in nats."""
    pairs = zip(
        eager_logprobs(folder, sequences, torch.float32), eager_logprobs(folder, sequences, torch.float64), strict=True
    )
    return max(float((rounded - exact).abs().max()) for rounded, exact in pairs)


MOSTLY_ROUNDING = 0.01
"""Smallest scale of the comparison of a gradient, as a share of the model's largest gradient. Smaller gradients are
sums of larger terms that cancel, so they are mostly rounding. For example, key biases do not affect attention."""


def tolerances_of(device: torch.device) -> Tolerances:
    """Tolerances for a device."""
    return TOLERANCES.get(device.type, TOLERANCES["cuda"])


def check_family(folder: Path, implementation: Implementation = "auto") -> tuple[NumericalCheck, ...]:
    """Compare a tiny model, such as `tiny_of_folder` writes, with transformers' eager forward pass, and packed
    sequences with separate ones. Everything is computed in float32 on this process's device, regardless of
    `model.dtype`.

    Raises:
        ModelError: The model cannot be trained.
    """
    policy = tiny_policy(folder, implementation)
    tolerances = tolerances_of(policy.device)
    sequences = draw_sequences(40, 17, 33)
    with exact_products():
        tolerance = logprob_tolerance(folder, sequences, tolerances.logprobs)
        return (
            NumericalCheck(
                "logprobs",
                "the trainer's logprobs against transformers' eager forward pass in float64",
                logprob_error(policy, folder, sequences),
                tolerance,
                "nats",
            ),
            NumericalCheck(
                "leakage",
                "logprobs of a sequence before and after the others in its row change",
                leakage(policy),
                tolerance,
                "nats",
            ),
            NumericalCheck(
                "gradients",
                "gradients of packed sequences against those of each sequence alone",
                packing_error(policy)[0],
                tolerances.gradients,
                "relative",
            ),
        )


def tiny_policy(folder: Path, implementation: Implementation = "auto") -> Policy:
    """Policy of a tiny model, in float32."""
    model = ModelConfig(path=str(folder), max_context=CONTEXT, implementation=implementation)
    return Policy(model, TrainingConfig(row_tokens=4 * CONTEXT, attention="document"), World())


@contextmanager
def exact_products() -> Generator[None]:
    """Make GPUs multiply float32 matrices in full precision during the block, even if the program allows TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def require_proved(folder: Path, implementation: Implementation) -> None:
    """Check a tiny model if the library's tests do not cover the family. This takes a second or two.

    Raises:
        ModelError: The family cannot be trained.
    """
    hf = read_hf_config(folder)
    if choose_implementation(hf, implementation).name == "torchtitan" or hf["model_type"] in PROVED:
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary, torch.random.fork_rng(devices=[]):
        found = check_family(tiny_of_folder(folder, Path(temporary) / "tiny"), "transformers")
    for comparison in found:
        if not comparison.holds:
            raise ModelError(
                f"{folder} is of model_type {hf['model_type']!r}, which cannot be trained: the check of a tiny "
                f"model failed with a difference of {comparison}"
            )


def draw_sequences(*lengths: int) -> list[list[int]]:
    """Draw random token ids.  # [num_sequences][length]"""
    rng = random.Random(0)
    return [[rng.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


def eager_logprobs(
    folder: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Compute the logprobs of each sequence's tokens after the first with transformers. The results are float64.  #
    [num_sequences][length - 1]

    Args:
        dtype: Dtype of the computation.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for sequence in sequences:
            token_ids = torch.tensor([sequence])
            logprobs = model(token_ids, use_cache=False).logits[0].log_softmax(-1).double()
            found.append(logprobs[:-1].gather(-1, token_ids[0, 1:, None])[:, 0])
    return found


def logprob_error(policy: Policy, folder: Path, sequences: Sequence[Sequence[int]]) -> float:
    """Largest difference between a policy's logprobs of packed sequences and transformers' logprobs of the separate
    sequences, in nats."""
    found = policy.score(sequences)
    expected = eager_logprobs(folder, sequences)
    return max(
        float((torch.tensor(own, dtype=torch.float64) - reference).abs().max())
        for own, reference in zip(found, expected, strict=True)
    )


def packing_error(policy: Policy) -> tuple[float, tuple[str, ...]]:
    """Compare the gradient of packed sequences, some of which share their prompt, with the sum of the gradients of the
    separate sequences. Return the largest relative difference, and the names of parameters without a gradient."""
    samples = _samples()
    packed = find_families(samples, 4 * CONTEXT)
    together = _gradients(policy, [packed])
    alone = _gradients(policy, [[Family((sample,))] for sample in samples], one_by_one=True)
    pairs = [(found, expected) for name, expected in alone.items() if (found := together[name]) is not None]
    trained = [(found, expected) for found, expected in pairs if expected is not None]
    frozen = tuple(name for name, expected in alone.items() if expected is None or together[name] is None)
    scales = [float(expected.abs().max()) for _, expected in trained]
    least = MOSTLY_ROUNDING * max(scales)
    errors = [
        float((found - expected).abs().max()) / max(scale, least)
        for (found, expected), scale in zip(trained, scales, strict=True)
    ]
    return max(errors), frozen


@torch.no_grad()
def leakage(policy: Policy) -> float:
    """Largest change of a sequence's logprobs when another sequence in its row changes, as a whole or after a shared
    prompt. It exceeds rounding only if the model carries a state from one packed sequence to the next."""
    samples = _samples()
    expected = _logprobs_by_sample(policy, samples)
    found: list[float] = []
    for index, changed in enumerate(samples):
        begin = changed.loss_mask.index(True) if changed.group_id == "shared" else 0
        ids = [*changed.token_ids[:begin], *((token + 1) % VOCABULARY for token in changed.token_ids[begin:])]
        others = [*samples[:index], replace(changed, token_ids=ids), *samples[index + 1 :]]
        pairs = zip(_logprobs_by_sample(policy, others), expected, strict=True)
        found += [float((new - old).abs().max()) for at, (new, old) in enumerate(pairs) if at != index]
    return max(found)


def _logprobs_by_sample(policy: Policy, samples: Sequence[TrainingSample]) -> list[torch.Tensor]:
    batch = make_tensor_batch([find_families(samples, 4 * CONTEXT)], policy.device, policy.lay_out)
    logprobs_N, _ = policy.logprobs(batch)
    numbers = [batch.rollout_ids.index(sample.rollout_id) for sample in samples]
    return [logprobs_N[batch.sequences_N == number] for number in numbers]


def _samples() -> list[TrainingSample]:
    prompt, *answers = draw_sequences(31, 9, 14, 11, 26, 19)
    shared = [[*prompt, *answer] for answer in answers[:3]]
    samples: list[TrainingSample] = []
    for index, ids in enumerate([*shared, *answers[3:]]):
        mask = [t >= (len(prompt) if index < 3 else 1) for t in range(len(ids))]
        zeros = [0.0] * len(ids)
        group = "shared" if index < 3 else str(index)
        samples.append(TrainingSample(group, str(index), ids, mask, zeros, zeros, [0] * len(ids), 1.0))
    return samples


def _gradients(policy: Policy, rows: list[list[Family]], *, one_by_one: bool = False) -> dict[str, torch.Tensor | None]:
    """Gradients of the sum of all logprobs, each weighted by its token id."""
    policy.model.zero_grad()
    for each in [[row] for row in rows] if one_by_one else [rows]:
        batch = make_tensor_batch(each, policy.device, policy.lay_out)
        logprobs_N, _ = policy.logprobs(batch)
        weights_N = (batch.targets_N % 7 - 3).to(logprobs_N.dtype)
        cast(Any, (logprobs_N * weights_N).sum()).backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    return found
