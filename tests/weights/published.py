"""Tensors that tests of transports publish, and a state machine that publishes and releases in any order."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from titan_rl.weights.types import Manifest

Weights = dict[str, torch.Tensor]


def weights(version: int, size: int = 1000) -> Weights:
    return {"a": torch.full((size,), float(version)), "b": torch.arange(6.0).reshape(2, 3) + version}


def assert_equal(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


class PublishedVersions(RuleBasedStateMachine):
    """State machine of versions of any size. The last two can be pulled unless released.

    Args:
        transport: Transport that keeps two versions.
    """

    def __init__(self, transport: Any) -> None:
        super().__init__()
        self.transport = transport
        self.manifests: list[Manifest] = []
        self.contents: list[Weights] = []
        self.available: list[int] = []  # indices into manifests

    def publish_next(self, content: Weights) -> None:
        version = len(self.manifests)
        self.manifests.append(self.transport.publish(version, content.items()))
        self.contents.append(content)
        self.available = [*self.available, version][-2:]

    def drawn(self, data: st.DataObject) -> int:
        """Draw any published version."""
        return data.draw(st.integers(0, len(self.manifests) - 1))

    @precondition(lambda self: self.manifests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        version = self.drawn(data)
        self.transport.release(version)
        self.available = [other for other in self.available if other != version]
