"""LoRA adapters in vLLM: loading in memory between two steps, reading back, and their computation on a CPU.

vLLM loads adapters from folders, ignores names that match no layer, and never reloads an adapter under the same id.
Here an adapter arrives as tensors, a name without a layer is an error, and a new version takes the place of the old one
under running requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.platforms import current_platform

from titan_rl.core.errors import StateDictError
from titan_rl.generation.engine import AdapterSpec, HeldTensor
from titan_rl.generation.vllm_held_weights import hf_name_of, parts_of
from titan_rl.generation.vllm_requests import VLLMRequests

PEFT_PREFIX = "base_model.model."


def request_of(adapter_id: int) -> LoRARequest:
    """The adapter as vLLM's requests name it. The path is never read: the adapter is always in memory."""
    return LoRARequest(lora_name=f"adapter-{adapter_id}", lora_int_id=adapter_id, lora_path="/in/memory")


def own_tensors(items: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Copies of the tensors: those of a transport are gone after the iteration, and vLLM scales B in place."""
    return {name: tensor.detach().clone() for name, tensor in items}


def load_adapter(worker: Any, adapter_id: int, tensors: Mapping[str, torch.Tensor], spec: AdapterSpec) -> None:
    """Put an adapter into a place of a worker's model, or replace the one with its id, which requests may be using.

    Args:
        tensors: A and B of each layer, by their Hugging Face names; see `titan_rl.training.models.lora`.

    Raises:
        StateDictError: a tensor belongs to no layer of the model, or lacks its other half. The worker is unchanged.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        adapter_id,
        {f"{PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()},
        PEFTHelper(r=spec.rank, lora_alpha=spec.alpha, target_modules=[]),  # pyright: ignore[reportArgumentType]
        device="cpu" if current_platform.is_cpu() else str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    layers = {part for path in manager.modules for part in manager.packed_modules.get(path, [path])}
    if unknown := sorted(lora.loras.keys() - layers):
        raise StateDictError(
            f"the adapter has {unknown[0]} and {len(unknown) - 1} more, and the engine's model has no such layers to "
            "adapt"
        )
    if torn := sorted(name for name, each in lora.loras.items() if each.lora_a is None or each.lora_b is None):
        raise StateDictError(f"the adapter has only one of the two matrices of {torn[0]} and {len(torn) - 1} more")
    manager.remove_adapter(adapter_id)
    manager.add_adapter(lora)
    manager.activate_adapter(adapter_id)
    _forget_joined(manager)


def load_empty_adapter(worker: Any, adapter_id: int, spec: AdapterSpec) -> None:
    """Put an adapter that changes nothing into a place of a worker's model."""
    manager = worker.model_runner.lora_manager._adapter_manager
    manager.add_adapter(manager.create_dummy_lora(adapter_id, spec.rank, {}))
    manager.activate_adapter(adapter_id)
    _forget_joined(manager)


def remove_adapter(worker: Any, adapter_id: int) -> None:
    """Free the place of an adapter that no request uses."""
    worker.model_runner.lora_manager._adapter_manager.remove_adapter(adapter_id)


def _forget_joined(manager: Any) -> None:
    for wrapper in manager.punica_wrapper_mapping.values():
        if isinstance(wrapper, GroupedPunica):
            wrapper.forget_joined()


def held_adapter(worker: Any, adapter_id: int, spec: AdapterSpec) -> list[HeldTensor]:
    """The matrices that a worker's model computes with, by their Hugging Face names.

    vLLM keeps B multiplied by alpha / rank. It is returned if that is a power of two, which division undoes exactly.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    place = manager.lora_index_to_id.index(adapter_id)
    is_exact = math.frexp(spec.scale)[0] == 0.5
    held: list[HeldTensor] = []
    for path, module in manager.modules.items():
        base, by_rows = module.base_layer, isinstance(module.base_layer, RowParallelLinear)
        whole = torch.empty((sum(module.output_slices), module.lora_a_stacked[0].shape[-1]), device="meta")
        for part, a_all, b_all in zip(parts_of(base, whole), module.lora_a_stacked, module.lora_b_stacked, strict=True):
            name = hf_name_of(path, part.index)
            a, b = a_all[place, 0, : spec.rank], b_all[place, 0, :, : spec.rank]
            a_start, a_whole = ((0, part.start), part.whole) if by_rows else ((0, 0), a.shape[1])
            held.append(HeldTensor(f"{name}.lora_A.weight", f"{path} (A)", a, a_start, (spec.rank, a_whole)))
            if is_exact:
                b_start, b_whole = ((0, 0), len(b)) if by_rows else ((part.start, 0), part.whole)
                held.append(
                    HeldTensor(f"{name}.lora_B.weight", f"{path} (B)", b / spec.scale, b_start, (b_whole, spec.rank))
                )
    return held


class AdapterVersions:
    """The versions of an adapter that an engine holds, each in a place of its own.

    With a single place each version replaces the one before it, under running requests. With several, a version stays
    until no request uses it. vLLM would evict the least recently used one silently.

    Args:
        core: vLLM's engine core.
        requests: Later requests use the newest version.
    """

    def __init__(self, core: Any, requests: VLLMRequests, spec: AdapterSpec) -> None:
        self._core, self._requests, self._spec = core, requests, spec
        self._held: dict[int, int | None] = {}  # vLLM's id -> version; None for the model without an adapter
        self._newest = 1
        core.collective_rpc(load_empty_adapter, args=(self._newest, spec))
        self._use(self._newest, None)

    def load(self, items: Iterable[tuple[str, Any]], version: int, in_use: Iterable[int]) -> None:
        """Load a version, which later requests use.

        Args:
            items: Pairs of `Engine.load_state_dict`.
            version: of the policy.
            in_use: vLLM's ids of the adapters of running requests.

        Raises:
            StateDictError: the tensors do not fit the model, or running requests use all places.
        """
        adapter_id = self._newest
        if self._spec.num_versions > 1:
            self._free(set(in_use))
            adapter_id += 1
            if len(self._held) >= self._spec.num_versions:
                versions = ", ".join("none" if held is None else str(held) for held in self._held.values())
                raise StateDictError(
                    f"version {version} of the adapter has no place: running requests use all "
                    f'{self._spec.num_versions}, with versions {versions}; set generation.adapter_swap = "hot"'
                )
        self._core.collective_rpc(load_adapter, args=(adapter_id, own_tensors(items), self._spec))
        self._use(adapter_id, version)

    def held(self) -> list[HeldTensor]:
        """The matrices of the newest version; see `held_adapter`."""
        (held,) = self._core.collective_rpc(held_adapter, args=(self._newest, self._spec))
        return held

    def _use(self, adapter_id: int, version: int | None) -> None:
        self._newest = adapter_id
        self._held[adapter_id] = version
        self._requests.adapter = request_of(adapter_id)

    def _free(self, in_use: set[int]) -> None:
        for adapter_id in [each for each in self._held if each not in in_use and each != self._newest]:
            self._core.collective_rpc(remove_adapter, args=(adapter_id,))
            del self._held[adapter_id]


MOST_JOINED_RANK = 64
"""Largest sum of ranks of a layer's parts for which their matrices are joined. B then has mostly zeros."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """Matrices of one layer and adapter, transposed, with those of fused parts joined."""

    a_IR: torch.Tensor
    b_RO: torch.Tensor


class GroupedPunica(PunicaWrapperCPU):
    """Computes adapters on a CPU with two matrix products for each layer and adapter of a batch.

    vLLM's own class gathers a copy of A and B for every token.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._groups: list[tuple[int, torch.Tensor | None]] = []  # (place, rows); None for all rows
        self._joined: dict[tuple[int, int], _Joined] = {}

    def forget_joined(self) -> None:
        """Note that the matrices of an adapter have changed."""
        self._joined.clear()

    def update_metadata(self, *args: Any, **options: Any) -> None:
        super().update_metadata(*args, **options)
        places_T = self.token_lora_indices
        found = torch.unique(places_T).tolist()
        if len(found) == 1:
            self._groups = [(found[0], None)] if found[0] >= 0 else []
        else:
            self._groups = [(place, torch.nonzero(places_T == place)[:, 0]) for place in found if place >= 0]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **options: Any,
    ) -> None:
        """Add each token's change to its output, in place.

        Args:
            y: Output of the base layer.  # [num_tokens, sum of output_slices]
            x: Input of the layer.  # [num_tokens, in]
            lora_a_stacked: of each part.  # [num_places, 1, rank, in]
            lora_b_stacked: of each part.  # [num_places, 1, out, rank]
            scale: Always 1: B is scaled when it is loaded.
            output_slices: Widths of the parts.
            buffer: Not used.
            options: Not used.
        """
        for place, rows in self._groups:
            joined = self._join(place, lora_a_stacked, lora_b_stacked)
            inputs = x if rows is None else x.index_select(0, rows)
            if joined is not None:
                if rows is None:
                    y.addmm_(inputs @ joined.a_IR, joined.b_RO)
                else:
                    y.index_add_(0, rows, inputs @ joined.a_IR @ joined.b_RO)
                continue
            offset = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                change = inputs @ a[place, 0].t() @ b[place, 0].t()
                part = y.narrow(1, offset, width)
                if rows is None:
                    part.add_(change)
                else:
                    part.index_add_(0, rows, change)
                offset += width

    def _join(
        self, place: int, lora_a_stacked: tuple[torch.Tensor, ...], lora_b_stacked: tuple[torch.Tensor, ...]
    ) -> _Joined | None:
        """The joined matrices of a layer; None if their ranks are too large for that."""
        if sum(a.shape[2] for a in lora_a_stacked) > MOST_JOINED_RANK * len(lora_a_stacked):
            return None
        key = (lora_a_stacked[0].data_ptr(), place)
        if (joined := self._joined.get(key)) is None:
            a_RI = torch.cat([a[place, 0] for a in lora_a_stacked])
            b_OR = torch.block_diag(*(b[place, 0] for b in lora_b_stacked))
            joined = self._joined[key] = _Joined(a_RI.t().contiguous(), b_OR.t().contiguous())
        return joined


def group_tokens() -> None:
    """Have vLLM compute adapters on a CPU with `GroupedPunica`. Called before an engine is made."""
    name = f"{GroupedPunica.__module__}.{GroupedPunica.__qualname__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: name)  # pyright: ignore[reportAttributeAccessIssue]
