"""Weights that wait in the host's memory, and are on the device only while they are computed with."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class HostWeights:
    """Keeps the weights of a model that is not trained on the host; its memory on the device is given back.

    One rank alone brings them a layer at a time. Where ranks hold parts of them, each brings its part for the pass:
    FSDP gathers from it in streams of its own, a layer at a time.

    Args:
        by_layer: bring them a layer at a time.
    """

    def __init__(self, model: Any, *, by_layer: bool) -> None:
        self._model = model
        self._layers = [_Weights(model.parameters())]
        if by_layer:
            modules: list[nn.Module] = [model.tok_embeddings, *model.layers.values(), model.norm, model.lm_head]
            self._layers = [_Weights(module.parameters()) for module in modules]
            for module, weights in zip(modules, self._layers, strict=True):
                module.register_forward_pre_hook(lambda *_, weights=weights: weights.bring())
                module.register_forward_hook(lambda *_, weights=weights: weights.release(), always_call=True)
        self._by_layer = by_layer
        self._release()

    @contextmanager
    def brought(self) -> Generator[None]:
        """Within the block the model can compute."""
        if self._by_layer:
            yield
            return
        (weights,) = self._layers
        weights.bring()
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # it keeps the last layers gathered
        for weights in self._layers:
            weights.release()


class _Weights:
    """The memory of some parameters, here and on the host."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # (here, on the host)

    def bring(self) -> None:
        for here, host in self._kept.values():
            if not here.nbytes():
                here.resize_(host.nbytes())
                here.copy_(host, non_blocking=True)

    def release(self) -> None:
        # FSDP may have padded them since, into memory of their own.
        there = {storage._cdata: storage for storage in map(_storage, self._parameters)}
        self._kept = {key: self._kept.get(key) or (here, _copied(here)) for key, here in there.items()}
        for here, _ in self._kept.values():
            here.resize_(0)


def _storage(parameter: nn.Parameter) -> torch.UntypedStorage:
    own = parameter.data
    return (own.to_local() if isinstance(own, DTensor) else own).untyped_storage()


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    pin = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin).untyped_storage()
    return host.copy_(storage, non_blocking=False)
