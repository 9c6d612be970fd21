"""Weights that wait in the host's memory, and are on the device only while they are computed with."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class HostWeights:
    """Keeps the weights of a model that is not trained on the host; their memory on the device is given back.

    Args:
        by_layer: bring them a layer at a time. Ranks that hold parts of them bring theirs for the whole pass: FSDP
            gathers from it in streams of its own, a layer at a time.
    """

    def __init__(self, model: Any, *, by_layer: bool) -> None:
        self._model = model
        self._by_layer = by_layer
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # (on the device, on the host)
        if by_layer:
            for module in (model.tok_embeddings, *model.layers.values(), model.norm, model.lm_head):
                module.register_forward_pre_hook(self._bring)
                module.register_forward_hook(self._release, always_call=True)
        self._release(model)

    @contextmanager
    def brought(self) -> Generator[None]:
        """Within the block the model can compute."""
        if self._by_layer:
            yield
            return
        self._bring(self._model)
        try:
            yield
        finally:
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # it would keep the last layers gathered
            self._release(self._model)
            self._kept = {storage._cdata: self._kept[storage._cdata] for storage in _storages(self._model)}

    def _bring(self, module: nn.Module, *_: Any) -> None:
        for storage in _storages(module):
            host = self._kept[storage._cdata][1]
            if not storage.nbytes():
                storage.resize_(host.nbytes())
                storage.copy_(host, non_blocking=True)

    def _release(self, module: nn.Module, *_: Any) -> None:
        for storage in _storages(module):
            if storage._cdata not in self._kept:  # FSDP has moved the parameter in its first pass, to pad it
                self._kept[storage._cdata] = (storage, _on_host(storage))
            storage.resize_(0)


def _storages(module: nn.Module) -> list[torch.UntypedStorage]:
    """Of what this rank has of the parameters."""
    held = (parameter.data for parameter in module.parameters())
    return [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in held]


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    pin = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin).untyped_storage()
    return host.copy_(storage, non_blocking=False)
