"""Full training state on disk, written while training continues, and read back on any number of ranks.

A checkpoint's folder:

    rank-0.safetensors   rank 0's slices of parameters, optimizer state and random state, with their positions
    state.json           the version, the values in the optimizers' state that are not tensors, and the settings of an
                         adapter
    checksums.json       checksums of all other files

Reading a checkpoint executes no code, and reads only the requested slices.
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.utils._pytree import MappingKey, tree_flatten_with_path, tree_map_with_path

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import CheckpointError, DamagedCheckpointError, NoSpaceError
from titan_rl.training.parallel import World, local_slice, owned_slice
from titan_rl.training.settings import AdapterConfig
from titan_rl.training.state.checkpoint import (
    FileChecksum,
    SummingWriter,
    WriteProgress,
    atomic_directory,
    read_checksums,
    temporary_of,
    unwritten,
    verify,
    write_checksums,
    write_summed,
)
from titan_rl.weights.types import SlicePosition, TensorSlice

SUFFIX = ".safetensors"

_POSITIONS = "places"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_slices(path: Path, slices: Mapping[str, TensorSlice], progress: WriteProgress | None = None) -> FileChecksum:
    """Write slices of tensors to a file that `TensorFiles` can read; see `write_tensors`."""
    positions = {name: [each.position.start, each.position.global_shape] for name, each in slices.items()}
    tensors = {name: each.tensor for name, each in slices.items()}
    return write_tensors(path, tensors, tensors.items(), {_POSITIONS: json.dumps(positions)}, progress)


def write_tensors(
    path: Path,
    layout: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
    progress: WriteProgress | None = None,
) -> FileChecksum:
    """Write a safetensors file of tensors on any device, copying one tensor at a time.

    Args:
        layout: Dtypes and shapes of the tensors. It may consist of tensors without memory.
        tensors: Names and tensors, in the order of the layout.
        progress: Counter of the written bytes.

    Raises:
        OSError: The disk is full, or the file cannot be written.
        TypeError: The format does not support the dtype of a tensor.
        ValueError: The tensors are not those of the layout.
    """
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in layout.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold")
        end = position + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [position, end]}
        position = end
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        writer = SummingWriter(file, progress or WriteProgress())
        writer.write(memoryview(len(text).to_bytes(8, "little") + text))
        for (name, tensor), (expected, planned) in zip(tensors, layout.items(), strict=True):
            if (name, tensor.dtype, tensor.shape) != (expected, planned.dtype, planned.shape):
                raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} is written in place of {expected}")
            if tensor.numel():
                data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                writer.write(memoryview(data))
        return writer.close()


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice of a tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    position: SlicePosition


class TensorFiles:
    """Tensors of several files, each joined from its slices.

    Raises:
        DamagedCheckpointError: A file was not written by `write_slices`, or is damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._slices: dict[str, list[StoredSlice]] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    positions = parse_json(file.metadata()[_POSITIONS])
                    for name, (start, global_shape) in positions.items():
                        position = SlicePosition(tuple(start), tuple(global_shape))
                        stored = StoredSlice(path, tuple(file.get_slice(name).get_shape()), position)
                        self._slices.setdefault(name, []).append(stored)
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error

    @property
    def names(self) -> set[str]:
        return set(self._slices)

    def has_dtype(self, prefix: str, dtype: str) -> bool:
        """Whether the first tensor with this name prefix has a dtype, given by its name in the files."""
        name = next((name for name in self._slices if name.startswith(prefix)), None)
        if name is None:
            return False
        with safe_open(self._slices[name][0].path, framework="pt") as file:
            return file.get_slice(name).get_dtype() == dtype

    def read(self, wanted: Mapping[str, TensorSlice]) -> None:
        """Fill slices in place. The files may have sliced the tensors differently.

        Raises:
            ValueError: A tensor is incomplete, or its shape or dtype is not that of the wanted one.
        """
        by_path: dict[Path, list[tuple[str, StoredSlice]]] = {}
        for name, target in wanted.items():
            covered = 0
            for stored in self._slices.get(name, []):
                if stored.position.global_shape != target.position.global_shape:
                    raise ValueError(
                        f"{name} has shape {stored.position.global_shape}; this trainer's has "
                        f"{target.position.global_shape}"
                    )
                if size := _common(stored, target)[2]:
                    covered += size
                    by_path.setdefault(stored.path, []).append((name, stored))
            if covered != target.tensor.numel():
                raise ValueError(f"{name} is incomplete: {covered} of {target.tensor.numel()} elements were found")
        for path, parts in by_path.items():
            with safe_open(path, framework="pt") as file:
                for name, stored in parts:
                    target = wanted[name]
                    in_stored, in_target, _ = _common(stored, target)
                    piece = file.get_slice(name)[in_stored] if in_stored else file.get_tensor(name)
                    if piece.dtype != target.tensor.dtype:
                        raise ValueError(f"{name} is {piece.dtype}; this trainer's is {target.tensor.dtype}")
                    target.tensor[in_target].copy_(piece)


def _common(stored: StoredSlice, target: TensorSlice) -> tuple[tuple[slice, ...], tuple[slice, ...], int]:
    """Overlap of two slices of a tensor: its box in `stored`, its box in `target`, and its number of elements."""
    in_stored: list[slice] = []
    in_target: list[slice] = []
    count = 1
    for start, size, wanted_start, wanted_size in zip(
        stored.position.start, stored.shape, target.position.start, target.tensor.shape, strict=True
    ):
        first, end = max(start, wanted_start), min(start + size, wanted_start + wanted_size)
        in_stored.append(slice(first - start, end - start))
        in_target.append(slice(first - wanted_start, end - wanted_start))
        count *= max(0, end - first)
    return tuple(in_stored), tuple(in_target), count


Trained = tuple[nn.Module, Sequence[Optimizer]]
"""A module, and the optimizers of its parameters."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """State of a trainer that a checkpoint holds, besides its version and torch's random state.

    Args:
        policy: Model, with its optimizers.
        adapter: Settings of the adapter if only its parameters are trained. They are recorded for `adapter_of`.
        others: Further modules with their optimizers, by name. An export leaves them out.
    """

    policy: Trained
    adapter: AdapterConfig | None = None
    others: Mapping[str, Trained] = field(default_factory=dict[str, Trained])

    def tree(self) -> dict[str, Any]:
        """All tensors and values, as nested dicts and lists. The tensors share the modules' memory."""
        state = _tree_of(*self.policy) | {"rng": torch.get_rng_state()}
        return state | {name: _tree_of(*each) for name, each in self.others.items()}

    def load(self, tree: Mapping[str, Any]) -> None:
        """Continue from values in the form of `tree`."""
        others = ((each, tree[name]) for name, each in self.others.items())
        for (module, its), own in [(self.policy, tree), *others]:
            model, optimizer = own["model"], own["optimizer"]
            set_state_dict(module, its, model_state_dict=model, optim_state_dict=optimizer, options=TRAINED)
        torch.set_rng_state(tree["rng"])


def _tree_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    model_state, optimizer_state = get_state_dict(model, optimizers, options=TRAINED)
    for optimizer in fresh:
        # `get_state_dict` has just made their state by a step without gradients, which must not count.
        for state in optimizer.state.values():
            if isinstance(step := state.get("step"), torch.Tensor):
                step.zero_()
    return {"model": model_state, "optimizer": optimizer_state}


STALL_S = 1800.0
"""Longest time that a write may make no progress, in seconds."""

COMPUTATION = {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
"""Options of torch's Adam that affect only the computation of an update, and that follow from the settings. Other
optimizers with the same state, such as one with offloaded moments, may lack them."""

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Options of torch's functions with which a checkpoint holds only trained parameters. An adapter's base stays in its
model folder. `_compare` checks that no parameter is missing."""

STATE = "state.json"
ADAPTER = "adapter"
FORMAT = 1


class TrainStateWriter:
    """Writes model, optimizers, version and torch's random state. Each rank writes its part, one checkpoint at a time.

    All ranks call `begin` at the same time, and then `finish`. A thread of each rank writes to disk; these threads
    communicate in their own process group.
    """

    def __init__(self, world: World) -> None:
        self._world = world.with_own_group()
        on_gpu = torch.cuda.is_available()
        # The memory of the copies is reused for the next checkpoint.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
            )
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._progress = WriteProgress()
        self._with_others = False  # whether this rank is waiting for others, which are still writing

    def begin(self, directory: Path, state: TrainState, version: int, files: Mapping[str, str]) -> None:
        """Copy the state, so that the next step may change it, and begin to write. First wait for the previous write,
        whose errors `finish` raises.

        Args:
            files: Texts of further files of the folder, by file name.

        Raises:
            CheckpointError: The previous write makes no progress, or an optimizer's state has a value that a checkpoint
                cannot hold.
        """
        self._wait()
        try:
            tensors, values = flatten(state.tree())
        except TypeError as error:
            raise CheckpointError(str(error)) from error
        owned = {name: own for name, tensor in tensors.items() if (own := owned_slice(tensor, self._world)) is not None}
        copies = self._stager.stage({name: each.tensor for name, each in owned.items()})
        assert not isinstance(copies, Future), "staging is synchronous"
        slices = {name: TensorSlice(copies[name], each.position) for name, each in owned.items()}
        adapter = None if state.adapter is None else state.adapter.model_dump(mode="json")
        text = json.dumps({"format": FORMAT, "version": version, "values": values, ADAPTER: adapter})
        # Monarch keeps the calling actor in the context.
        write = contextvars.copy_context().run
        self._writing = self._thread.submit(write, self._write, directory, slices, {**files, STATE: text})

    def finish(self) -> None:
        """Wait until the folder is complete.

        Raises:
            NoSpaceError: The disk is full; an existing folder is unchanged.
            CheckpointError: The checkpoint could not be written, or the write makes no progress.
        """
        self._wait()
        if self._writing is not None:
            self._writing.result()

    def _wait(self) -> None:
        while self._writing is not None:
            written = self._progress.num_bytes
            if wait([self._writing], timeout=STALL_S).done:
                return
            if self._progress.num_bytes == written and not self._with_others:
                raise CheckpointError(f"the write of a checkpoint has made no progress for {STALL_S:g} s")

    def _write(self, directory: Path, slices: Mapping[str, TensorSlice], files: Mapping[str, str]) -> None:
        name, checksum = f"rank-{self._world.rank}{SUFFIX}", None
        with self._agreed(directory), ExitStack() as stack:
            with self._agreed(directory):
                if self._world.is_first:
                    stack.enter_context(atomic_directory(directory))
            folder = temporary_of(directory)
            with self._agreed(directory):
                checksum = write_slices(folder / name, slices, self._progress)
            checksums = dict(self._world.gather((name, checksum)))
            if self._world.is_first:
                checksums |= {name: write_summed(folder / name, text) for name, text in files.items()}
                write_checksums(folder, {name: each for name, each in checksums.items() if each is not None})

    @contextmanager
    def _agreed(self, directory: Path) -> Generator[None]:
        """Raise an error of the block on all ranks if one of them has it. All ranks run the block."""
        problem: CheckpointError | None = None
        try:
            yield
        except CheckpointError as error:
            problem = error
        except Exception as error:
            problem = unwritten(directory, error)
        self._with_others = True
        try:
            self._world.agree(str(problem) if isinstance(problem, NoSpaceError) else None, NoSpaceError)
            self._world.agree(None if problem is None else str(problem), CheckpointError)
        except CheckpointError as error:
            raise error from problem
        finally:
            self._with_others = False


def adapter_of(directory: Path) -> AdapterConfig | None:
    """Read the settings of the adapter that a checkpoint holds; None if it holds all weights.

    Raises:
        DamagedCheckpointError: The checkpoint cannot be read.
    """
    try:
        described = parse_json((directory / STATE).read_text()).get(ADAPTER)
        return None if described is None else AdapterConfig.model_validate(described | {"start": None})
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(f"{directory / STATE} is damaged: {error}") from error


def load_train_state(directory: Path, state: TrainState, world: World) -> int:
    """Read a checkpoint of a `TrainStateWriter` into the modules and their optimizers. It may have been written by
    another number of ranks. All ranks call this at the same time. Nothing is changed before every file is verified.

    Returns:
        The version of the weights.

    Raises:
        DamagedCheckpointError: The checkpoint's bytes are not those that were written.
        CheckpointError: The checkpoint does not exist, or it is of another model or optimizer.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint at {directory}")
    problem = None
    try:
        verify(directory, share=world.rank, of=world.size)
    except DamagedCheckpointError as error:
        problem = str(error)
    world.agree(problem, DamagedCheckpointError)
    try:
        _check_adapter(adapter_of(directory), state.adapter)
        version = _read(directory, state)
    except Exception as error:
        problem = f"{directory} could not be read: {error}"
    world.agree(problem, CheckpointError)
    return version


def _check_adapter(found: AdapterConfig | None, expected: AdapterConfig | None) -> None:
    def describe(adapter: AdapterConfig | None) -> str:
        if adapter is None:
            return "all weights"
        return f"an adapter of rank {adapter.rank} and alpha {adapter.alpha:g}"

    if describe(found) != describe(expected):
        raise ValueError(
            f"it has {describe(found)}, and [training.adapter] asks for {describe(expected)}; set the table to that of "
            "its run, or start a new run"
        )


def _read(directory: Path, state: TrainState) -> int:
    stored = parse_json((directory / STATE).read_text())
    if stored["format"] != FORMAT:
        raise ValueError(
            f"it has format {stored['format']}, and this titan_rl reads {FORMAT}; continue with the version that wrote "
            "it, or start a new run with model.path set to a folder that titan-rl export of that version writes"
        )
    files = TensorFiles([directory / name for name in read_checksums(directory) if name.endswith(SUFFIX)])
    tree = state.tree()
    tensors, values = flatten(tree)
    found = _without_computation(stored["values"])
    try:
        _compare(files.names | found.keys(), tensors.keys() | _without_computation(values).keys())
        files.read({name: local_slice(tensor) for name, tensor in tensors.items()})
    except ValueError as error:
        raise ValueError(
            f"{error}: it belongs to another model or optimizer; set model.path to the model of its run, or start a "
            "new run"
        ) from error
    state.load(fill(tree, values | found))
    return stored["version"]


def _without_computation(values: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in values.items() if path.rpartition("/")[2] not in COMPUTATION}


def _compare(found: set[str], expected: set[str]) -> None:
    if lacking := sorted(expected - found):
        raise ValueError(f"it lacks {lacking[0]} and {len(lacking) - 1} more")
    if extra := sorted(found - expected):
        raise ValueError(f"it has {extra[0]} and {len(extra) - 1} more, which this trainer does not have")


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Collect the tensors and the plain values of nested dicts and lists, by path.

    Raises:
        TypeError: A value is neither a tensor nor plain, so a checkpoint cannot hold it.

    Example:
        flatten({"optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}})
        # {}, {"optimizer/param_groups/0/lr": 0.1, "optimizer/param_groups/0/betas": (0.9, 0.99)}
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for keys, value in tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]:
        if isinstance(value, torch.Tensor):
            tensors[_path(keys)] = value
        elif _is_plain(value):
            values[_path(keys)] = value
        else:
            raise TypeError(f"{_path(keys)} is a {type(value).__name__}, which a checkpoint cannot hold")
    return tensors, values


def fill(tree: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a tree with its plain values replaced by those of `values`. Tensors stay, and lists become tuples where the
    tree has tuples.

    Raises:
        KeyError: A value is missing in `values`.
    """

    def filled(keys: Sequence[Any], value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        new = values[_path(keys)]
        return tuple(new) if isinstance(value, tuple) else new

    return tree_map_with_path(filled, tree, is_leaf=_is_leaf)


def _path(keys: Sequence[Any]) -> str:
    return "/".join(str(each.key if isinstance(each, MappingKey) else each.idx) for each in keys)


def _is_leaf(value: object) -> bool:
    """Whether a value is a tensor or plain, or cannot be in a checkpoint."""
    return not isinstance(value, dict | list) or _is_plain(cast("object", value))


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast("list[object]", value)))
    return value is None or isinstance(value, bool | int | float | str)
