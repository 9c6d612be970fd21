"""LoRA adapters in vLLM: loading in memory between two steps, reading back, and their computation on a CPU.

vLLM loads adapters from folders, ignores names that match no layer, and never reloads an adapter under the same id. In
this module an adapter arrives as tensors, a name without a layer is an error, and a new version replaces the old one
while requests are running.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm._custom_ops as ops
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe import layer as fused_moe_layer
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.platforms import current_platform

from titan_rl.core.errors import GenerationError, StateDictError
from titan_rl.generation.engine import AdapterSpec, HeldTensor
from titan_rl.generation.vllm_held_weights import hf_name_of, parts_of
from titan_rl.generation.vllm_requests import VLLMRequests


def request_of(adapter_id: int) -> LoRARequest:
    """The adapter as named in vLLM's requests. The path is never read, because the adapter is always in memory."""
    return LoRARequest(lora_name=f"adapter-{adapter_id}", lora_int_id=adapter_id, lora_path="/in/memory")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Matrix A or B of one layer, or this rank's box of it, in the memory that a worker computes with."""

    name: str  # Hugging Face name of the matrix
    parameter: str  # the engine's parameter
    held: torch.Tensor
    start: tuple[int, int]  # position of the box's first element
    global_shape: tuple[int, int]
    scale: float  # factor by which vLLM expects the matrix to be multiplied


PLAIN_LAYERS = (QKVParallelLinear, MergedColumnParallelLinear, ColumnParallelLinear, RowParallelLinear)
"""Base layers whose computation is that of their `quant_method`. Others keep vLLM's own computation."""


def fill_slots(worker: Any, num_slots: int, rank: int) -> None:
    """Fill all of vLLM's adapter slots with adapters that change nothing, with the ids 1, 2, and so on.

    Args:
        worker: vLLM's worker.
        num_slots: Number of slots.
        rank: Largest rank of an adapter. The matrices of a smaller one take the first rows of a slot.
    """
    manager = _manager_of(worker)
    for adapter_id in range(1, num_slots + 1):
        manager.add_adapter(manager.create_dummy_lora(adapter_id, rank, {}))
        manager.activate_adapter(adapter_id)
    for module in manager.modules.values():
        if isinstance(batch := module.punica_wrapper, GroupedPunica) and type(module.base_layer) in PLAIN_LAYERS:
            batch.layers.append(GroupedLayer(module, batch))


def load_adapter(worker: Any, adapter_id: int, items: Iterable[tuple[str, Any]], spec: AdapterSpec) -> None:
    """Write an adapter into a slot, even if running requests use the previous version in it.

    vLLM's own loading ignores names that match no layer, and takes several times as long.

    Args:
        worker: vLLM's worker.
        adapter_id: vLLM's id of the slot.
        items: Matrices A and B of each layer, by their Hugging Face names; see `titan_rl.training.models.lora`.
        spec: Rank, scale and layers of the adapter.

    Raises:
        StateDictError: a tensor belongs to no layer of the model, has another shape, or lacks its other half. The
            content of the slot is then unknown.
    """
    manager = _manager_of(worker)
    matrices = {matrix.name: matrix for matrix in _matrices(manager, adapter_id, spec)}
    given: set[str] = set()
    for name, tensor in items:
        matrix = matrices.get(name)
        if matrix is None:
            raise StateDictError(f"the adapter has {name}, but the engine's model has no such layer to adapt")
        if tuple(tensor.shape) != matrix.global_shape:
            raise StateDictError(
                f"{name} of the adapter has shape {tuple(tensor.shape)}; the engine's model needs {matrix.global_shape}"
            )
        box = zip(matrix.start, matrix.held.shape, strict=True)
        matrix.held.copy_(tensor.detach()[tuple(slice(first, first + size) for first, size in box)])
        if matrix.scale != 1:
            matrix.held.mul_(matrix.scale)
        given.add(name)
    for name in matrices.keys() - given:
        matrices[name].held.zero_()
    halves = Counter(name.rpartition(".lora_")[0] for name in given)
    if torn := sorted(name for name, count in halves.items() if count == 1):
        raise StateDictError(f"the adapter has only one of the two matrices of {torn[0]} and {len(torn) - 1} more")
    for wrapper in manager.punica_wrapper_mapping.values():
        for layer in getattr(wrapper, "layers", ()):
            layer.forget_changes()


def held_adapter(worker: Any, adapter_id: int, spec: AdapterSpec) -> list[HeldTensor]:
    """The matrices that a worker's model computes with, by their Hugging Face names.

    vLLM keeps B multiplied by alpha / rank. It is returned if that is a power of two, which division undoes exactly.
    """
    is_exact = math.frexp(spec.scale)[0] == 0.5
    return [
        HeldTensor(each.name, each.parameter, each.held / each.scale, each.start, each.global_shape)
        for each in _matrices(_manager_of(worker), adapter_id, spec)
        if is_exact or each.scale == 1
    ]


def _manager_of(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager


def _matrices(manager: Any, adapter_id: int, spec: AdapterSpec) -> Iterator[_Matrix]:
    slot = manager.lora_index_to_id.index(adapter_id)
    for path, module in manager.modules.items():
        by_rows = isinstance(module.base_layer, RowParallelLinear)
        weight = torch.empty((sum(module.output_slices), module.lora_a_stacked[0].shape[-1]), device="meta")
        parts = parts_of(module.base_layer, weight)
        for part, a_all, b_all in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            name, rank = hf_name_of(path, part.index), spec.rank
            a, b = a_all[slot, 0, :rank], b_all[slot, 0, :, :rank]
            a_start, a_width = ((0, part.start), part.global_size) if by_rows else ((0, 0), a.shape[1])
            b_start, b_height = ((0, 0), len(b)) if by_rows else ((part.start, 0), part.global_size)
            yield _Matrix(f"{name}.lora_A.weight", f"{path} (A)", a, a_start, (rank, a_width), 1.0)
            yield _Matrix(f"{name}.lora_B.weight", f"{path} (B)", b, b_start, (b_height, rank), spec.scale)


class AdapterVersions:
    """The versions of an adapter that an engine holds, each in a separate slot. Made by `make_adapters`.

    With a single slot, each version replaces the previous one while requests are running. With several slots, a
    version stays until no request uses it and a later version needs its slot. vLLM would silently evict the least
    recently used one.

    Args:
        core: vLLM's engine core.
        requests: Requests of the engine. Later requests of the adapter use its newest version.
        name: Name of the adapter.
        spec: Rank, scale and layers of the adapter, and its number of slots.
        first_id: vLLM's id of the adapter's first slot; the others follow.
    """

    def __init__(self, core: Any, requests: VLLMRequests, name: str, spec: AdapterSpec, first_id: int) -> None:
        self._core, self._requests, self._name, self._spec = core, requests, name, spec
        slots = range(first_id, first_id + spec.num_versions)
        self._versions: dict[int, int | None] = dict.fromkeys(slots)  # version in each slot, by vLLM's id
        self._newest = first_id
        self.pinned: int | None = None  # version that is kept in addition to the newest, if it is loaded
        requests.adapters[name] = request_of(self._newest)

    def load(self, items: Iterable[tuple[str, Any]], version: int, in_use: Collection[int]) -> None:
        """Load a version, which later requests use.

        Args:
            items: (name, tensor) pairs of `Engine.load_state_dict`.
            version: Version of the policy.
            in_use: vLLM's ids of the adapters of running requests.

        Raises:
            StateDictError: the tensors do not fit the model, or running requests use all slots.
        """
        if self._spec.num_versions > 1:
            free = [
                each
                for each, held in self._versions.items()
                if each not in in_use and each != self._newest and (held is None or held != self.pinned)
            ]
            if not free:
                held = ", ".join("none" if each is None else str(each) for each in self._versions.values())
                raise StateDictError(
                    f"version {version} of the adapter has no place: running requests use all "
                    f'{self._spec.num_versions}, with versions {held}; set generation.adapter_swap = "hot"'
                )
            self._newest = free[0]
        self._versions[self._newest] = None  # until it is loaded completely
        self._core.collective_rpc(load_adapter, args=(self._newest, items, self._spec))
        self._versions[self._newest] = version
        self._requests.adapters[self._name] = request_of(self._newest)

    def request_for(self, version: int) -> LoRARequest:
        """The adapter of a version as named in vLLM's requests.

        Raises:
            GenerationError: the version is not loaded.
        """
        for adapter_id, held in self._versions.items():
            if held == version:
                return request_of(adapter_id)
        raise GenerationError(
            f"version {version} of the adapter is not loaded; loaded are {list(self._versions.values())}"
        )

    def held(self) -> list[HeldTensor]:
        """The matrices of the newest version; see `held_adapter`."""
        (held,) = self._core.collective_rpc(held_adapter, args=(self._newest, self._spec))
        return held


def make_adapters(core: Any, requests: VLLMRequests, specs: Mapping[str, AdapterSpec]) -> dict[str, AdapterVersions]:
    """Make the slots of all adapters of an engine, by their names."""
    rank, num_slots = max(spec.rank for spec in specs.values()), sum(spec.num_versions for spec in specs.values())
    core.collective_rpc(fill_slots, args=(num_slots, rank))
    made: dict[str, AdapterVersions] = {}
    first_id = 1
    for name, spec in specs.items():
        made[name] = AdapterVersions(core, requests, name, spec, first_id)
        first_id += spec.num_versions
    return made


MOST_JOINED_RANK = 64
"""Largest rank for which the matrices of fused parts are joined. Most of the joined B is zeros."""


class GroupedPunica(PunicaWrapperCPU):
    """The adapters of the tokens of a batch, grouped. vLLM's class gathers a copy of A and B for every token.

    Attributes:
        groups: Place of each adapter, with the tokens of the batch that use it; None stands for all tokens.
        layers: Layers of the model, once `fill_slots` has made them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.groups: list[tuple[int, torch.Tensor | None]] = []
        self.layers: list[GroupedLayer] = []

    def update_metadata(self, *args: Any, **options: Any) -> None:
        super().update_metadata(*args, **options)
        slots_T = self.token_lora_indices
        found = torch.unique(slots_T).tolist()
        if len(found) == 1:
            self.groups = [(found[0], None)] if found[0] >= 0 else []
        else:
            self.groups = [(slot, torch.nonzero(slots_T == slot)[:, 0]) for slot in found if slot >= 0]


@dataclass(frozen=True, slots=True)
class _Change:
    """Change of some columns of a layer's output: x A^T B^T.

    The products are those of vLLM's own linear layers on a CPU (oneDNN). Unlike torch's, they compute a row in the same
    way whatever the number of rows, so that a token's logprob does not depend on the rest of its batch.
    """

    a: Any  # [in, rank], packed
    b: Any  # [rank, width], packed
    offset: int
    width: int

    @classmethod
    def of(cls, a_RI: torch.Tensor, b_OR: torch.Tensor, offset: int) -> _Change:
        a, b = (ops.create_onednn_mm(matrix.contiguous().t()) for matrix in (a_RI, b_OR))
        return cls(a, b, offset, len(b_OR))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:  # [num_tokens, in] -> [num_tokens, width]
        return ops.onednn_mm(self.b, ops.onednn_mm(self.a, inputs, None), None)


class GroupedLayer:
    """Computes one layer and its adapters on a CPU, with two matrix products for each adapter of a batch.

    Args:
        module: vLLM's layer with adapters, whose method `apply` is replaced.
        batch: Adapters of the tokens of the present batch.
    """

    def __init__(self, module: Any, batch: GroupedPunica) -> None:
        self._base, self._batch = module.base_layer, batch
        self._apply = module.base_layer.quant_method.apply
        self._a_stacked, self._b_stacked = module.lora_a_stacked, module.lora_b_stacked
        self._changes: dict[int, list[_Change]] = {}  # by slot
        module.apply = self

    def forget_changes(self) -> None:
        """Note that the matrices of an adapter have changed."""
        self._changes.clear()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Output of the base layer plus the change by each token's adapter.

        Args:
            x: Input of the layer.  # [num_tokens, in]
            bias: Bias of the base layer.  # [out]

        Returns:
            [num_tokens, out]
        """
        y = self._apply(self._base, x, bias)
        for slot, rows in self._batch.groups:
            if (changes := self._changes.get(slot)) is None:
                changes = self._changes[slot] = self._changes_of(slot)
            inputs = x if rows is None else x.index_select(0, rows)
            for change in changes:
                part = y.narrow(1, change.offset, change.width)
                if rows is None:
                    part.add_(change(inputs))
                else:
                    part.index_add_(0, rows, change(inputs))
        return y

    def _changes_of(self, slot: int) -> list[_Change]:
        """The change of all fused parts at once or, if their rank is too large for that, of each."""
        pairs = [(a[slot, 0], b[slot, 0]) for a, b in zip(self._a_stacked, self._b_stacked, strict=True)]
        if len(pairs[0][0]) <= MOST_JOINED_RANK:
            return [_Change.of(torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs)), 0)]
        starts = itertools.accumulate((len(b) for _, b in pairs), initial=0)
        return [_Change.of(a, b, start) for (a, b), start in zip(pairs, starts, strict=False)]


_FusedMoEConfig: Any = fused_moe_layer.FusedMoEConfig


def _config_without_adapters(**options: Any) -> Any:
    return _FusedMoEConfig(**options | {"is_lora_enabled": False})


def prepare_cpu_adapters() -> None:
    """Make vLLM compute adapters on a CPU with `GroupedPunica`, and experts of a mixture as if there were no adapters:
    experts have none, and vLLM's kernels for experts with adapters need a GPU. Called before an engine is made."""
    fused_moe_layer.FusedMoEConfig = _config_without_adapters  # pyright: ignore[reportAttributeAccessIssue]
    name = f"{GroupedPunica.__module__}.{GroupedPunica.__qualname__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: name)  # pyright: ignore[reportAttributeAccessIssue]
