"""Readback: the weights that an engine holds are compared with the published ones, on one rank and on several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the cpu or gpu extra")

import torch

from titan_rl.core.errors import VerificationError
from titan_rl.core.tensor_checksum import TensorChecksum, box_checksum
from titan_rl.generation.engine import HeldTensor
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.generation.types import compare, describe, read_back
from titan_rl.types import SamplingParams

Weights = dict[str, torch.Tensor]


def weights(version: int) -> Weights:
    chance = torch.Generator().manual_seed(version)
    return {"embed": torch.randn(6, 8, generator=chance), "layers.0.q": torch.randn(8, 8, generator=chance)}


def checksums(tensors: Weights) -> dict[str, TensorChecksum]:
    return {
        name: TensorChecksum(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), box_checksum(tensor))
        for name, tensor in tensors.items()
    }


class Forgetful(ScriptedEngine):
    """Engine that keeps the old values of tensors whose names contain `forgets`."""

    forgets = "\0"

    def load_state_dict(self, items: Iterable[tuple[str, Any]], version: int) -> None:
        old = self.state_dict
        loaded = [(name, old.get(name, tensor) if self.forgets in name else tensor) for name, tensor in items]
        super().load_state_dict(loaded, version)


class Unreadable(ScriptedEngine):
    held_weights: Any = None


class Sharded(ScriptedEngine):
    """Engine of a rank that holds the given boxes of tensors."""

    def __init__(self, boxes: list[HeldTensor]) -> None:
        super().__init__()
        self.boxes = boxes

    def held_weights(self) -> list[HeldTensor]:
        return self.boxes


def held(name: str, whole: torch.Tensor, rows: slice, parameter: str = "") -> HeldTensor:
    return HeldTensor(name, parameter or name, whole[rows], (rows.start, 0), tuple(whole.shape))


async def test_stale_tensor_fails_the_pull_until_the_next_one() -> None:
    engine = Forgetful()
    loop = EngineLoop(lambda: engine)
    await loop.start()

    def pull(version: int) -> Any:
        return loop.pull(version, lambda: weights(version).items(), published=checksums(weights(version)))

    result = await pull(1)
    assert result.readback is not None
    assert result.readback.unread == ()
    for part in ("", "embed", "layers.0."):
        engine.forgets = part
        with pytest.raises(VerificationError, match="does not hold the weights of version 2"):
            await pull(2)
        engine.forgets = "\0"
        assert (await pull(2)).readback.unread_share == 0
        engine.load_state_dict(weights(1).items(), 1)
    await pull(2)
    assert (await loop.generate([1, 2], request_id="a", sampling=SamplingParams(max_tokens=2))).token_ids
    await loop.close()


async def test_unreadable_engine_has_no_readback() -> None:
    loop = EngineLoop(Unreadable)
    await loop.start()
    result = await loop.pull(1, lambda: weights(1).items(), published=checksums(weights(1)))
    assert result.readback is None
    result = await loop.pull(2, lambda: weights(2).items())  # nothing was published to compare with
    assert result.readback is None
    await loop.close()


def test_parts_held_by_several_ranks_are_compared_together() -> None:
    whole = weights(1)
    published = checksums(whole)
    ranks = [
        Sharded([held("embed", whole["embed"], slice(0, 3)), held("layers.0.q", whole["layers.0.q"], slice(0, 5))]),
        Sharded([held("embed", whole["embed"], slice(3, 6)), held("layers.0.q", whole["layers.0.q"], slice(5, 8))]),
    ]
    assert compare(published, [read_back(rank, published) for rank in ranks], 1).unread == ()

    old = weights(0)
    ranks[1].boxes[1] = held("layers.0.q", old["layers.0.q"], slice(5, 8))
    with pytest.raises(VerificationError, match=r"1 of its tensors differ from what was published: layers\.0\.q"):
        compare(published, [read_back(rank, published) for rank in ranks], 1)


def test_every_copy_of_a_part_must_match() -> None:
    whole = weights(1)
    published = checksums({"embed": whole["embed"]})
    right, stale = held("embed", whole["embed"], slice(0, 6)), held("embed", weights(0)["embed"], slice(0, 6))
    one, other = Sharded([right]), Sharded([stale])
    for ranks in ((one, other), (other, one)):
        with pytest.raises(VerificationError, match="embed"):
            compare(published, [read_back(rank, published) for rank in ranks], 1)


def test_each_parameter_that_holds_a_tensor_is_checked() -> None:
    whole = weights(1)
    published = checksums({"embed": whole["embed"]})
    engine = Sharded([
        held("embed", whole["embed"], slice(0, 6)), held("embed", weights(0)["embed"], slice(0, 6), "lm_head")
    ])  # fmt: skip
    with pytest.raises(VerificationError, match="embed in lm_head"):
        compare(published, [read_back(engine, published)], 1)


def test_missing_or_lower_precision_tensors_are_unread() -> None:
    whole = weights(1)
    published = checksums(whole)
    engine = Sharded([
        held("embed", whole["embed"], slice(0, 5)),  # a row is missing
        HeldTensor("layers.0.q", "q", whole["layers.0.q"].bfloat16(), (0, 0), (8, 8)),
    ])  # fmt: skip
    readback = compare(published, [read_back(engine, published)], 1)
    assert readback.unread == ("embed", "layers.0.q")
    assert readback.unread_share == 1
    assert "2 tensors, 100.0% of the weights, were not read back: embed, layers.0.q" in describe(readback)


def test_tensor_held_in_a_wider_dtype_is_read() -> None:
    whole = {"gate": weights(1)["embed"].bfloat16()}
    engine = Sharded([HeldTensor("gate", "gate", whole["gate"].float(), (0, 0), (6, 8))])
    assert compare(checksums(whole), [read_back(engine, checksums(whole))], 1).unread == ()
