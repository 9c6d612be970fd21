"""CompactAdam compared with torch's Adam in float32, within the errors stated in the docs."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from titan_rl.training.choices import StateDType
from titan_rl.training.optimizer.optimizers import (
    CompactAdam,
    decode_signed,
    decode_square,
    encode_signed,
    encode_square,
    rounded,
)
from titan_rl.training.settings import TrainingConfig

SHAPES = ((64, 48), (4, 16, 24), (48,))
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.1


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    """Gradients whose rows differ by orders of magnitude and contain many zeros."""
    generator = torch.Generator().manual_seed(step)
    found: list[torch.Tensor] = []
    for shape in SHAPES:
        scale = torch.logspace(-6, 0, shape[0]).view(-1, *[1] * (len(shape) - 1))
        kept = torch.rand(shape, generator=generator) < 0.8
        found.append((torch.randn(shape, generator=generator) + 0.5) * scale * kept)
    return found


def run(optimizer: torch.optim.Optimizer, steps: range) -> None:
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        for parameter, gradient in zip(owned, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def compact(
    trained: list[nn.Parameter],
    state_dtype: StateDType = "float32",
    *,
    lr: float = 1e-3,
    decoupled: bool = True,
    offload: bool = False,
) -> CompactAdam:
    return CompactAdam(
        trained,
        lr=lr,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        decoupled=decoupled,
        state_dtype=state_dtype,
        offload=offload,
    )


def moved(trained: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([(a.float() - b).flatten() for a, b in zip(trained, parameters(), strict=True)]).detach()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_float32_compact_adam_matches_torch(decoupled: bool, offload: bool) -> None:
    trained, expected = parameters(), parameters()
    run(compact(trained, decoupled=decoupled, offload=offload), range(20))
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    run(theirs(expected, lr=1e-3, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY), range(20))
    for found, reference in zip(trained, expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("state_dtype", "error"), [("bfloat16", 0.01), ("int8", 0.08)])
def test_low_precision_moments_match_float32_within_documented_error(state_dtype: StateDType, error: float) -> None:
    trained, expected = parameters(), parameters()
    run(compact(trained, state_dtype), range(300))
    run(compact(expected), range(300))
    difference = (moved(trained) - moved(expected)).norm() / moved(expected).norm()
    assert difference < error
    along = torch.dot(moved(trained), moved(expected)) / moved(expected).square().sum()
    assert along == pytest.approx(1, abs=0.02), "noise in the second moment makes steps 1% longer"


def test_bfloat16_weights_accumulate_updates_below_half_an_ulp() -> None:
    lr = 1e-5  # an ulp of a number near 1 is 2^-8
    trained, expected = parameters(torch.bfloat16), parameters()
    start = [parameter.detach().float() for parameter in trained]
    run(compact(trained, lr=lr), range(400))
    run(compact(expected, lr=lr), range(400))
    found = torch.cat([(a.float() - b).flatten() for a, b in zip(trained, start, strict=True)]).detach()
    along = torch.dot(found, moved(expected)) / moved(expected).square().sum()
    assert along == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_resumed_state_continues_bitwise_identically(state_dtype: StateDType, dtype: torch.dtype) -> None:
    whole = parameters(dtype)
    run(compact(whole, state_dtype), range(10))
    first = parameters(dtype)
    optimizer = compact(first, state_dtype, offload=True)
    run(optimizer, range(5))
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = compact(second, state_dtype, lr=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    for kept, mine in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert {name: tensor.dtype for name, tensor in kept.items()} == {n: t.dtype for n, t in mine.items()}
    run(resumed, range(5, 10))
    assert all(torch.equal(found, expected) for found, expected in zip(second, whole, strict=True))


def test_moments_use_the_documented_bytes_per_parameter() -> None:
    matrix = [nn.Parameter(torch.zeros(64, 1024))]
    for state_dtype, most in (("float32", 8.01), ("bfloat16", 4.01), ("int8", 2.02)):
        optimizer = compact(matrix, state_dtype)  # pyright: ignore[reportArgumentType]
        matrix[0].grad = torch.ones_like(matrix[0])
        optimizer.step()
        assert sum(tensor.nbytes for tensor in optimizer.state[matrix[0]].values()) / matrix[0].numel() <= most


def test_8bit_codes_are_unbiased_and_preserve_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.logspace(-4, 0, 33).repeat(2000, 1)
    exact[:, ::2] *= -1
    scale = exact.abs().amax(-1, keepdim=True)
    signed = decode_signed(encode_signed(exact, scale, generator), scale)
    square = decode_square(encode_square(exact.abs() ** 2, scale**2, generator), scale**2)
    for found, expected in ((signed, exact), (square, exact**2)):
        assert ((found - expected).abs() <= 0.0906 * expected.abs() * (1 + 1e-4)).all(), (
            "codes are spaced by a factor of 2^(1/8)"
        )
        torch.testing.assert_close(found.mean(0), expected[0], rtol=4e-3, atol=0)
    zeros, ones = torch.zeros(3, 4), torch.ones(3, 1)
    assert not decode_signed(encode_signed(zeros, ones, generator), ones).any()
    assert not decode_square(encode_square(zeros, ones, generator), ones).any()
    assert not decode_signed(encode_signed(zeros, 0 * ones, generator), 0 * ones).any()
    tiny = torch.full((3, 4), 1e-30)
    assert (decode_square(encode_square(tiny, ones, generator), ones) > 0).all(), (
        "a tiny second moment must not become 0"
    )


def test_stochastic_rounding_is_unbiased_and_keeps_bfloat16_values() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(exact, generator).float(), exact)
    between = torch.tensor([1 + 1 / 1024, -3.1415927]).repeat(100_000, 1)
    torch.testing.assert_close(rounded(between, generator).float().mean(0), between[0], rtol=2e-4, atol=0)


@pytest.mark.parametrize(
    "given", [{"optimizer_dtype": "int8"}, {"offload": ["optimizer"]}, {"offload": ["parameters"]}]
)
@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_rejects_moment_settings_for_optimizers_that_ignore_them(given: dict[str, object], optimizer: str):
    with pytest.raises(ValidationError, match="only adamw and adam support it"):
        TrainingConfig.model_validate({"optimizer": optimizer, **given})
